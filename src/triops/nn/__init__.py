"""Thin modules over the functions of triops."""

from triops.nn.border_align import BorderAlign
from triops.nn.roiaware_pool3d import RoIAwarePool3d

__all__ = ["BorderAlign", "RoIAwarePool3d"]
