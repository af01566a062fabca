"""Names of `spconv.constants`. Programs set some of them; only SAVED_WEIGHT_LAYOUT says anything to triops."""

import os
from pathlib import Path

PACKAGE_NAME = "spconv"
PACKAGE_ROOT = Path(__file__).parent.resolve()
EDITABLE_INSTALLED = False
DISABLE_JIT = True
NDIM_DONT_CARE = 3
FILTER_HWIO = False
ALL_WEIGHT_IS_KRSC = True
BOOST_ROOT = None

# In which layout the checkpoints that are loaded hold their weights: K are output channels, R and S the axes of the
# kernel, C input channels. Empty: that of spconv 2.2 and later (KRSC), or of spconv 1 (RSCK) where the shape says so.
SAVED_WEIGHT_LAYOUT = os.environ.get("SPCONV_SAVED_WEIGHT_LAYOUT", "")
if SAVED_WEIGHT_LAYOUT not in ("", "KRSC", "RSKC", "RSCK"):
    raise ValueError(f"SPCONV_SAVED_WEIGHT_LAYOUT must be KRSC, RSKC or RSCK, got {SAVED_WEIGHT_LAYOUT!r}")

SPCONV_ALLOW_TF32 = False
SPCONV_BWD_SPLITK = [1, 2, 4, 8, 16, 32, 64]
SPCONV_CPP_GEMM = False
SPCONV_CPP_INDICE_PAIRS = False
SPCONV_CPP_INDICE_PAIRS_IGEMM = False
SPCONV_DEBUG_CPP_ONLY = False
SPCONV_DEBUG_NVRTC_KERNELS = False
SPCONV_DEBUG_SAVE_PATH = ""
SPCONV_DEBUG_WEIGHT = False
SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE = 1.1
SPCONV_DO_SORT = True
SPCONV_FX_TRACE_MODE = False
SPCONV_INT8_DEBUG = False
SPCONV_USE_DIRECT_TABLE = True


class AllocKeys:
    """The names of spconv's buffers. Nothing here allocates under them."""

    DFilters = "DFilters"
    DIn = "DIn"
    Features = "Features"
    Filters = "Filters"
    HashKOrKV = "HashKOrKV"
    HashV = "HashV"
    IndiceNumPerLoc = "IndiceNumPerLoc"
    IndicePairsUniq = "IndicePairsUniq"
    IndicePairsUniqBackup = "IndicePairsUniqBackup"
    InpBuffer = "InpBuffer"
    MaskArgSort = "MaskArgSort"
    MaskArgSortBwd = "MaskArgSortBwd"
    MaskOutputFwd = "MaskOutputFwd"
    OutBp = "OutBp"
    OutBuffer = "OutBuffer"
    OutFeatures = "OutFeatures"
    OutIndices = "OutIndices"
    PairBwd = "PairBwd"
    PairFwd = "PairFwd"
    PairMask = "PairMask"
    PairMaskBwd = "PairMaskBwd"
    ThrustTemp = "ThrustTemp"
    TightUniqueCount = "TightUniqueCount"
