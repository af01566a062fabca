"""Modules around sparse tensors: containers, tables, and dense layers that work on the features of a sparse tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from triops.nn.sparse_tensor import SAME_SITES, SparseConvTensor, equal_sites, same_size
from triops.ops.batch_norm_act import batch_norm_act

# Whether a `SparseSequential` runs a BatchNorm1d and the activation behind it as one operator, on a GPU.
fused_norm = True

# Kinds of input that the kernels of a `SparseSequential` were compiled for.
_compiled: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()


class SparseModule(nn.Module):
    """The base of modules that take a SparseConvTensor; `SparseSequential` gives all others its features alone."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{type(self).__name__}: name must be a string or None, got {type(name).__name__}")
        self.name = name
        self._sparse_unique_name = ""

    @property
    def label(self) -> str:
        """How errors call this module."""
        return f"{type(self).__name__} {self.name!r}" if self.name else type(self).__name__

    def require_sparse(self, input: Any) -> None:
        if not isinstance(input, SparseConvTensor):
            got = f"a dense tensor of shape {list(input.shape)}" if isinstance(input, Tensor) else type(input).__name__
            hint = (
                "; SparseConvTensor.from_dense(x) makes one of a channels-last x" if isinstance(input, Tensor) else ""
            )
            self._fail(f"input must be a SparseConvTensor, got {got}{hint}", TypeError)

    def _fail(self, message: str, error: type[Exception] = ValueError) -> None:
        """Refuse a call. A subclass may have errors of its own."""
        raise error(f"{self.label}: {message}")


def is_spconv_module(module: nn.Module) -> bool:
    """Whether a module takes sparse tensors."""
    return isinstance(module, _SPARSE)


class SparseSequential(SparseModule):
    """Modules in a row. Dense ones (BatchNorm1d, ReLU, Linear, ...) are applied to the features of a sparse tensor.

    Takes modules, one OrderedDict of modules, or named modules; a name is part of the names of the parameters.

    On a GPU a BatchNorm1d and the ReLU, LeakyReLU, GELU (exact), SiLU or Sigmoid behind it are one
    operator, `triops.batch_norm_act`, unless either has hooks. Anywhere, rows behind the `active` ones of a capacity do
    not count in a batch's statistics. `triops.nn.sparse_modules.fused_norm = False` turns that off.

    >>> import torch
    >>> from torch import nn
    >>> from triops.nn import SparseConvTensor, SparseSequential, SubMConv3d
    >>> net = SparseSequential(SubMConv3d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
    >>> net(SparseConvTensor(torch.rand(3, 2), torch.arange(3).repeat(4, 1).t().int(), [3, 3, 3], 3))
    SparseConvTensor(3 sites, 4 channels, spatial_shape=[3, 3, 3], batch_size=3)
    >>> list(net.state_dict())[:3]
    ['0.weight', '0.bias', '1.weight']
    """

    def __init__(self, *args: Any, **kwargs: nn.Module) -> None:
        super().__init__()
        named = args[0].items() if len(args) == 1 and isinstance(args[0], OrderedDict) else enumerate(args)
        for key, module in (*named, *kwargs.items()):
            self.add(module, str(key))

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return SparseSequential(OrderedDict(list(self._modules.items())[index]))
        return list(self._modules.values())[index]

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append a module, named by its number if not otherwise."""
        name = str(len(self)) if name is None else name
        if name in self._modules:
            raise ValueError(f"SparseSequential: there is a module named {name!r} already")
        self.add_module(name, module)

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseConvTensor) and input.features.is_cuda:
            self._compile(input)
        modules = list(self._modules.values())
        for i, module in enumerate(modules):
            if module is None:  # done with the one in front
                continue
            if isinstance(input, SparseConvTensor) and _is_fused(module, input):
                following = modules[i + 1] if i + 1 < len(modules) else None
                activation = _activation_of(following)
                if activation is not None:
                    modules[i + 1] = None
                input = input.replace_feature(_norm_rows(module, input, *(activation or ("none", 0.0))))
            elif isinstance(input, SparseConvTensor) and not is_spconv_module(module):
                input = input.replace_feature(on_features(module, input.features))
            else:
                input = module(input)
        return input

    def fused_norms(self, input: SparseConvTensor) -> Iterator[tuple[nn.Module, tuple[str, float]]]:
        """The batch norms that run as one operator, with the name and slope of the activation behind them."""
        modules = list(self._modules.values())
        for module, following in zip(modules, [*modules[1:], None], strict=True):
            if module is not None and _is_fused(module, input):
                yield module, _activation_of(following) or ("none", 0.0)

    def _compile(self, input: SparseConvTensor) -> None:
        """The first call with a dtype compiles the kernels of all layers side by side."""
        kind = input.features.dtype, torch.is_grad_enabled(), torch.is_autocast_enabled()
        if torch.compiler.is_compiling() or kind in _compiled.get(self, ()):
            return
        if torch.cuda.is_current_stream_capturing():
            return
        inside = [module for module in self.modules() if isinstance(module, SparseSequential)]
        for module in inside:  # done with these
            _compiled.setdefault(module, set()).add(kind)
        if len(inside) > 1 or len(self) > 1:
            from triops.nn.compile_kernels import compile_kernels

            compile_kernels(self, input, backward=torch.is_grad_enabled())


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_fused(module: nn.Module, input: SparseConvTensor) -> bool:
    """On a CPU torch's own modules are as quick, where all rows count."""
    if not fused_norm or not _is_own_norm(module):
        return False
    return not input.features.is_cpu or (input.active is not None and _by_batch(module))


def _is_own_norm(module: nn.Module) -> bool:
    """Whether `batch_norm_act` does what this module does: a plain batch norm."""
    return (
        type(module) in (nn.BatchNorm1d, SparseBatchNorm)
        and not _has_hooks(module)
        and not (torch.compiler.is_compiling() and module.momentum is None)  # which looks at a number on the device
    )


def _by_batch(norm: Any) -> bool:
    """Whether a batch norm takes the statistics of its batch."""
    return norm.training or norm.running_mean is None


def _activation_of(module: nn.Module | None) -> tuple[str, float] | None:
    """Name and slope of an activation that `batch_norm_act` knows."""
    name = _ACTIVATION_NAMES.get(type(module))
    if module is None or name is None or _has_hooks(module) or getattr(module, "approximate", "none") != "none":
        return None
    return name, getattr(module, "negative_slope", 0.0)


def _norm_rows(norm: Any, input: SparseConvTensor, activation: str = "none", alpha: float = 0.0) -> Tensor:
    """`activation(norm(features))` over the rows that count."""
    momentum = norm.momentum
    if norm.training and norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
        momentum = 1.0 / float(norm.num_batches_tracked) if momentum is None else momentum
    return batch_norm_act(
        input.features, norm.running_mean, norm.running_var, norm.weight, norm.bias, _by_batch(norm), momentum or 0.0,
        norm.eps, activation, alpha, input.active,
    )  # fmt: skip


def on_features(module: nn.Module, features: Tensor) -> Tensor:
    """A dense module on the rows of features, of which there may be none.

    Tracing torch's own batch normalisation needs to know whether there are 0, 1 or more rows. Behind a layer that makes
    new sites nobody knows while tracing, so there its arithmetic is written out.
    """
    if torch.compiler.is_compiling() and isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
        return _batch_norm(module, features)
    rows: Tensor = module(features)
    return rows


def _batch_norm(norm: _BatchNorm, features: Tensor) -> Tensor:
    """`norm(features)` for any number of rows; none of them teach the running statistics nothing."""
    wide = features.double() if features.dtype == torch.float64 else features.float()
    if norm.training or norm.running_mean is None or norm.running_var is None:
        rows = max(features.shape[0], 1)
        mean = wide.sum(0) / rows
        variance = (wide - mean).square().sum(0) / rows
        if norm.training and norm.running_mean is not None and norm.running_var is not None:
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.add_(1)
            share = 1.0 / norm.num_batches_tracked.float() if norm.momentum is None else norm.momentum
            share = share * min(features.shape[0], 1)
            unbiased = variance * (rows / max(rows - 1, 1))
            for running, seen in ((norm.running_mean, mean), (norm.running_var, unbiased)):
                running.add_((seen.detach() - running) * share)
    else:
        mean, variance = norm.running_mean, norm.running_var
    normal: Tensor = (wide - mean) * torch.rsqrt(variance + norm.eps)
    if norm.weight is not None:
        normal = normal * norm.weight + norm.bias
    return normal.to(features.dtype)


class SparseBatchNorm(nn.BatchNorm1d):
    """BatchNorm1d that takes a SparseConvTensor, or features."""

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseConvTensor):
            if input.active is not None and _by_batch(self) and _is_own_norm(self):
                return input.replace_feature(_norm_rows(self, input))
            return input.replace_feature(self.forward(input.features))
        return _batch_norm(self, input) if torch.compiler.is_compiling() else super().forward(input)

    if TYPE_CHECKING:
        __call__ = forward


class SparseSyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm that takes a SparseConvTensor, or features."""

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))
        return super().forward(input)

    if TYPE_CHECKING:
        __call__ = forward


class SparseReLU(nn.ReLU):
    """ReLU that takes a SparseConvTensor, or features."""

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))
        return super().forward(input)

    if TYPE_CHECKING:
        __call__ = forward


_ACTIVATION_NAMES: dict[type, str] = {
    nn.ReLU: "relu", SparseReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.GELU: "gelu", nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
}  # fmt: skip


class SparseIdentity(nn.Identity):
    """Returns its input."""


_SPARSE = (SparseModule, SparseBatchNorm, SparseSyncBatchNorm, SparseReLU, SparseIdentity)


class Identity(SparseModule):
    """Returns its input."""

    def forward(self, input: Any) -> Any:
        return input

    if TYPE_CHECKING:
        __call__ = forward


class ToDense(SparseModule):
    """See `SparseConvTensor.dense`: gives [B, C, *spatial_shape]."""

    def forward(self, x: SparseConvTensor) -> Tensor:
        self.require_sparse(x)
        return x.dense()

    if TYPE_CHECKING:
        __call__ = forward


class RemoveGrid(SparseModule):
    """Drops the `grid` that programs written for spconv may hang on a tensor; triops never uses one."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        self.require_sparse(x)
        x = x.shadow_copy()
        x.grid = None
        return x

    if TYPE_CHECKING:
        __call__ = forward


class _Table(SparseModule):
    """The base of modules that merge sparse tensors with the same sites."""

    def _check_inputs(self, inputs: Sequence[SparseConvTensor], channels: bool) -> None:
        if not isinstance(inputs, (list, tuple)) or not inputs:
            got = "an empty one" if isinstance(inputs, (list, tuple)) else type(inputs).__name__
            self._fail(f"input must be a list of SparseConvTensors, got {got}", TypeError)
        for x in inputs:
            self.require_sparse(x)
        first = inputs[0]
        for x in inputs[1:]:
            for what in ("spatial_shape", "batch_size"):
                if getattr(x, what) != getattr(first, what):
                    self._unfit(what, getattr(first, what), getattr(x, what))
            if x.indices is not first.indices and not same_size(x.indices, first.indices):
                self._unfit("number of sites", first.indices.shape[0], x.indices.shape[0])
            if channels and x.features.shape[1] != first.features.shape[1]:
                self._unfit("number of channels", first.features.shape[1], x.features.shape[1])
            if not equal_sites(x.indices, first.indices):
                self._fail(f"inputs must have {SAME_SITES}")

    def _unfit(self, what: str, first: Any, other: Any) -> None:
        self._fail(f"inputs must have the same sites, got {what} {first} and {other}")

    def _merge(self, inputs: Sequence[SparseConvTensor], features: Tensor) -> SparseConvTensor:
        """All inputs' rulebooks stay known; where two know a key, the first input's stands."""
        known: dict[str, Any] = {}
        for x in reversed(inputs):
            known = {**known, **x.indice_dict}
        merged = inputs[0].replace_feature(features)
        merged.indice_dict = known
        return merged


class JoinTable(_Table):
    """The channels of several sparse tensors with the same sites, side by side."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        self._check_inputs(input, channels=False)
        return self._merge(input, torch.cat([x.features for x in input], 1))

    if TYPE_CHECKING:
        __call__ = forward


class AddTable(_Table):
    """The sum of several sparse tensors with the same sites."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        self._check_inputs(input, channels=True)
        total = input[0].features
        for x in input[1:]:
            total = total + x.features
        return self._merge(input, total)

    if TYPE_CHECKING:
        __call__ = forward


class ConcatTable(SparseModule):
    """Passes its input to each of its modules, and returns the list of their outputs.

    >>> from triops.nn import AddTable, ConcatTable, Identity, SparseSequential, SubMConv3d
    >>> residual = SparseSequential(ConcatTable().add(Identity()).add(SubMConv3d(8, 8, 3)), AddTable())
    """

    def add(self, module: nn.Module) -> ConcatTable:
        self.add_module(str(len(self._modules)), module)
        return self

    def forward(self, input: Any) -> list[Any]:
        return [module(input) for module in self._modules.values() if module is not None]

    if TYPE_CHECKING:
        __call__ = forward


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    """Give every sparse layer its path in the network as its name, which its errors then say."""
    for path, child in module.named_modules():
        if isinstance(child, SparseModule):
            child.name = child._sparse_unique_name = path
