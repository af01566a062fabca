"""Names of `cumm.tensorview`: tensors that hold arrays on their way into and out of spconv's voxel generators.

>>> import numpy as np
>>> import triops.spconv.cumm.tensorview as tv
>>> tv.from_numpy(np.arange(3.0)).numpy()
array([0., 1., 2.])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from triops.spconv.cumm.tensorview import gemm

Array = np.ndarray[Any, Any]

# cumm's numbers for dtypes
float32, int32, int16, int8, float64, bool_, uint8, float16, int64 = range(9)
bfloat16 = 12
unknown = -1
_DTYPES = {
    float32: torch.float32, int32: torch.int32, int16: torch.int16, int8: torch.int8, float64: torch.float64,
    bool_: torch.bool, uint8: torch.uint8, float16: torch.float16, int64: torch.int64, bfloat16: torch.bfloat16,
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


class Tensor:
    """A torch tensor with the members of cumm's tensor that programs use; no data is copied."""

    def __init__(self, torch_tensor: torch.Tensor | None = None) -> None:
        self.torch_tensor = torch.zeros(0) if torch_tensor is None else torch_tensor

    @property
    def shape(self) -> list[int]:
        return list(self.torch_tensor.shape)

    @property
    def ndim(self) -> int:
        return self.torch_tensor.dim()

    @property
    def dtype(self) -> int:
        """cumm's number for the dtype; `unknown` where it has none."""
        return _NUMBERS.get(self.torch_tensor.dtype, unknown)

    @property
    def device(self) -> int:
        """The number of the GPU, or -1 on a CPU."""
        return self.torch_tensor.get_device()

    @property
    def size(self) -> int:
        return self.torch_tensor.numel()

    def dim(self, axis: int) -> int:
        return self.torch_tensor.shape[axis]

    def empty(self) -> bool:
        return self.torch_tensor.numel() == 0

    def numpy(self) -> Array:
        """A copy on the CPU."""
        return self.numpy_view().copy()

    def numpy_view(self) -> Array:
        """The array itself where it is on the CPU, else a copy."""
        array: Array = self.torch_tensor.detach().cpu().numpy()
        return array

    def clone(self) -> Tensor:
        return Tensor(self.torch_tensor.clone())

    def cpu(self) -> Tensor:
        return Tensor(self.torch_tensor.cpu())

    def cuda(self) -> Tensor:
        return Tensor(self.torch_tensor.cuda())

    def zero_(self) -> Tensor:
        self.torch_tensor.zero_()
        return self

    def fill_(self, value: float) -> Tensor:
        self.torch_tensor.fill_(value)
        return self

    def view(self, *shape: Any) -> Tensor:
        return Tensor(self.torch_tensor.view(*shape))

    def slice_first_axis(self, start: int, end: int) -> Tensor:
        return Tensor(self.torch_tensor[start:end])

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.torch_tensor[index])

    def __len__(self) -> int:
        return len(self.torch_tensor)

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.torch_tensor.dtype}, device={self.torch_tensor.device})"


def from_numpy(arr: Array) -> Tensor:
    """A tensor that shares the array's memory."""
    return Tensor(torch.from_numpy(arr))


def zeros(
    shape: Sequence[int], dtype: Any = np.float32, device: int = -1, pinned: bool = False, managed: bool = False
) -> Tensor:
    """A tensor of zeros; `dtype` is cumm's number or NumPy's type, `device` the number of a GPU or -1."""
    return full(shape, 0, dtype, device, pinned, managed)


def empty(
    shape: Sequence[int], dtype: Any = np.float32, device: int = -1, pinned: bool = False, managed: bool = False
) -> Tensor:
    """As `zeros`: memory that nobody wrote is nothing to rely on."""
    return full(shape, 0, dtype, device, pinned, managed)


def full(
    shape: Sequence[int], val: float, dtype: Any = np.float32, device: int = -1, pinned: bool = False,
    managed: bool = False,
) -> Tensor:  # fmt: skip
    """A tensor of one value; arguments as in `zeros`."""
    where = "cpu" if device < 0 else f"cuda:{device}"
    kind = _DTYPES[dtype] if isinstance(dtype, int) else torch.from_numpy(np.empty(0, dtype)).dtype
    return Tensor(torch.full(list(shape), val, dtype=kind, device=where, pin_memory=pinned and device < 0))


__all__ = ["Tensor", "empty", "from_numpy", "full", "gemm", "zeros"]
