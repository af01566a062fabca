"""The operator mechanism: lazy imports, dispatch, fallback, logging, the reference backend."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest
import torch

import triops
from triops._op import OPERATORS

POINTS, BOXES = torch.zeros(1, 2, 3), torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0]]])


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    import os

    env = {**os.environ, "TRITON_INTERPRET": "0", **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, timeout=300
    )


def test_import_brings_in_neither_numba_nor_triton() -> None:
    done = python("import sys, triops; print(sorted({'numba', 'triton', 'matplotlib', 'typer'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_a_cpu_call_does_not_bring_in_triton() -> None:
    done = python("""
        import sys, torch, triops
        triops.points_in_boxes(torch.zeros(1, 2, 3), torch.zeros(1, 1, 7))
        print('numba' in sys.modules, 'triton' in sys.modules)
    """)
    assert done.stdout.strip() == "True False", done.stderr


def test_without_numba_the_reference_answers_and_one_warning_says_so() -> None:
    done = python("""
        import sys, warnings
        import importlib.util as u
        real = u.find_spec
        u.find_spec = lambda name, *a: None if name == 'numba' else real(name, *a)
        import torch, triops
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            for _ in range(3):
                out = triops.points_in_boxes(torch.zeros(1, 2, 3), torch.tensor([[[0., 0, 0, 2, 2, 2, 0]]]))
        print(out.tolist(), len(caught), 'pip install numba' in str(caught[0].message), 'numba' in sys.modules)
    """)
    assert done.stdout.strip() == "[[0, 0]] 1 True False", done.stderr


def test_the_raw_operator_checks_too() -> None:
    with pytest.raises(ValueError, match=r"points must have shape \[B, M, 3\]"):
        torch.ops.triops.points_in_boxes(torch.zeros(5, 3), BOXES, "center", 0.0)


def test_an_integer_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="offset must fit in 64 bits"):
        triops.bbox_overlaps(torch.zeros(1, 4), torch.zeros(1, 4), offset=2**70)


def test_meta_tensors_are_checked_and_shaped() -> None:
    out = triops.points_in_boxes(POINTS.to("meta"), BOXES.to("meta"))
    assert (out.device.type, out.shape, out.dtype) == ("meta", (1, 2), torch.int32)
    with pytest.raises(ValueError, match="boxes must have shape"):
        triops.points_in_boxes(POINTS.to("meta"), BOXES[0].to("meta"))


def test_inputs_that_require_grad_are_welcome_and_integers_carry_no_gradient() -> None:
    out = triops.points_in_boxes(POINTS.clone().requires_grad_(), BOXES.clone().requires_grad_())
    assert not out.requires_grad


def test_compiled_with_inductor_it_gives_the_same() -> None:
    import shutil

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    compiled = torch.compile(lambda p, b: triops.points_in_boxes(p * 1.0, b) + 1, fullgraph=True)
    assert torch.equal(compiled(POINTS, BOXES), triops.points_in_boxes(POINTS, BOXES) + 1)


def test_a_bad_call_under_compile_says_what_is_wrong() -> None:
    compiled = torch.compile(triops.points_in_boxes, backend="eager")
    with pytest.raises(Exception, match=r"points must have shape \[B, M, 3\], got \[2, 3\]"):
        compiled(POINTS[0], BOXES)


def test_debug_log_is_one_line_a_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "triops"):
        triops.points_in_boxes(POINTS, BOXES)
        with triops.reference_backend():
            triops.points_in_boxes(POINTS, BOXES)
    first, second = caplog.messages
    assert first.startswith("points_in_boxes(points=float32[1, 2, 3]@cpu, boxes=float32[1, 1, 7]@cpu, z_origin=center")
    assert first.endswith("-> cpu (device)")
    assert second.endswith("-> reference (forced)")


def test_the_reference_backend_can_be_forced_from_outside() -> None:
    code = """
        import sys, torch, triops
        triops.points_in_boxes(torch.zeros(1, 2, 3), torch.zeros(1, 1, 7)); print('numba' in sys.modules)
    """
    assert python(code, TRIOPS_BACKEND="reference").stdout.strip() == "False"


def test_every_operator_names_its_backends() -> None:
    for operator in OPERATORS.values():
        assert operator.backends == ["reference", "cpu", "gpu"], operator


def test_an_operator_cannot_be_defined_twice() -> None:
    from triops import _op
    from triops.ops.points_in_boxes import reference

    with pytest.raises(ValueError, match="defined twice"):
        _op.define(reference.points_in_boxes, check=lambda *a: None, fake=lambda *a: None)


def test_a_tiny_call_is_cheap() -> None:
    """The bar is 20 us on an idle machine; here only that nothing has gone badly wrong."""
    import timeit

    triops.points_in_boxes(POINTS, BOXES)
    best = min(timeit.repeat(lambda: triops.points_in_boxes(POINTS, BOXES), number=200, repeat=5)) / 200
    assert best < 100e-6
