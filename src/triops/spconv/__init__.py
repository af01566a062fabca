"""The names of spconv 2.x over `triops.nn`: `import triops.spconv.pytorch as spconv` and a network runs as it is.

After `import triops.compat.spconv` or `triops activate`, `import spconv` gives these modules where no spconv is
installed.
"""

from triops.spconv import constants, core, pytorch, tools, utils
from triops.spconv._version import NUMBERS as SPCONV_VERSION_NUMBERS
from triops.spconv._version import VERSION as __version__
from triops.spconv.core import AlgoHint, ConvAlgo

__all__ = [
    "SPCONV_VERSION_NUMBERS",
    "AlgoHint",
    "ConvAlgo",
    "__version__",
    "constants",
    "core",
    "pytorch",
    "tools",
    "utils",
]
