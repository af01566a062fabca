"""Names of `spconv.core`."""

from enum import Enum


class ConvAlgo(Enum):
    """spconv's choice of algorithms. Layers take it and ignore it: there is one algorithm here."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2
