"""Rearrangements of feature maps of `mmcv._ext`, in plain torch: CARAFE, PSANet's masks, masked convolution, ORN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from triops._plain import carafe as plain
from triops._plain import maps


def carafe_forward(
    features: Tensor, masks: Tensor, rfeatures: Tensor, routput: Tensor, rmasks: Tensor, output: Tensor,
    kernel_size: int, group_size: int, scale_factor: int,
) -> None:  # fmt: skip
    """`rfeatures` becomes the features as [N, H, W, C], which the backward pass takes; the other buffers are unused."""
    n, c, h, w = features.shape
    rfeatures.resize_(n, h, w, c).copy_(features.permute(0, 2, 3, 1))
    output.copy_(plain.carafe(features, masks, kernel_size, group_size, scale_factor))


def carafe_backward(
    top_grad: Tensor, rfeatures: Tensor, masks: Tensor, rtop_grad: Tensor, rbottom_grad_hs: Tensor,
    rbottom_grad: Tensor, rmask_grad: Tensor, bottom_grad: Tensor, mask_grad: Tensor, kernel_size: int,
    group_size: int, scale_factor: int,
) -> None:  # fmt: skip
    features = rfeatures.permute(0, 3, 1, 2)
    carafe_naive_backward(top_grad, features, masks, bottom_grad, mask_grad, kernel_size, group_size, scale_factor)


def carafe_naive_forward(
    features: Tensor, masks: Tensor, output: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> None:
    output.copy_(plain.carafe(features, masks, kernel_size, group_size, scale_factor))


def carafe_naive_backward(
    top_grad: Tensor, features: Tensor, masks: Tensor, bottom_grad: Tensor, mask_grad: Tensor, kernel_size: int,
    group_size: int, scale_factor: int,
) -> None:  # fmt: skip
    of_features, of_masks = plain.carafe_backward(top_grad, features, masks, kernel_size, group_size, scale_factor)
    bottom_grad += of_features
    mask_grad += of_masks


def carafe_naive_gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """In place of the backward pass of mmcv's `CARAFENaiveFunction`, which asks for a CUDA tensor."""
    features, masks = ctx.saved_tensors
    sizes = ctx.kernel_size, ctx.group_size, ctx.scale_factor
    return *plain.carafe_backward(grad_output, features, masks, *sizes), None, None, None


def psamask_forward(
    input: Tensor, output: Tensor, psa_type: int, num_: int, h_feature: int, w_feature: int, h_mask: int, w_mask: int,
    half_h_mask: int, half_w_mask: int,
) -> None:  # fmt: skip
    output.copy_(maps.psa_mask(input, psa_type == 0, h_mask, w_mask, half_h_mask, half_w_mask))


def psamask_backward(
    grad_output: Tensor, grad_input: Tensor, psa_type: int, num_: int, h_feature: int, w_feature: int, h_mask: int,
    w_mask: int, half_h_mask: int, half_w_mask: int,
) -> None:  # fmt: skip
    grad_input.copy_(maps.psa_mask_backward(grad_output, psa_type == 0, h_mask, w_mask, half_h_mask, half_w_mask))


def masked_im2col_forward(
    im: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, col: Tensor, kernel_h: int, kernel_w: int, pad_h: int,
    pad_w: int,
) -> None:  # fmt: skip
    col.copy_(maps.masked_columns(im[0], mask_h_idx, mask_w_idx, kernel_h, kernel_w, pad_h, pad_w))


def masked_col2im_forward(
    col: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, im: Tensor, height: int, width: int, channels: int
) -> None:
    """Without padding the mask is larger than the output: its pixels outside are left out."""
    inside = (mask_h_idx >= 0) & (mask_h_idx < height) & (mask_w_idx >= 0) & (mask_w_idx < width)
    rows, columns = mask_h_idx[inside], mask_w_idx[inside]
    im.view(channels, height, width)[:, rows, columns] = col[:, inside]


def active_rotated_filter_forward(input: Tensor, indices: Tensor, output: Tensor) -> None:
    output.copy_(maps.active_rotated_filter(input, indices))


def active_rotated_filter_backward(grad_out: Tensor, indices: Tensor, grad_in: Tensor) -> None:
    grad_in.copy_(maps.active_rotated_filter_backward(grad_out, indices))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        carafe_forward, carafe_backward, carafe_naive_forward, carafe_naive_backward, psamask_forward,
        psamask_backward, masked_im2col_forward, masked_col2im_forward, active_rotated_filter_forward,
        active_rotated_filter_backward,
    )
}  # fmt: skip
