"""The names of spconv 2.x over `triops.nn`: `import triops.spconv.pytorch as spconv` and a network runs as it is.

After `import triops.compat.spconv` or `triops activate`, `import spconv` gives these modules where no spconv is
installed.
"""

from triops.spconv import constants, core, pytorch, tools, utils
from triops.spconv.core import AlgoHint, ConvAlgo

__version__ = "2.3.8"  # of spconv, whose interface this follows; programs ask for it
SPCONV_VERSION_NUMBERS = [int(part) for part in __version__.split(".")]
__all__ = ["SPCONV_VERSION_NUMBERS", "AlgoHint", "ConvAlgo", "constants", "core", "pytorch", "tools", "utils"]
