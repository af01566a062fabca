"""Names of `cumm`, the library under spconv, as far as programs that use spconv touch them."""

from triops.spconv.cumm import tensorview

__version__ = "0.7.11"  # of cumm, whose interface this follows
__all__ = ["tensorview"]
