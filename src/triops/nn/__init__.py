"""Thin modules over the functions of triops."""

from triops.nn.border_align import BorderAlign

__all__ = ["BorderAlign"]
