"""Operators with one planted fault each, which the soak must find: `python -m triops.acceptance.soak --import planted`.

Each returns the cell of every value, `floor(values)`; what their CPU kernels do beside that is in `cpu.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planted import reference
from triops import _check, _op


def _check_values(values: Tensor) -> None:
    c = _check.Checker("planted")
    c.shape("values", values, "N")
    c.dtype("values", values, (torch.float32,))


def _fake(values: Tensor) -> Tensor:
    return torch.empty_like(values, dtype=torch.int32)


right = _op.define(reference.right, check=_check_values, fake=_fake)
writes_beyond = _op.define(reference.writes_beyond, check=_check_values, fake=_fake)
off_by_one_ulp = _op.define(reference.off_by_one_ulp, check=_check_values, fake=_fake)
shares_scratch = _op.define(reference.shares_scratch, check=_check_values, fake=_fake)
hangs = _op.define(reference.hangs, check=_check_values, fake=_fake)
segfaults = _op.define(reference.segfaults, check=_check_values, fake=_fake)
fails_unclearly = _op.define(reference.fails_unclearly, check=_check_values, fake=_fake)
accepts_anything = _op.define(reference.accepts_anything, check=lambda values: None, fake=_fake)
