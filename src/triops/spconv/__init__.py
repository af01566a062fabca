"""The names of spconv 2.x over `triops.nn`: `import triops.spconv.pytorch as spconv` and a network runs as it is."""

from triops.spconv import core, pytorch
from triops.spconv.core import ConvAlgo

__version__ = "2.3.8"  # of spconv, whose interface this follows; programs ask for it
__all__ = ["ConvAlgo", "core", "pytorch"]
