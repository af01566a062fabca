"""sparse_conv: the convolution over a rulebook, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._activations import ACTIVATIONS
from triops._dtypes import autocast, compute_dtype
from triops.ops.rulebook import Rulebook, check_rulebook, check_tile
from triops.ops.rulebook.plans import TILE, pairs_size, tiles_size
from triops.ops.rulebook.rulebook import Tables
from triops.ops.sparse_conv import reference


def sparse_conv(features: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None = None) -> Tensor:
    """Convolution of the features of active sites: sparse, submanifold, transposed or inverse, as the rulebook says.

    `out[o] = bias + sum over k of weight[:, k] @ features[rulebook.gather[k, o]]`, over the kernel offsets k under
    which output site o meets an input site. Differentiable, twice if need be, in features, weight and bias. Half
    types are summed in float32; float32 uses TF32 on a GPU only where `torch.backends.cuda.matmul.allow_tf32` says
    so. Inside `torch.autocast` features, weight and bias are cast to its dtype; float64 stays, as in torch's layers.
    The gradient of a float32 weight is float32, not rounded to a half type on the way.

    Args:
        features: float tensor [N, Cin], one row for each input site of the rulebook.
        weight: tensor `[Cout, *kernel_size, Cin]` of the same dtype (the layout of spconv 2.x), or float32 beside a
            half type, to which it is rounded. Any strides: weights stored `[*kernel_size, Cin, Cout]` (mmcv) come as
            `w.permute(-1, *range(w.dim() - 1))`, without a copy.
        rulebook: see `Rulebook`; `rulebook.prepared()` where several convolutions share it.
        bias: tensor [Cout] of the same dtype, or None.

    Returns:
        Tensor [A, Cout], one row for each output site. An output that meets no input is the bias.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device.
        IndexError: when a table of the rulebook, made by hand, holds a row that does not exist. On a GPU such an
            entry is skipped, unless TRIOPS_CHECK=1 asks for the error there too.

    Two neighbours on a line; each output is the sum over the sites within one step of it:

    >>> import torch
    >>> from triops.ops.sparse_conv import Rulebook, sparse_conv
    >>> rulebook = Rulebook.submanifold(torch.tensor([[0, 2], [0, 3], [0, 6]]), 1, 8, kernel_size=3)
    >>> sparse_conv(torch.tensor([[1.0], [10.0], [100.0]]), torch.ones(1, 3, 1), rulebook)
    tensor([[ 11.],
            [ 11.],
            [100.]])
    """
    check_rulebook("sparse_conv", rulebook)
    for name, value in (("features", features), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(f"sparse_conv: {name} must be a Tensor, got {type(value).__name__}")
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(f"sparse_conv: bias must be a Tensor or None, got {type(bias).__name__}")
    kernel = rulebook.kernel_size
    if weight.shape[1:-1] != tuple(kernel) or weight.dim() < 3:
        expected = ", ".join(map(str, ["Cout", *kernel, "Cin"]))
        raise ValueError(f"sparse_conv: weight must have shape [{expected}], got {list(weight.shape)}")
    features, bias = autocast(features), None if bias is None else autocast(bias)
    if weight.dtype != compute_dtype(features.dtype):  # which the operator takes as it is
        weight = autocast(weight)
    return convolution(features, weight, bias, rulebook.tables)


def convolution(
    features: Tensor, weight: Tensor, bias: Tensor | None, tables: Tables, flip: bool = False, checked: bool = False
) -> Tensor:
    """features [N, Cin], weight [Cout, *K, Cin] -> [A, Cout]: the registered operator over a rulebook's tables.

    checked: this is the backward of a call that was.
    """
    call = _sparse_conv.of_backward if checked else _sparse_conv
    return call(  # type: ignore[no-any-return]
        features, weight, bias, tables.gather, tables.scatter, tables.mirrored, flip, tables.tile, tables.tiles,
        tables.transposed_tiles, tables.pairs, tables.transposed_pairs,
    )  # fmt: skip


def fused_convolution(
    features: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tables: Tables, activation: str,
    alpha: float = 0.0,
) -> Tensor:  # fmt: skip
    """activation(convolution(...) + residual), rounded once, without a gradient: what a layer does in inference."""
    return _sparse_conv_fused(  # type: ignore[no-any-return]
        features, weight, bias, residual, tables.gather, tables.tile, tables.tiles, tables.pairs, activation, alpha
    )


def weight_gradient(
    features: Tensor, grad_output: Tensor, tables: Tables, flip: bool = False, wide: bool = False, checked: bool = False
) -> Tensor:
    """-> [Cout, K, Cin]: the gradient of the weight of `convolution`; of half types float32 where it is `wide`."""
    call = _sparse_conv_backward_weight.of_backward if checked else _sparse_conv_backward_weight
    return call(  # type: ignore[no-any-return]
        features, grad_output, tables.gather, tables.scatter, tables.mirrored, flip, tables.pairs, wide
    )


def features_gradient(
    grad_output: Tensor, weight: Tensor, tables: Tables, flip: bool = False, checked: bool = False
) -> Tensor:
    """-> [N, Cin]: the gradient of the features of `convolution`, again a convolution, with the tables exchanged and
    the weight transposed. A mirrored table is its own transpose with the offsets reversed, which costs only `flip`."""
    weight = weight.flatten(1, -2).permute(2, 1, 0)
    if tables.mirrored:
        return convolution(grad_output, weight, None, tables, not flip, checked)
    return convolution(grad_output, weight, None, tables.inverse(), flip, checked)


def preferred_tile(dtype: torch.dtype, channels_in: int, channels_out: int) -> int:
    """Rows per tile at which the GPU kernel is quickest for a layer, if the rulebook has no tiles yet.

    Half types with many outputs: the weights weigh more than the rows that a larger tile wastes, as long as the
    registers hold the sums.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    return 2 * TILE if half and channels_out > 64 and channels_in <= 128 else TILE


def _check_tables(
    c: _check.Checker, gather: Tensor, scatter: Tensor | None, mirrored: bool, pairs: Tensor | None
) -> dict[str, Tensor]:
    outputs = "N" if mirrored else "A"
    c.shape("gather", gather, "K", outputs)
    c.dtype("gather", gather, (torch.int32,))
    tables = {"gather": gather, **_check_plan(c, "pairs", pairs, pairs_size(gather))}
    if scatter is not None:
        c.shape("scatter", scatter, "K", "N")
        c.dtype("scatter", scatter, (torch.int32,))
        tables["scatter"] = scatter
    return tables


def _check_plan(c: _check.Checker, name: str, plan: Tensor | None, size: int) -> dict[str, Tensor]:
    if plan is None:
        return {}
    c.shape(name, plan, size)
    c.dtype(name, plan, (torch.int32,))
    return {name: plan}


def _check_forward(
    features: Tensor, weight: Tensor, bias: Tensor | None, gather: Tensor, scatter: Tensor | None, mirrored: bool,
    flip: bool, tile: int, tiles: Tensor | None, transposed_tiles: Tensor | None, pairs: Tensor | None,
    transposed_pairs: Tensor | None,
) -> None:  # fmt: skip
    c = _check.Checker("sparse_conv")
    c.shape("features", features, "N", "Cin")
    c.shape("weight", weight.flatten(1, -2) if weight.dim() > 3 else weight, "Cout", "K", "Cin")
    c.dtype("features", features, _check.FLOATS)
    tensors = {"features": features}
    if bias is not None:
        c.shape("bias", bias, "Cout")
        tensors["bias"] = bias
    wide = weight.dtype == compute_dtype(features.dtype)
    c.same_dtype(**tensors, **({} if wide else {"weight": weight}))
    tensors["weight"] = weight
    tensors |= _check_tables(c, gather, scatter, mirrored, pairs)
    check_tile(c, tile)
    tensors |= _check_plan(c, "tiles", tiles, tiles_size(gather, tile))
    if scatter is not None:
        tensors |= _check_plan(c, "transposed_tiles", transposed_tiles, tiles_size(scatter, tile))
        tensors |= _check_plan(c, "transposed_pairs", transposed_pairs, pairs_size(scatter))
    elif transposed_tiles is not None or transposed_pairs is not None:
        c.fail("transposed_tiles and transposed_pairs are plans of scatter and must be None without it")
    c.same_device(**tensors)


def _check_fused(
    features: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gather: Tensor, tile: int,
    tiles: Tensor | None, pairs: Tensor | None, activation: str, alpha: float,
) -> None:  # fmt: skip
    c = _check.Checker("sparse_conv_fused")
    c.shape("features", features, "N", "Cin")
    c.shape("weight", weight, "Cout", "K", "Cin")
    c.shape("gather", gather, "K", "A")
    c.dtype("features", features, _check.FLOATS)
    c.dtype("gather", gather, (torch.int32,))
    tensors = {"features": features, "weight": weight}
    if bias is not None:
        c.shape("bias", bias, "Cout")
        tensors["bias"] = bias
    if residual is not None:
        c.shape("residual", residual, "A", "Cout")
        tensors["residual"] = residual
    c.same_dtype(**tensors)
    check_tile(c, tile)
    tensors |= _check_plan(c, "tiles", tiles, tiles_size(gather, tile))
    tensors |= _check_plan(c, "pairs", pairs, pairs_size(gather))
    c.same_device(**tensors, gather=gather)
    c.choice("activation", activation, ACTIVATIONS)
    c.finite("alpha", alpha)


def _fake_fused(
    features: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gather: Tensor, tile: int,
    tiles: Tensor | None, pairs: Tensor | None, activation: str, alpha: float,
) -> Tensor:  # fmt: skip
    return features.new_empty((gather.shape[1], weight.shape[0]))


def _check_backward_weight(
    features: Tensor, grad_output: Tensor, gather: Tensor, scatter: Tensor | None, mirrored: bool, flip: bool,
    pairs: Tensor | None, wide: bool,
) -> None:  # fmt: skip
    c = _check.Checker("sparse_conv_backward_weight")
    c.shape("features", features, "N", "Cin")
    c.shape("grad_output", grad_output, "N" if mirrored else "A", "Cout")
    c.dtype("features", features, _check.FLOATS)
    c.same_dtype(features=features, grad_output=grad_output)
    tables = _check_tables(c, gather, scatter, mirrored, pairs)
    c.same_device(features=features, grad_output=grad_output, **tables)


def _fake_forward(
    features: Tensor, weight: Tensor, bias: Tensor | None, gather: Tensor, scatter: Tensor | None, mirrored: bool,
    flip: bool, tile: int, tiles: Tensor | None, transposed_tiles: Tensor | None, pairs: Tensor | None,
    transposed_pairs: Tensor | None,
) -> Tensor:  # fmt: skip
    return features.new_empty((gather.shape[1], weight.shape[0]))


def _fake_backward_weight(
    features: Tensor, grad_output: Tensor, gather: Tensor, scatter: Tensor | None, mirrored: bool, flip: bool,
    pairs: Tensor | None, wide: bool,
) -> Tensor:  # fmt: skip
    dtype = compute_dtype(features.dtype) if wide else features.dtype
    return features.new_empty((grad_output.shape[1], gather.shape[0], features.shape[1]), dtype=dtype)


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, weight, _, gather, scatter, ctx.mirrored, ctx.flip, ctx.tile, *plans = inputs
    ctx.save_for_backward(features, weight, gather, scatter, *plans)


def _backward_forward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    features, weight, *tensors = ctx.saved_tensors
    tables = _tables(ctx.mirrored, ctx.tile, features.shape[0], *tensors)
    needs_features, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    of_weight = None
    if needs_weight:
        of_weight = weight_gradient(features, grad, tables, ctx.flip, weight.dtype != features.dtype, checked=True)
        if weight.dim() > 3:
            of_weight = of_weight.view(weight.shape)
    return (
        features_gradient(grad, weight, tables, ctx.flip, checked=True) if needs_features else None,
        of_weight,
        grad.sum(0) if needs_bias else None,
        *(None,) * 9,
    )


def _setup_backward_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, grad_output, gather, scatter, ctx.mirrored, ctx.flip, pairs, _ = inputs
    ctx.save_for_backward(features, grad_output, gather, scatter, pairs)


def _backward_backward_weight(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The weight gradient is linear in both of its inputs, and `grad` has the shape of a weight."""
    features, grad_output, gather, scatter, pairs = ctx.saved_tensors
    tables = Tables(gather, features.shape[0], scatter, ctx.mirrored, pairs=pairs)
    needs_features, needs_output = ctx.needs_input_grad[:2]
    return (
        features_gradient(grad_output, grad, tables, ctx.flip) if needs_features else None,
        convolution(features, grad, None, tables, ctx.flip) if needs_output else None,
        *(None,) * 6,
    )


def _tables(
    mirrored: bool, tile: int, inputs: int, gather: Tensor, scatter: Tensor | None, tiles: Tensor | None,
    transposed_tiles: Tensor | None, pairs: Tensor | None, transposed_pairs: Tensor | None,
) -> Tables:  # fmt: skip
    return Tables(gather, inputs, scatter, mirrored, tile, tiles, transposed_tiles, pairs, transposed_pairs)


_sparse_conv = _op.define(
    reference.sparse_conv, check=_check_forward, fake=_fake_forward, setup_context=_setup_forward,
    backward=_backward_forward,
)  # fmt: skip
_sparse_conv_fused = _op.define(reference.sparse_conv_fused, check=_check_fused, fake=_fake_fused)
_sparse_conv_backward_weight = _op.define(
    reference.sparse_conv_backward_weight, check=_check_backward_weight, fake=_fake_backward_weight,
    setup_context=_setup_backward_weight, backward=_backward_backward_weight,
)  # fmt: skip

__all__ = ["Rulebook", "sparse_conv"]
