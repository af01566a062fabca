"""`torchsparse.utils`."""

from triops.compat.torchsparse.utils.to_dense import to_dense
from triops.compat.torchsparse.utils.utils import make_divisible, make_ntuple, make_tensor

__all__ = ["make_divisible", "make_ntuple", "make_tensor", "to_dense"]
