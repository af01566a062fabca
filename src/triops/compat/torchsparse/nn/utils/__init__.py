"""`torchsparse.nn.utils`."""

from triops.compat.torchsparse.nn.utils.apply import fapply
from triops.compat.torchsparse.nn.utils.kernel import get_kernel_offsets

__all__ = ["fapply", "get_kernel_offsets"]
