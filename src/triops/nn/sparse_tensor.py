"""SparseConvTensor: features at the active sites of a batch of grids, and the rulebooks found for them so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from triops import _check
from triops._schema import is_plain
from triops.ops.rulebook.geometry import MAX_EXTENT
from triops.ops.sparse_dense import site_rows, sparse_to_dense

if TYPE_CHECKING:
    from triops.ops.rulebook import Rulebook


class IndiceData:
    """A rulebook under its `indice_key`, with the geometry it was made for."""

    def __init__(self, rulebook: Rulebook, geometry: dict[str, Any]) -> None:
        self.rulebook = rulebook
        self.geometry = geometry

    @property
    def is_subm(self) -> bool:
        return bool(self.geometry["subm"])

    @property
    def ksize(self) -> list[int]:
        return list(self.rulebook.kernel_size)

    @property
    def indices(self) -> Tensor:
        return self.rulebook.in_indices

    @property
    def out_indices(self) -> Tensor:
        return self.rulebook.out_indices

    @property
    def indice_pairs(self) -> Tensor:
        """int32 [2, K, N]: under each kernel offset the input rows that meet an output, ascending, and the output rows
        that they meet; -1 behind. Worked out from the tables of the rulebook each time."""
        scatter = self.rulebook.scatter
        met = scatter >= 0
        inputs = met.int().argsort(dim=1, descending=True, stable=True)
        valid = torch.arange(scatter.shape[1], device=scatter.device) < met.sum(1, keepdim=True)
        return torch.stack([inputs.int(), scatter.gather(1, inputs)]).where(valid, -1)

    @property
    def indice_pair_num(self) -> Tensor:
        """int32 [K]: how many pairs each kernel offset has; as spconv counts them, 0 from a submanifold's centre on."""
        numbers = (self.rulebook.scatter >= 0).sum(1, dtype=torch.int32)
        if self.is_subm:
            numbers[len(numbers) // 2 :] = 0
        return numbers

    @property
    def stride(self) -> list[int]:
        return list(self.geometry.get("stride", [1] * len(self.ksize)))

    @property
    def padding(self) -> list[int]:
        return list(self.geometry.get("padding", [0] * len(self.ksize)))

    @property
    def dilation(self) -> list[int]:
        return list(self.geometry["dilation"])

    @property
    def spatial_shape(self) -> list[int]:
        return list(self.rulebook.in_shape)

    @property
    def out_spatial_shape(self) -> list[int]:
        return list(self.rulebook.out_shape)


class SparseConvTensor:
    """Features at the active sites of a batch of grids: what sparse layers take and give.

    Args:
        features: float [N, C], one row for each active site.
        indices: int32 (or int64) [N, 1 + D], D from 1 to 4: batch and position of each site, in any order. Sites
            outside the grid or the batch count as inactive; of several rows at one site the lowest stands for it.
        spatial_shape: the D sizes of a grid.
        batch_size: the number of grids.
        indice_dict: rulebooks by `indice_key`; layers look here before they build one.
        grid, voxel_num, benchmark, permanent_thrust_allocator, enable_timer, force_algo: taken for the sake of
            programs written for spconv, without effect.

    Behind a layer with a `capacity` the number of rows is fixed, and those behind the true number are inactive.
    `active` int32 [1] is that number, None where all rows count; `limits` lists the numbers and capacities of all such
    layers so far, and `capacity_exceeded()` says whether any had more sites than room.

    Features cannot be assigned: `x = x.replace_feature(f(x.features))` gives a tensor with the same sites.
    `thrust_allocator`, `_timer` and `int8_scale` are there to be copied from tensor to tensor, as programs written for
    spconv do.

    >>> import torch
    >>> x = SparseConvTensor(torch.tensor([[5.0], [7.0]]), torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), [4], 2)
    >>> x.dense()
    tensor([[[0., 0., 5., 0.]],
    <BLANKLINE>
            [[7., 0., 0., 0.]]])
    >>> x.replace_feature(-x.features)
    SparseConvTensor(2 sites, 1 channels, spatial_shape=[4], batch_size=2)
    """

    def __init__(
        self, features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int,
        grid: Tensor | None = None, voxel_num: Tensor | None = None, indice_dict: dict[str, Any] | None = None,
        benchmark: bool = False, permanent_thrust_allocator: bool = False, enable_timer: bool = False,
        force_algo: Any = None,
    ) -> None:  # fmt: skip
        check = _check.Checker("SparseConvTensor")
        _check_features(features)
        _check_dense("indices", indices)
        if indices.dim() != 2 or not 2 <= indices.shape[1] <= 5:
            check.fail(f"indices must have shape [N, 1 + D] with D from 1 to 4, got {list(indices.shape)}")
        check.dtype("indices", indices, _check.INDICES)
        if features.device != indices.device:
            check.same_device(features=features, indices=indices)
        sizes = check.integers("spatial_shape", spatial_shape)
        if len(sizes) != indices.shape[1] - 1:
            entries, columns = indices.shape[1] - 1, "one for each column of indices behind the batch element"
            remedy = "; is the column of the batch element missing in indices?" if len(sizes) == entries + 1 else ""
            check.fail(f"spatial_shape must have {entries} entries, {columns}, got {sizes}{remedy}")
        if any(not 1 <= size <= MAX_EXTENT for size in sizes):
            check.fail(f"spatial_shape must be at least 1 on every axis, and below 2**31, got {sizes}")
        if not same_size(features, indices):
            check.fail(f"features and indices must have one row a site, got {features.shape[0]} and {indices.shape[0]}")
        self._features = features
        self.indices = indices
        self.spatial_shape = sizes
        self.batch_size = check.integer("batch_size", _number_in(batch_size), 1, MAX_EXTENT)
        self.indice_dict: dict[str, Any] = {} if indice_dict is None else indice_dict
        self.grid = grid
        self.voxel_num = voxel_num
        self.benchmark = benchmark
        self.benchmark_record: dict[str, Any] = {}
        self.force_algo = force_algo
        self.thrust_allocator: Any = None
        self._timer: Any = None
        self.int8_scale: Any = None
        self.active: Tensor | None = None
        self.made_by: Rulebook | None = None  # whose outputs these sites are: it saves the next layer a search
        self.limits: tuple[tuple[Tensor, int], ...] = ()

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """The sites of a dense channels-last tensor [B, *spatial_shape, C] that hold anything but zeros.

        >>> import torch
        >>> x = SparseConvTensor.from_dense(torch.tensor([[[0.0], [3.0]]]))
        >>> x.indices, x.features
        (tensor([[0, 1]], dtype=torch.int32), tensor([[3.]]))
        """
        if not isinstance(x, Tensor) or not 3 <= x.dim() <= 6:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"SparseConvTensor.from_dense: x must have shape [B, *spatial_shape, C], got {got}")
        indices = (x != 0).any(-1).nonzero()
        return cls(x[tuple(indices.unbind(1))], indices.int(), x.shape[1:-1], x.shape[0])

    @property
    def features(self) -> Tensor:
        return self._features

    @features.setter
    def features(self, value: Tensor) -> None:
        raise ValueError("SparseConvTensor: features cannot be assigned; write x = x.replace_feature(new_features)")

    def replace_feature(self, feature: Tensor) -> SparseConvTensor:
        """The same sites and rulebooks with other features [N, any]."""
        _check_features(feature)
        return self._with(feature, self.indices, self.spatial_shape, self.indice_dict)

    def shadow_copy(self) -> SparseConvTensor:
        """A new object with the same members."""
        return self._with(self._features, self.indices, self.spatial_shape, self.indice_dict)

    def _with(
        self, features: Tensor, indices: Tensor, spatial_shape: list[int], indice_dict: dict[str, Any]
    ) -> SparseConvTensor:
        """A tensor of the same batch, of members that need no check."""
        new = object.__new__(type(self))
        new._features = features
        new.indices = indices
        new.spatial_shape = spatial_shape
        new.batch_size = self.batch_size
        new.indice_dict = indice_dict
        new.grid = self.grid
        new.voxel_num = self.voxel_num
        new.benchmark = self.benchmark
        new.benchmark_record = self.benchmark_record
        new.force_algo = self.force_algo
        new.active = self.active
        new.made_by = self.made_by
        new.limits = self.limits
        new.thrust_allocator = self.thrust_allocator
        new._timer = self._timer
        new.int8_scale = self.int8_scale
        return new

    @property
    def spatial_size(self) -> int:
        """The number of sites of one grid, active or not."""
        return math.prod(self.spatial_shape)

    @property
    def is_quantized(self) -> bool:
        return self._features.is_quantized

    def capacity_exceeded(self) -> Tensor:
        """bool [1], on the tensor's device: whether a layer before this one had more output sites than its capacity.

        Then some are missing, and the features are not to be used. Reading it is the one place that waits for a GPU.
        """
        exceeded = torch.zeros(1, dtype=torch.bool, device=self.indices.device)
        for count, capacity in self.limits:
            exceeded = exceeded | (count > capacity)
        return exceeded

    def find_indice_pair(self, key: str | None) -> IndiceData | None:
        """What is known under an `indice_key`, or None."""
        return None if key is None else self.indice_dict.get(key)

    def dense(self, channels_first: bool = True) -> Tensor:
        """[B, C, *spatial_shape], or [B, *spatial_shape, C], with zeros at inactive sites."""
        rows = site_rows(self.indices, self.batch_size, self.spatial_shape)
        return sparse_to_dense(self._features, rows, channels_first)

    def minus(self) -> SparseConvTensor:
        return self.replace_feature(-self._features)

    def __add__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        if isinstance(other, SparseConvTensor):
            if not equal_sites(self.indices, other.indices):
                raise ValueError(f"SparseConvTensor: tensors that are added must have {SAME_SITES}")
            return self.replace_feature(self._features + other._features)
        if isinstance(other, Tensor):
            return self.replace_feature(self._features + other)
        return NotImplemented

    __radd__ = __iadd__ = __add__

    def __repr__(self) -> str:
        return (
            f"SparseConvTensor({self._features.shape[0]} sites, {self._features.shape[1]} channels, "
            f"spatial_shape={self.spatial_shape}, batch_size={self.batch_size})"
        )


def same_size(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have as many rows. While tracing, sizes may be unknown: then it is checked at run time."""
    if torch.compiler.is_compiling():
        torch._check(a.shape[0] == b.shape[0])
        return True
    return a.shape[0] == b.shape[0]


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two names stand for one tensor, or for one piece of memory seen in one way."""
    if a is b:
        return True
    if torch.compiler.is_compiling():  # addresses are not known
        return False
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


SAME_SITES = "the same sites in the same order; triops.spconv.pytorch.functional.sparse_add adds others"


def equal_sites(a: Tensor, b: Tensor) -> bool:
    """Whether the rows of two tensors stand for the same sites in the same order.

    Positions are looked at on a CPU, and on a GPU with TRIOPS_CHECK=1, since it waits; not while tracing.
    """
    if same_tensor(a, b) or torch.compiler.is_compiling():
        return True
    if a.shape != b.shape:
        return False
    visible = is_plain(a) and is_plain(b) and (a.device.type == "cpu" or (a.is_cuda and _check.strict()))
    return not visible or a.device != b.device or bool((a == b).all())


def _check_dense(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"SparseConvTensor: {name} must be a Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ValueError(f"SparseConvTensor: {name} must be a dense tensor, got one of layout {value.layout}")


def _check_features(features: Any) -> None:
    _check_dense("features", features)
    if features.dim() != 2:
        raise ValueError(f"SparseConvTensor: features must have shape [N, C], got {list(features.shape)}")


def _number_in(value: Any) -> Any:
    """Networks pass `coors[-1, 0] + 1` for a batch size: an integer tensor of one element is read."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in _check.INDICES:
        return int(value)
    return value
