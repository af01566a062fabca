"""Video and flow in `mmcv._ext`, in plain torch: correlation, temporal shifts; and PAConv's scored sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._plain import correlation as plain
from triops._plain import gradients
from triops._plain.assign_score import assign_score
from triops._plain.temporal_shift import temporal_shift


def correlation_forward(
    input1: Tensor, input2: Tensor, output: Tensor, kH: int, kW: int, patchH: int, patchW: int, padH: int, padW: int,
    dilationH: int, dilationW: int, dilation_patchH: int, dilation_patchW: int, dH: int, dW: int,
) -> None:  # fmt: skip
    output.copy_(
        plain.correlation(
            input1, input2, (kH, kW), (patchH, patchW), (padH, padW), (dilationH, dilationW),
            (dilation_patchH, dilation_patchW), (dH, dW),
        )
    )  # fmt: skip


def correlation_backward(
    grad_output: Tensor, input1: Tensor, input2: Tensor, grad_input1: Tensor, grad_input2: Tensor, kH: int, kW: int,
    patchH: int, patchW: int, padH: int, padW: int, dilationH: int, dilationW: int, dilation_patchH: int,
    dilation_patchW: int, dH: int, dW: int,
) -> None:  # fmt: skip
    first, second = plain.correlation_backward(
        grad_output, input1, input2, (kH, kW), (patchH, patchW), (padH, padW), (dilationH, dilationW),
        (dilation_patchH, dilation_patchW), (dH, dW),
    )  # fmt: skip
    grad_input1.copy_(first)
    grad_input2.copy_(second)


def tin_shift_forward(input: Tensor, shift: Tensor, output: Tensor) -> None:
    output.copy_(temporal_shift(input, shift))


def tin_shift_backward(grad_output: Tensor, shift: Tensor, grad_input: Tensor) -> None:
    """As mmcv has it, and its tests expect: shifted forward once more. The gradient would be shifted back."""
    grad_input.copy_(temporal_shift(grad_output, shift))


def assign_score_withk_forward(
    points: Tensor, centers: Tensor, scores: Tensor, knn_idx: Tensor, output: Tensor, B: int, N0: int, N1: int, M: int,
    K: int, O: int, aggregate: int,  # noqa: E741
) -> None:  # fmt: skip
    """points, centers [B, N0, M, O], scores [B, N1, K, M]: the sum over M. `aggregate` is ignored, as in mmcv."""
    total = torch.zeros_like(output, dtype=compute_dtype(output.dtype))
    for m in range(M):  # one at a time: all of them at once would be M times the output
        total += assign_score(points[:, :, m], centers[:, :, m], scores[..., m], knn_idx)
    output += total


def assign_score_withk_backward(
    grad_out: Tensor, points: Tensor, centers: Tensor, scores: Tensor, knn_idx: Tensor, grad_points: Tensor,
    grad_centers: Tensor, grad_scores: Tensor, B: int, N0: int, N1: int, M: int, K: int,
    O: int, aggregate: int,  # noqa: E741
) -> None:  # fmt: skip
    rule = functools.partial(assign_score, neighbors=knn_idx)
    for m in range(M):
        own = points[:, :, m], centers[:, :, m], scores[..., m]
        of_points, of_centers, of_scores = gradients(rule, own, grad_out)
        grad_points[:, :, m] += of_points
        grad_centers[:, :, m] += of_centers
        grad_scores[..., m] += of_scores


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        correlation_forward, correlation_backward, tin_shift_forward, tin_shift_backward, assign_score_withk_forward,
        assign_score_withk_backward,
    )
}  # fmt: skip
