"""Deformable DETR without a compiler: importing this module supplies `MultiScaleDeformableAttention`, unless compiled.

Deformable-DETR, DINO, Mask2Former, OneFormer, BEVFormer and others import a compiled module of that name; GroundingDINO
and detrex have the same functions in `groundingdino._C` and `detrex._C`. Sparse4D has a kindred one of its own, and so
has InternImage, the module `DCNv3`, which detrex has too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triops.compat import _aggregation, _dcnv3, _finder
from triops.compat._extension import Extension
from triops.compat._mmcv_attention import gradients, ms_deform_attn_forward

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ms_deform_attn_forward": ms_deform_attn_forward,
    "ms_deform_attn_backward": gradients,
}


def extension(name: str) -> Extension:
    if name == "DCNv3":
        _dcnv3.announce()
        return Extension(name, _dcnv3.FUNCTIONS)
    if name == "detrex._C":
        return Extension(name, FUNCTIONS | _dcnv3.FUNCTIONS)
    return Extension(name, _aggregation.FUNCTIONS if name.endswith(".deformable_aggregation_ext") else FUNCTIONS)


_finder.install("ms_deform_attn")
