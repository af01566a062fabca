"""What sparse convolutions and pools share: a window that slides over the grid, and the rulebook it makes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from triops import _check
from triops.nn.sparse_modules import SparseModule
from triops.nn.sparse_tensor import IndiceData, SparseConvTensor, same_size, same_tensor
from triops.ops.rulebook import Rulebook
from triops.ops.rulebook.geometry import MAX_EXTENT, MAX_KERNEL_VOLUME, Ints, as_list


class _Beside(threading.local):
    stream: torch.cuda.Stream | None = None
    kept: list[Rulebook]


_beside = _Beside()


@contextmanager
def rulebooks_beside() -> Iterator[None]:
    """Inside this block, which must lie inside of a capture, rulebooks are made on a stream of their own.

    They depend on sites alone, so that in a graph they run beside the convolutions of the layers before. What was made
    is kept until the streams have met again: its memory must not be used anew while the other stream may read it.
    """
    main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(main)
    _beside.stream, _beside.kept = beside, []
    try:
        yield
    finally:
        main.wait_stream(beside)
        _beside.stream, _beside.kept = None, []


class Window(SparseModule):
    """The base of layers that read a rulebook: geometry, `indice_key`, checks of the input."""

    capacity: int | None = None  # of output sites, for layers that make new ones; None: as many as there are
    inverse = False  # True: the layer walks the rulebook of its `indice_key` backwards
    max_num_voxels_during_training: Tensor

    def __init__(
        self, ndim: int, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints, output_padding: Ints,
        subm: bool, transposed: bool, indice_key: str | None, record_voxel_count: bool, name: str | None,
    ) -> None:  # fmt: skip
        super().__init__(name=name)
        check = _check.Checker(self.label)
        self.ndim = check.integer("ndim", ndim, 1, 4)
        self.kernel_size = self._list("kernel_size", kernel_size, 1)
        self.stride = self._list("stride", stride, 1)
        self.padding = self._list("padding", padding, 0)
        self.dilation = self._list("dilation", dilation, 1)
        self.output_padding = self._list("output_padding", output_padding, 0)
        if indice_key is not None and not isinstance(indice_key, str):
            self._fail(f"indice_key must be a string or None, got {type(indice_key).__name__}", TypeError)
        self.subm = subm = check.flag("subm", subm)
        self.transposed = check.flag("transposed", transposed)
        self.indice_key = indice_key
        self.record_voxel_count = record_voxel_count = check.flag("record_voxel_count", record_voxel_count)
        if self.volume > MAX_KERNEL_VOLUME:
            self._fail(f"kernel_size may hold at most {MAX_KERNEL_VOLUME} offsets, got {self.kernel_size}")
        self._check_window()
        if record_voxel_count and not subm:
            self.register_buffer("max_num_voxels_during_training", torch.zeros(1, dtype=torch.int32))

    def _check_window(self) -> None:
        """Refuse a geometry that no layer can have, when it is built."""
        self._check_odd()
        if self.subm and any(s != 1 for s in self.stride):
            self._fail(f"a submanifold layer keeps its sites and needs stride 1, got {self.stride}")

    def _check_odd(self) -> None:
        if self.subm and any(k % 2 == 0 for k in self.kernel_size):
            self._fail(f"a submanifold layer needs an odd kernel_size on every axis, got {self.kernel_size}")

    def get_max_num_voxels(self) -> Tensor | None:
        """The largest number of output sites seen, if `record_voxel_count`."""
        return self._buffers.get("max_num_voxels_during_training")

    def _list(self, name: str, value: Any, least: int) -> list[int]:
        if hasattr(value, "tolist") and not isinstance(value, Tensor):  # a NumPy array
            value = value.tolist()
        values = as_list(type(self).__name__, name, value, self.ndim)
        if len(values) != self.ndim:
            self._fail(f"{name} must be an integer or {self.ndim} integers, got {values}")
        if any(v < least for v in values):
            self._fail(f"{name} must be at least {least} on every axis, got {values}")
        if any(v > MAX_EXTENT for v in values):
            self._fail(f"{name} must stay below 2**31 on every axis, got {values}")
        return values

    def _check_input(self, input: Any) -> None:
        self.require_sparse(input)
        if len(input.spatial_shape) != self.ndim:
            self._fail(
                f"input must have {self.ndim} spatial dimensions, got {len(input.spatial_shape)} "
                f"(spatial_shape {input.spatial_shape})"
            )
        if not same_size(input.features, input.indices):
            self._fail(
                f"input must have one row of features a site, got {input.features.shape[0]} rows and "
                f"{input.indices.shape[0]} sites"
            )

    def _geometry(self) -> dict[str, Any]:
        geometry: dict[str, Any] = {"subm": self.subm, "transposed": self.transposed, "kernel_size": self.kernel_size}
        if not self.subm:  # which fixes stride and padding
            geometry.update(stride=self.stride, padding=self.padding, output_padding=self.output_padding)
        geometry["dilation"] = self.dilation
        return geometry

    def _rulebook(self, input: SparseConvTensor) -> Rulebook:
        """The rulebook of this layer on this input: what an earlier layer left under its key, or a new one."""
        known = input.find_indice_pair(self.indice_key)
        if self.inverse:
            return self._inverse_rulebook(input, known)
        if known is not None:
            self._check_fit(known, input)
            if same_tensor(known.indices, input.indices):
                return known.rulebook
        sites = input.indices, input.batch_size, input.spatial_shape
        before = input.made_by
        if before is not None and not same_tensor(before.out_indices, input.indices):
            before = None
        if self.subm:
            ranks = None if before is None else before.out_index
            made = Rulebook.submanifold(*sites, self.kernel_size, self.dilation, ranks)
            made.in_count = made.out_count = input.active
            return made
        owners = None if before is None else before.owners
        made = Rulebook.sparse(
            *sites, self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding, self.transposed,
            self.capacity, owners, torch.is_grad_enabled(),
        )  # fmt: skip
        made.in_count = input.active
        return made

    def _rulebooks(self, input: SparseConvTensor, prepare: Callable[[Rulebook], Rulebook]) -> tuple[Rulebook, Rulebook]:
        """The rulebook of this layer on this input, as it was made and as `prepare` leaves it."""
        beside = _beside.stream
        if beside is None:
            made = self._rulebook(input)
            return made, prepare(made)
        main = torch.cuda.current_stream()
        if input.made_by is None or not same_tensor(input.made_by.out_indices, input.indices):
            beside.wait_stream(main)  # the sites were made there
        with torch.cuda.stream(beside):
            made = self._rulebook(input)
            prepared = prepare(made)
        main.wait_stream(beside)
        _beside.kept.append(prepared)
        return made, prepared

    def _passed_on(self, input: SparseConvTensor, rulebook: Rulebook) -> dict[str, Any]:
        """The `indice_dict` of the output: that of the input, with this layer's rulebook as it is now."""
        if self.indice_key is None:
            return input.indice_dict
        known = input.indice_dict.get(self.indice_key)
        if self.inverse:
            assert known is not None
            made = IndiceData(rulebook.inverse(), known.geometry)
        elif known is not None and known.rulebook is rulebook:
            return input.indice_dict
        else:
            made = IndiceData(rulebook, self._geometry())
        # A copy: tensors that share the input's dictionary may branch off with the same key for other sites.
        return {**input.indice_dict, self.indice_key: made}

    def _inverse_rulebook(self, input: SparseConvTensor, known: IndiceData | None) -> Rulebook:
        if known is None:
            keys = ", ".join(map(repr, input.indice_dict)) or "none"
            self._fail(
                f"no layer before this one left a rulebook under indice_key {self.indice_key!r} (known keys: {keys})"
            )
        assert known is not None
        if known.is_subm:
            self._fail(f"indice_key {self.indice_key!r} belongs to a submanifold layer, which has no inverse")
        if known.ksize != self.kernel_size:
            self._unfit("kernel_size", known.ksize, self.kernel_size)
        self._check_sites(known.out_indices, known.out_spatial_shape, known.rulebook.batch_size, input)
        if not same_tensor(known.out_indices, input.indices):
            self._require_equal_sites(known.out_indices, input.indices)
        return known.rulebook.inverse()

    def _check_fit(self, known: IndiceData, input: SparseConvTensor) -> None:
        own = self._geometry()
        if own != known.geometry:
            for what, value in known.geometry.items():
                if own.get(what) != value:
                    self._unfit(what, value, own.get(what))
        rulebook = known.rulebook
        self._check_sites(rulebook.in_indices, rulebook.in_shape, rulebook.batch_size, input)

    def _check_sites(self, indices: Tensor, shape: list[int], batch_size: int, input: SparseConvTensor) -> None:
        if shape != input.spatial_shape:
            self._unfit("spatial_shape", shape, input.spatial_shape)
        if batch_size != input.batch_size:
            self._unfit("batch_size", batch_size, input.batch_size)
        if indices is not input.indices and not same_size(indices, input.indices):
            self._unfit("number of sites", indices.shape[0], input.indices.shape[0])

    def _require_equal_sites(self, known: Tensor, own: Tensor) -> None:
        """Other sites than the rulebook's, or the same in another order, would silently mix up the features."""
        if torch.compiler.is_compiling():
            torch._assert_async((known == own).all())
        elif not torch.equal(known, own):
            self._fail(f"indice_key {self.indice_key!r} leads back from other sites, or from the same in another order")

    def _unfit(self, what: str, known: Any, own: Any) -> None:
        self._fail(
            f"indice_key {self.indice_key!r} holds a rulebook with {what} {known}, and here it is {own}; "
            "layers that differ need keys of their own"
        )

    def _output(self, input: SparseConvTensor, features: Tensor, rulebook: Rulebook) -> SparseConvTensor:
        if "max_num_voxels_during_training" in self._buffers:
            self.max_num_voxels_during_training.clamp_(min=rulebook.out_indices.shape[0])
        indice_dict = self._passed_on(input, rulebook)
        output = input._with(features, rulebook.out_indices, list(rulebook.out_shape), indice_dict)
        output.active = rulebook.out_count
        output.made_by = rulebook
        if self.capacity is not None and rulebook.out_count is not None and not self.subm and not self.inverse:
            output.limits = (*input.limits, (rulebook.out_count, self.capacity))
        return output

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A checkpoint from before `record_voxel_count` was asked for has seen no voxels.
        if "max_num_voxels_during_training" in self._buffers:
            state_dict.setdefault(
                prefix + "max_num_voxels_during_training", torch.zeros_like(self.max_num_voxels_during_training)
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def volume(self) -> int:
        return math.prod(self.kernel_size)

    def extra_repr(self) -> str:
        parts = [f"kernel_size={self.kernel_size}"]
        for what, plain in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            if any(v != plain for v in getattr(self, what)):
                parts.append(f"{what}={getattr(self, what)}")
        if self.indice_key is not None:
            parts.append(f"indice_key={self.indice_key!r}")
        return ", ".join(parts)
