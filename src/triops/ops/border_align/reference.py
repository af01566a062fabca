"""The specification of border_align: sample the four borders of each box, keep the maximum of each."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check
from triops._dtypes import compute_dtype
from triops._rois import empty_like_format, format_of

EDGES = ("top", "left", "bottom", "right")


def border_align_forward(input: Tensor, boxes: Tensor, pool_size: int) -> tuple[Tensor, Tensor]:
    """input [N, 4C, H, W], boxes [N, K, 4] -> output [N, C, K, 4], argmax int32 [N, C, K, 4]."""
    batch, channels, height, width = input.shape[0], input.shape[1] // 4, input.shape[2], input.shape[3]
    output, argmax = empty_outputs(input, boxes)
    if input.numel() == 0:
        return output.zero_(), argmax.zero_()
    groups = input.to(compute_dtype(input.dtype)).reshape(batch, 4, channels, height * width)
    for edge in range(4):
        best = step_of_best = None
        for step in range(pool_size + 1):
            on_map, corners = locate(
                boxes, edge, torch.full_like(boxes[..., 0], step, dtype=groups.dtype), pool_size, height, width
            )
            value = groups.new_zeros(())
            for number, (pixel, weight) in enumerate(corners):
                at_pixel = groups[:, edge].gather(2, pixel[:, None].expand(-1, channels, -1))  # [N, C, K]
                value = weight[:, None] * at_pixel if number == 0 else value + weight[:, None] * at_pixel
            value = torch.where(on_map[:, None], value, 0.0)
            if best is None or step_of_best is None:
                best, step_of_best = value, torch.zeros_like(value, dtype=torch.int32)
            else:
                greater = value > best
                best = torch.where(greater, value, best)
                step_of_best = torch.where(greater, step, step_of_best)
        output[..., edge] = best  # type: ignore[assignment]
        argmax[..., edge] = step_of_best  # type: ignore[assignment]
    return output, argmax


def border_align_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, height: int, width: int, pool_size: int
) -> Tensor:
    """grad_output, argmax [N, C, K, 4], boxes [N, K, 4] -> gradient of the input [N, 4C, height, width]."""
    batch, channels = grad_output.shape[:2]
    check_argmax(argmax, pool_size)
    real = compute_dtype(grad_output.dtype)
    grad = torch.zeros(batch * 4 * channels * height * width, dtype=real, device=grad_output.device)
    if grad.numel() and grad_output.numel():
        plane = torch.arange(batch * channels, device=grad.device).view(batch, channels, 1)
        plane = plane + 3 * channels * (plane // channels)  # number of plane [n, c] in [N, 4C]
        valid = (argmax >= 0) & (argmax <= pool_size)
        for edge in range(4):
            step = argmax[..., edge].to(real)  # [N, C, K]
            on_map, corners = locate(boxes[:, None], edge, step, pool_size, height, width)
            given = torch.where(on_map & valid[..., edge], grad_output[..., edge].to(real), 0.0)
            for pixel, weight in corners:
                index = (plane + edge * channels) * (height * width) + pixel
                grad.index_add_(0, index.flatten(), (weight * given).flatten())
    grad = grad.view(batch, 4 * channels, height, width).to(grad_output.dtype)
    return grad.contiguous(memory_format=format_of(argmax))


def locate(
    boxes: Tensor, edge: int, step: Tensor, pool_size: int, height: int, width: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Where sample `step` of an edge lies: whether on the map, and its four corner pixels with their weights.

    boxes [..., 4], step [...] in the dtype that positions are computed in. A box with a field that is
    not finite has no sample on the map.
    """
    finite = boxes.isfinite().all(-1)
    x1, y1, x2, y2 = boxes.to(step.dtype).unbind(-1)
    # Division by a tensor: on CUDA, division by a number multiplies by its rounded reciprocal.
    steps = torch.full_like(x1, pool_size)
    x, y = (x1, y1) if edge < 2 else (x2, y2)
    x, y = x.expand_as(step), y.expand_as(step)
    if EDGES[edge] == "top":
        x = x + step * ((x2 - x1) / steps)
    elif EDGES[edge] == "left":
        y = y + step * ((y2 - y1) / steps)
    elif EDGES[edge] == "bottom":
        x = x + step * (-(x2 - x1) / steps)
    else:
        y = y + step * (-(y2 - y1) / steps)
    on_map = finite & (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
    x_low, x_high, x_part = _neighbors(torch.where(on_map, x, 0.0), width)
    y_low, y_high, y_part = _neighbors(torch.where(on_map, y, 0.0), height)
    return on_map, [
        (y_low * width + x_low, (1 - y_part) * (1 - x_part)),
        (y_low * width + x_high, (1 - y_part) * x_part),
        (y_high * width + x_low, y_part * (1 - x_part)),
        (y_high * width + x_high, y_part * x_part),
    ]


def _neighbors(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two pixels around a position on one axis, clamped to the map, and the share of the second."""
    position = position.clamp(0, size - 1)
    low = position.long().clamp(max=size - 1)
    return low, (low + 1).clamp(max=size - 1), position - low.to(position.dtype)


def empty_outputs(input: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Output and argmax [N, C, K, 4], lying in memory as the input does."""
    shape = (input.shape[0], input.shape[1] // 4, boxes.shape[1], 4)
    return empty_like_format(shape, input.dtype, input), empty_like_format(shape, torch.int32, input)


def check_argmax(argmax: Tensor, pool_size: int) -> None:
    """IndexError for a step outside 0..pool_size. On a GPU, where reading it would synchronise, only when strict."""
    if (argmax.device.type == "cpu" or _check.strict()) and bool(((argmax < 0) | (argmax > pool_size)).any()):
        refuse_argmax(pool_size)


def refuse_argmax(pool_size: int) -> None:
    raise IndexError(f"border_align_backward: argmax must hold steps from 0 to pool_size = {pool_size}, and does not")
