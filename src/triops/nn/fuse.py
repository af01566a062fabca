"""fuse: batch norm, activation and residual sum inside the convolution, for inference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from triops.nn.activation import Activation
from triops.nn.sparse_conv import SparseConvolution
from triops.nn.sparse_modules import AddTable, ConcatTable, Identity, SparseIdentity, SparseModule, SparseSequential
from triops.nn.sparse_tensor import SparseConvTensor


def fuse(network: nn.Module) -> nn.Module:
    """A copy of the network for inference whose sparse convolutions do the layers behind them too.

    In every `SparseSequential`, a batch norm behind a convolution is folded into its weight and bias, and a ReLU,
    LeakyReLU, GELU (exact), SiLU or Sigmoid behind that becomes part of it; so does the sum of a residual block
    (`ConcatTable` of a branch and an `Identity`, then `AddTable`). What stands elsewhere stays as it is. Results
    differ from the network's by rounding alone, and there are fewer roundings.

    Args:
        network: a module in evaluation mode. It is left untouched; the copy has weights of its own, without gradients.

    Returns:
        The copy. Load checkpoints before, not after: batch norms are gone from it.

    Raises:
        TypeError: where network is no module. ValueError: where it is in training mode.

    >>> import torch
    >>> from torch import nn
    >>> from triops.nn import SparseSequential, SubMConv3d, fuse
    >>> net = SparseSequential(SubMConv3d(4, 8, 3, bias=False), nn.BatchNorm1d(8), nn.ReLU()).eval()
    >>> fuse(net)
    SparseSequential(
      (0): SubMConv3d(4, 8, kernel_size=[3, 3, 3], act_type=Activation.ReLU)
    )
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"fuse: network must be a Module, got {type(network).__name__}")
    if network.training:
        raise ValueError("fuse: network must be in evaluation mode; call network.eval() first")
    network = copy.deepcopy(network)
    for module in reversed(list(network.modules())):  # branches before the blocks that they are part of
        if isinstance(module, SparseSequential):
            _fuse_sequence(module)
    return network.requires_grad_(False)


def _fuse_sequence(sequence: SparseSequential) -> None:
    kept: dict[str, Any] = {}
    last: nn.Module | None = None  # the one in front, while it can still take more in
    for name, module in sequence._modules.items():
        if isinstance(last, SparseConvolution) and _takes_in(last, module):
            continue
        if isinstance(last, ConcatTable) and isinstance(module, AddTable) and _is_residual(last):
            branch: Any = next(m for m in last._modules.values() if not _is_identity(m))
            last = kept[next(reversed(kept))] = _Residual(branch)
            continue
        if isinstance(last, _Residual) and _takes_in(last.adder, module):
            continue
        kept[name] = last = module
    sequence._modules.clear()
    sequence._modules.update(kept)


def _takes_in(convolution: SparseConvolution, module: nn.Module | None) -> bool:
    """Whether the module was made part of the convolution."""
    if convolution.act_type is not Activation.None_:
        return False
    if isinstance(module, _BatchNorm) and module.running_mean is not None:
        return _fold(convolution, module)
    for kind, activation in _ACTIVATIONS.items():
        if isinstance(module, kind):
            if isinstance(module, nn.GELU) and module.approximate != "none":
                return False
            convolution.act_type = activation
            convolution.act_alpha = getattr(module, "negative_slope", 0.0)
            return True
    return False


_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation.ReLU, nn.LeakyReLU: Activation.LeakyReLU, nn.GELU: Activation.GELU, nn.SiLU: Activation.SiLU,
    nn.Sigmoid: Activation.Sigmoid,
}  # fmt: skip


@torch.no_grad()
def _fold(convolution: SparseConvolution, norm: _BatchNorm) -> bool:
    """norm(convolution(x)) is a convolution again. -> whether its weight could be written"""
    kernel = convolution.kernel()  # however a subclass stores its weight, a view of it with the output channels first
    if kernel.untyped_storage().data_ptr() != convolution.weight.untyped_storage().data_ptr():
        return False
    assert norm.running_mean is not None
    assert norm.running_var is not None
    real = torch.float64  # rounded once, at the end
    scale = torch.rsqrt(norm.running_var.to(real) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.to(real)
    shift = -norm.running_mean.to(real) * scale
    if convolution.bias is not None:
        shift = shift + convolution.bias.to(real) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(real)
    kernel.copy_(kernel.to(real) * scale.view(-1, *[1] * (kernel.dim() - 1)))
    convolution.bias = nn.Parameter(shift.to(kernel.dtype))
    return True


class _Residual(SparseModule):
    """A branch and the tensor that it started from, added by the branch's last convolution."""

    def __init__(self, branch: SparseSequential) -> None:
        super().__init__()
        self.front = branch[:-1]
        self.adder: Any = branch[-1]

    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        # not adder(...): layers by spconv's names refuse a sum in evaluation mode
        return SparseConvolution.forward(self.adder, self.front(input), input)


def _is_identity(module: Any) -> bool:
    return isinstance(module, Identity | SparseIdentity | nn.Identity)


def _is_residual(table: ConcatTable) -> bool:
    """A branch that ends in a convolution without an activation of its own, beside the tensor as it is."""
    modules = list(table._modules.values())
    branches = [m for m in modules if not _is_identity(m)]
    if len(modules) != 2 or len(branches) != 1 or not isinstance(branches[0], SparseSequential) or not branches[0]:
        return False
    last = branches[0][-1]
    return isinstance(last, SparseConvolution) and last.subm and last.act_type is Activation.None_
