"""compile_kernels: the GPU kernels of a network's sparse layers, compiled side by side before they are launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from triops.nn._window import Window
from triops.nn.sparse_tensor import SparseConvTensor

if TYPE_CHECKING:
    from triops.nn.sparse_conv import SparseConvolution


def compile_kernels(network: nn.Module, input: SparseConvTensor, backward: bool = False) -> int:
    """How many GPU kernels the sparse layers of a network need for such an input; all of them are compiled now.

    A kernel is compiled when it is first launched, and a network has dozens: one after the other they take 10 to 20
    seconds, on all cores a quarter of that. `SparseSequential` calls this by itself, the first time that it gets a
    tensor of a dtype on a GPU; a network whose own `forward` calls layers one by one can be passed to it by hand.
    Nothing is launched and no module other than sparse convolutions and pools is called.

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
    layers = [module for module in network.modules() if isinstance(module, Window)]
    if not input.features.is_cuda or not layers:
        return 0
    from triops import _gpu
    from triops._gpu.ahead import compiling_on_threads

    if _gpu.INTERPRETED:
        return 0
    sites = input.indices.new_zeros((2, input.indices.shape[1]))
    features = input.features.new_zeros((2, input.features.shape[1]))
    x = SparseConvTensor(features, sites, input.spatial_shape, input.batch_size)
    with torch.set_grad_enabled(backward), compiling_on_threads() as kernels, _gpu.compiling():
        for layer in layers:
            x = _after(layer, x, backward)
    return len(kernels)


def _after(layer: Window, x: SparseConvTensor, backward: bool) -> SparseConvTensor:
    """What a layer makes of x, whatever its channels; x itself where it takes no such tensor."""
    from triops.nn.sparse_conv import SparseConvolution

    channels = layer.in_channels if isinstance(layer, SparseConvolution) else x.features.shape[1]
    try:
        y: SparseConvTensor = layer(x.replace_feature(x.features.new_zeros((x.indices.shape[0], channels))))
        if backward and isinstance(layer, SparseConvolution):
            _gradients(layer, x, y)
    except (ValueError, TypeError):
        return x
    return y


def _gradients(layer: SparseConvolution, x: SparseConvTensor, y: SparseConvTensor) -> None:
    from triops.ops.sparse_conv import features_gradient, weight_gradient

    rulebook = y.made_by
    if rulebook is None or layer.volume == 1:
        return
    tables = rulebook.prepared(backward=True).tables
    weight, grad = layer.kernel().flatten(1, -2).to(x.features.dtype), y.features
    features_gradient(grad, weight, tables)
    weight_gradient(x.features.new_zeros((x.indices.shape[0], layer.in_channels)), grad, tables)
