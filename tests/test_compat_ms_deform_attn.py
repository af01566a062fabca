"""Facts about `MultiScaleDeformableAttention` and mmcv's names for deformable attention."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import triops
import triops.compat.mmcv
import triops.compat.ms_deform_attn
from triops.compat import _finder
from triops.ops.ms_deform_attn.samples import attention

NAME = "MultiScaleDeformableAttention"


@pytest.fixture
def supplied(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    _finder.install("ms_deform_attn")
    yield
    sys.modules.pop(NAME, None)


def test_the_compiled_module_of_deformable_detr_is_supplied(supplied) -> None:
    module = importlib.import_module(NAME)
    value, _, _, locations, weights = args = attention(2, [(5, 6), (3, 3)], 2, 4, 2, 7)(torch.float32)
    out = module.ms_deform_attn_forward(*args, 64)
    assert torch.equal(out, triops.ms_deform_attn(*args))
    grads = module.ms_deform_attn_backward(*args, torch.ones_like(out), 64)
    assert [g.shape for g in grads] == [value.shape, locations.shape, weights.shape]


def test_a_compiled_module_wins(supplied, tmp_path, monkeypatch) -> None:
    (tmp_path / f"{NAME}.py").write_text("compiled = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module(NAME).compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mmcvs_functions_take_the_dtypes_that_autocast_mixes(dtype: torch.dtype) -> None:
    ext = triops.compat.mmcv.extension("mmcv._ext")
    value, shapes, starts, locations, weights = attention(1, [(5, 6)], 2, 4, 2, 7)(torch.float32)
    for mixed in (torch.float32, torch.float16):
        args = value.to(dtype), shapes, starts, locations, weights.to(mixed)
        out = ext.ms_deform_attn_forward(*args, im2col_step=64)
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.float(), triops.ms_deform_attn(value, shapes, starts, locations, weights), rtol=1e-2, atol=1e-2
        )
        grads = [torch.full_like(t, 9) for t in (args[0], locations, args[4])]
        ext.ms_deform_attn_backward(*args, torch.ones_like(out), *grads, im2col_step=64)
        assert all(g.abs().max() < 9 or g.shape == locations.shape for g in grads)
