"""torchsparse without a compiler: importing this module supplies `torchsparse`, unless it is installed.

The interfaces of 1.4 and of 2.1, on any device; docs/dropin/torchsparse.md says what differs and how the two are told
apart. The names are here too, to be used directly.
"""

from typing import Any

from triops.compat import _finder
from triops.compat.torchsparse import _generation, backend, backends, nn, tensor, utils
from triops.compat.torchsparse._generation import use
from triops.compat.torchsparse.operators import cat, generative_add
from triops.compat.torchsparse.tensor import SparseTensor
from triops.compat.torchsparse.utils.tune import tune
from triops.compat.torchsparse.version import __version__

__all__ = [
    "SparseTensor",
    "__version__",
    "backend",
    "backends",
    "cat",
    "generative_add",
    "nn",
    "tensor",
    "tune",
    "use",
    "utils",
]


def __getattr__(name: str) -> Any:
    """`PointTensor` was here before 2.1, which has it in `torchsparse.tensor` alone: who asks is an older program."""
    if name == "PointTensor":
        _generation.note_old_name()
        return tensor.PointTensor
    raise AttributeError(f"module 'torchsparse' has no attribute {name!r}")


_finder.install("torchsparse")
