"""ms_deform_attn: attention that reads a pyramid of feature maps at a few places per query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.ms_deform_attn import reference


def ms_deform_attn(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:  # fmt: skip
    """Multi-scale deformable attention (Deformable DETR, DINO, Mask2Former, BEVFormer). Differentiable in value,
    locations and weights.

    `out[b, q, h]` is the sum over levels l and points p of `attention_weights[b, q, h, l, p]` times head h of map l,
    read bilinearly at `sampling_locations[b, q, h, l, p]`. A location (x, y) counts in map sizes: (0, 0) is the upper
    left corner of the upper left pixel, (1, 1) the lower right corner of the last. What lies off the map is 0.

    Args:
        value: float tensor [B, S, H, D]: the pixels of all levels, one after the other, with H heads of D channels.
        spatial_shapes: int64 or int32 tensor [L, 2]: height and width of each level.
        level_start_index: tensor [L] of the same dtype: the first of the S rows of each level.
        sampling_locations: tensor [B, Q, H, L, P, 2] of the dtype of `value`, or float32 where that is a half type:
            coordinates are computed in float32 whatever the features are.
        attention_weights: tensor [B, Q, H, L, P] of the dtype of `value`, or likewise float32.

    Returns:
        Tensor [B, Q, H * D] of the dtype of `value`. Half types are summed in float32. No queries, levels, points or
        pixels give zeros, or nothing.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device.
        IndexError: when a level does not lie within the S rows. On a GPU such a level is read as 0, unless
            TRIOPS_CHECK=1 asks for the error there too.

    One map of 1 x 2 pixels, read in the middle between them and at the left one:

    >>> import torch, triops
    >>> value = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    >>> locations = torch.tensor([[0.5, 0.5], [0.25, 0.5]]).view(1, 1, 1, 1, 2, 2)
    >>> weights = torch.tensor([0.5, 0.5]).view(1, 1, 1, 1, 2)
    >>> triops.ms_deform_attn(value, torch.tensor([[1, 2]]), torch.tensor([0]), locations, weights)
    tensor([[[12.5000]]])
    """
    return _forward(  # type: ignore[no-any-return]
        value, spatial_shapes, level_start_index, sampling_locations, attention_weights
    )


def ms_deform_attn_backward(
    grad: Tensor, value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of value, sampling_locations and attention_weights of `ms_deform_attn`; autograd calls it.

    grad: [B, Q, H * D] of the dtype of `value`; the rest as there, errors too. On a GPU the same bits on every run
    only where `torch.use_deterministic_algorithms(True)` asks for them.

    >>> import torch, triops
    >>> value, locations = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1, 1, 2), 0.5)
    >>> shapes, starts = torch.tensor([[1, 1]]), torch.tensor([0])
    >>> grads = triops.ms_deform_attn_backward(
    ...     torch.ones(1, 1, 1), value, shapes, starts, locations, torch.full((1, 1, 1, 1, 1), 3.0))
    >>> grads[0].item(), grads[2].item()
    (3.0, 1.0)
    """
    return _backward_operator(  # type: ignore[no-any-return]
        grad, value, spatial_shapes, level_start_index, sampling_locations, attention_weights
    )


def _check_operands(
    c: _check.Checker, value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> None:  # fmt: skip
    c.shape("value", value, "B", "S", "H", "D")
    c.shape("spatial_shapes", spatial_shapes, "L", 2)
    c.shape("level_start_index", level_start_index, "L")
    c.shape("sampling_locations", sampling_locations, "B", "Q", "H", "L", "P", 2)
    c.shape("attention_weights", attention_weights, "B", "Q", "H", "L", "P")
    c.dtype("value", value, _check.FLOATS)
    c.dtype("spatial_shapes", spatial_shapes, _check.INDICES)
    c.same_dtype(spatial_shapes=spatial_shapes, level_start_index=level_start_index)
    half = value.dtype in (torch.float16, torch.bfloat16)
    allowed = (value.dtype, torch.float32) if half else (value.dtype,)
    c.dtype("sampling_locations", sampling_locations, allowed)
    c.dtype("attention_weights", attention_weights, allowed)
    c.same_device(
        value=value, spatial_shapes=spatial_shapes, level_start_index=level_start_index,
        sampling_locations=sampling_locations, attention_weights=attention_weights,
    )  # fmt: skip
    for name, size in (("pixels", value.shape[1]), ("queries", attention_weights.shape[1])):
        if _check.too_many(size):
            c.fail(f"{name} must be at most 2**30, since rows are int32, got {size}")


def _check_forward(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> None:  # fmt: skip
    c = _check.Checker("ms_deform_attn")
    _check_operands(c, value, spatial_shapes, level_start_index, sampling_locations, attention_weights)


def _check_backward(
    grad: Tensor, value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> None:  # fmt: skip
    c = _check.Checker("ms_deform_attn_backward")
    _check_operands(c, value, spatial_shapes, level_start_index, sampling_locations, attention_weights)
    c.shape("grad", grad, "B", "Q", "H * D")
    if grad.shape[2] != value.shape[2] * value.shape[3]:
        c.fail(f"grad must have shape [B, Q, H * D] with H * D = {value.shape[2] * value.shape[3]}, "
               f"got {list(grad.shape)}")  # fmt: skip
    c.same_dtype(grad=grad, value=value)
    c.same_device(grad=grad, value=value)


def _fake_forward(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:  # fmt: skip
    batch, queries, heads = attention_weights.shape[:3]
    return value.new_empty((batch, queries, heads * value.shape[3]))


def _fake_backward(
    grad: Tensor, value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        value.new_empty(value.shape),
        sampling_locations.new_empty(sampling_locations.shape),
        attention_weights.new_empty(attention_weights.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_value, grad_locations, grad_weights = _backward_operator(grad, *ctx.saved_tensors)
    return grad_value, None, None, grad_locations, grad_weights


_backward_operator = _op.define(
    reference.ms_deform_attn_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_forward = _op.define(
    reference.ms_deform_attn, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip

__all__ = ["ms_deform_attn", "ms_deform_attn_backward"]
