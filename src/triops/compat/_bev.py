"""`bev_pool_ext`, the extension module of BEVFusion, which OpenPCDet and mmdetection3d carry too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

operators = torch.ops.triops


def bev_pool_forward(
    x: Tensor, geom_feats: Tensor, interval_lengths: Tensor, interval_starts: Tensor, b: int, d: int, h: int, w: int
) -> Tensor:
    """Features [n, c] in runs of one cell each, with cells int32 [n, 4] of (h, w, d, b) -> [b, d, h, w, c]."""
    points, runs = x.shape[0], interval_starts.shape[0]
    numbers = torch.arange(runs, device=x.device)
    run_of_point = numbers.repeat_interleave(interval_lengths.long(), output_size=points).int()
    order = torch.arange(points, dtype=torch.int32, device=x.device)
    starts = torch.cat([interval_starts.int(), order.new_full((1,), points)])
    sums = operators.bev_pool_forward(x, None, run_of_point, order, starts)
    out = x.new_zeros((b * d * h * w, x.shape[1]))
    out[_cells(geom_feats, b, d, h, w)[interval_starts.long()]] = sums
    return out.view(b, d, h, w, x.shape[1])


def bev_pool_backward(
    out_grad: Tensor, geom_feats: Tensor, interval_lengths: Tensor, interval_starts: Tensor, b: int, d: int, h: int,
    w: int,
) -> Tensor:  # fmt: skip
    unread = out_grad.new_empty((1, 1)).expand(geom_feats.shape[0], out_grad.shape[4])
    grad: Tensor = operators.bev_pool_backward(
        out_grad.reshape(-1, out_grad.shape[4]), unread, None, _cells(geom_feats, b, d, h, w)
    )[0]
    return grad


def _cells(geom_feats: Tensor, b: int, d: int, h: int, w: int) -> Tensor:
    row, column, layer, element = geom_feats.long().unbind(1)
    return ((element * d + layer) * h + row) * w + column


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bev_pool_forward": bev_pool_forward,
    "bev_pool_backward": bev_pool_backward,
}
