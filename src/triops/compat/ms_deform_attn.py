"""Deformable DETR without a compiler: importing this module supplies `MultiScaleDeformableAttention`, unless compiled.

Deformable-DETR, DINO, Mask2Former, OneFormer, BEVFormer and others import a compiled module of that name; GroundingDINO
and detrex have the same functions in `groundingdino._C` and `detrex._C`, and Sparse4D a kindred one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triops.compat import _aggregation, _finder
from triops.compat._extension import Extension
from triops.compat._mmcv_attention import gradients, ms_deform_attn_forward

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ms_deform_attn_forward": ms_deform_attn_forward,
    "ms_deform_attn_backward": gradients,
}


def extension(name: str) -> Extension:
    return Extension(name, _aggregation.FUNCTIONS if name.endswith(".deformable_aggregation_ext") else FUNCTIONS)


_finder.install("ms_deform_attn")
