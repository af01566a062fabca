"""compile_kernels: the GPU kernels of a network's sparse layers, compiled side by side before they are launched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from triops import _compiling
from triops._dtypes import autocast, compute_dtype
from triops.nn._window import Window
from triops.nn.sparse_conv import SparseConvolution
from triops.nn.sparse_modules import SparseSequential, ToDense
from triops.nn.sparse_tensor import SparseConvTensor
from triops.ops.batch_norm_act import batch_norm_act
from triops.ops.sparse_conv import features_gradient, weight_gradient


def compile_kernels(network: nn.Module, input: SparseConvTensor, backward: bool = False) -> int:
    """How many GPU kernels the sparse layers of a network need for such an input; all of them are compiled now.

    A kernel is compiled when it is first launched, and a network has dozens: one after the other they take 10 to 20
    seconds, on all cores a quarter of that. `SparseSequential` calls this by itself, the first time that it gets a
    tensor of a dtype on a GPU; a network whose own `forward` calls layers one by one can be passed to it by hand.
    None of them is launched, and no module other than sparse convolutions and pools is called.

    Args:
        network: any module. Its sparse layers are taken in the order in which it holds them, which should be that in
            which it calls them: some kernels depend on the size of the grid. A layer that does not fit is left out.
        input: what the network will get. Its features' dtype, grid and batch size count, its sites do not.
        backward: also for the gradients of convolutions.

    Returns:
        The number of kernels; 0 on a CPU, and where Triton cannot compile on threads (before 3.5).

    >>> import torch
    >>> from triops.nn import SparseConvTensor, SubMConv3d, compile_kernels
    >>> compile_kernels(SubMConv3d(4, 8, 3), SparseConvTensor(torch.zeros(1, 4), torch.zeros(1, 4).int(), [9, 9, 9], 1))
    0
    """
    if not input.features.is_cuda:
        return 0
    from triops import _gpu
    from triops._gpu.ahead import compiling_on_threads

    if _gpu.INTERPRETED:
        return 0
    sites = input.indices.new_zeros((2, input.indices.shape[1]))
    features = input.features.new_zeros((2, input.features.shape[1]))
    x = SparseConvTensor(features, sites, input.spatial_shape, input.batch_size)
    with (
        _compiling.compiling("triops.ops.sparse_conv.gpu", "GPU"),
        torch.set_grad_enabled(backward),
        compiling_on_threads() as kernels,
        _gpu.compiling(),
    ):
        for module in network.modules():
            if isinstance(module, Window):
                x = _after(module, x, backward)
            elif isinstance(module, SparseSequential):
                for norm, activation in module.fused_norms(x):
                    _normalise(norm, activation, x, backward)
            elif isinstance(module, ToDense):
                x.dense()
    return len(kernels)


def _after(layer: Window, x: SparseConvTensor, backward: bool) -> SparseConvTensor:
    """What a layer makes of x, whatever its channels; x itself where it takes no such tensor."""
    channels = layer.in_channels if isinstance(layer, SparseConvolution) else x.features.shape[1]
    try:
        y: SparseConvTensor = layer(x.replace_feature(_zeros(x, channels)))
        if backward and isinstance(layer, SparseConvolution) and layer.volume > 1 and y.made_by is not None:
            tables = y.made_by.prepared(backward=True).tables
            weight = layer.kernel().flatten(1, -2).to(y.features.dtype)
            features_gradient(y.features, weight, tables)
            weight_gradient(_zeros(x, channels).to(y.features.dtype), y.features, tables)
    except (ValueError, TypeError):
        return x
    return y


def _normalise(norm: Any, activation: tuple[str, float], x: SparseConvTensor, backward: bool) -> None:
    """A batch norm, with copies of its running values, which stay as they are."""
    features, by_batch = autocast(_zeros(x, norm.num_features)), norm.training or norm.running_mean is None
    mean, var = (None if r is None else r.clone() for r in (norm.running_mean, norm.running_var))
    out = batch_norm_act(
        features, mean, var, norm.weight, norm.bias, by_batch, norm.momentum or 0.0, norm.eps, *activation, x.active
    )
    if backward:
        statistics = torch.zeros((2, norm.num_features), dtype=compute_dtype(out.dtype), device=out.device)
        torch.ops.triops.batch_norm_act_backward(
            out.detach(), features, norm.weight, norm.bias, statistics, x.active, by_batch, *activation
        )


def _zeros(x: SparseConvTensor, channels: int) -> Tensor:
    return x.features.new_zeros((x.indices.shape[0], channels))
