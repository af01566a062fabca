"""Names of `spconv.core`."""

from enum import Enum

NDIM_DONT_CARE = 3


class ConvAlgo(Enum):
    """spconv's choice of algorithms. Layers take it and ignore it: there is one algorithm here."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class AlgoHint(Enum):
    """What spconv's tuner is told to tune for. Nothing here reads it."""

    NoHint = 0
    Fowrard = 1  # spelt as in spconv
    BackwardInput = 2
    BackwardWeight = 4


__all__ = ["NDIM_DONT_CARE", "AlgoHint", "ConvAlgo"]
