"""Deformable DETR without a compiler: importing this module supplies `MultiScaleDeformableAttention`, unless compiled.

Deformable-DETR, DINO, Mask2Former, GroundingDINO, BEVFormer and others import a compiled module of that name.
"""

from __future__ import annotations

from triops.compat import _finder
from triops.compat._extension import Extension
from triops.compat._mmcv_attention import gradients, ms_deform_attn_forward


def extension(name: str) -> Extension:
    return Extension(name, {"ms_deform_attn_forward": ms_deform_attn_forward, "ms_deform_attn_backward": gradients})


_finder.install("ms_deform_attn")
