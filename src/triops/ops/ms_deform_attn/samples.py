"""Inputs of ms_deform_attn and ms_deform_attn_backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.ms_deform_attn import ms_deform_attn, ms_deform_attn_backward

_F, _B = "ms_deform_attn", "ms_deform_attn_backward"
_Make = Callable[[torch.dtype], tuple[Any, ...]]
_Levels = Sequence[tuple[int, int]]


def attention(
    batch: int, levels: _Levels, heads: int, channels: int, points: int, queries: int | None = None, seed: int = 0,
    index: torch.dtype = torch.int64, spread: float = 0.15, coordinates: torch.dtype | None = None,
) -> _Make:  # fmt: skip
    """Queries in the order of the pixels, or anywhere, that look around themselves, as a detector's do.

    queries: None for one per pixel. spread: of the locations, in map sizes. coordinates: their dtype, if another.
    """

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        sizes = [h * w for h, w in levels]
        value = torch.randn(batch, sum(sizes), heads, channels, generator=g)
        shapes = torch.tensor(levels, dtype=index).view(-1, 2)
        starts = torch.tensor([sum(sizes[:n]) for n in range(len(sizes))], dtype=index)
        if queries is None:
            ys, xs = zip(*(torch.meshgrid((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w, indexing="ij")
                           for h, w in levels), strict=True)  # fmt: skip
            centres = torch.stack([torch.cat([x.flatten() for x in xs]), torch.cat([y.flatten() for y in ys])], 1)
        else:
            centres = torch.rand(queries, 2, generator=g)
        shape = batch, len(centres), heads, len(levels), points
        locations = centres[None, :, None, None, None] + spread * torch.randn(*shape, 2, generator=g)
        weights = torch.randn(shape, generator=g).flatten(3).softmax(-1).view(shape)
        return (
            value.to(dtype), shapes, starts, locations.to(coordinates or dtype), weights.to(dtype),
        )  # fmt: skip

    return make


def _backward(make: _Make) -> _Make:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        value, shapes, starts, locations, weights = make(dtype)
        batch, queries, heads = weights.shape[:3]
        g = torch.Generator().manual_seed(9)
        return (torch.randn(batch, queries, heads * value.shape[3], generator=g).to(dtype), value, shapes, starts,
                locations, weights)  # fmt: skip

    return made


def _on_the_border(dtype: torch.dtype) -> tuple[Any, ...]:
    """Locations at and around the borders of a map of 3 x 4, beyond them, and not finite."""
    value, shapes, starts, _, _ = attention(1, [(3, 4)], 1, 5, 1, 1)(dtype)
    places = torch.tensor([-1.0, -0.126, -0.125, 0.0, 0.124, 0.5, 0.99, 1.0, 1.124, 1.2, math.nan, math.inf])
    locations = torch.cartesian_prod(places, places)
    weights = torch.linspace(-1, 1, len(locations))
    return (
        value, shapes, starts, locations.view(1, -1, 1, 1, 1, 2).to(dtype), weights.view(1, -1, 1, 1, 1).to(dtype),
    )  # fmt: skip


def _not_finite(dtype: torch.dtype) -> tuple[Any, ...]:
    """Infinite and NaN weights and pixels, of locations on the map, half off it and beyond."""
    value, shapes, starts, locations, weights = _on_the_border(dtype)
    value[0, 5], weights[0, ::3], weights[0, 1::7] = math.inf, math.nan, -math.inf
    return value, shapes, starts, locations, weights


_DETR = [(100, 152), (50, 76), (25, 38), (13, 19)]
_SMALL = [(25, 38), (13, 19), (7, 10), (4, 5)]
_CASES: list[tuple[str, _Make, Any, bool]] = [
    ("DETR encoder, 20,197 queries, 4 levels, 8 x 32, 4 points, batch 2", attention(2, _DETR, 8, 32, 4), "network",
     True),
    ("DETR decoder, 900 queries", attention(2, _DETR, 8, 32, 4, 900), "network", True),
    ("BEVFormer, 40,000 queries, one level 200 x 200", attention(1, [(200, 200)], 8, 32, 4), "network", True),
    ("6 cameras, 10,000 queries, 4 levels, 8 points",
     attention(6, [(116, 200), (58, 100), (29, 50), (15, 25)], 8, 32, 8, 10_000), "network", True),
    ("DETR encoder on a small image, 1,287 queries", attention(1, _SMALL, 8, 32, 4), "network", False),
    ("2 levels, 2 heads of 3 channels, 5 queries", attention(2, [(3, 4), (2, 2)], 2, 3, 2, 5), "general", False),
    ("3 levels, 3 heads of 20 channels, 33 queries, int32",
     attention(1, [(9, 7), (4, 4), (1, 2)], 3, 20, 3, 33, 1, torch.int32), "general", False),
    ("float32 locations", attention(1, [(6, 5), (3, 2)], 2, 16, 4, 17, 3, coordinates=torch.float32), "general", False),
    ("borders and beyond", _on_the_border, "boundary", False),
    ("not finite", _not_finite, "boundary", False),
    ("no queries", attention(1, [(3, 4)], 2, 4, 2, 0), "boundary", False),
    ("no levels", attention(1, [], 2, 4, 2, 3), "boundary", False),
    ("no points", attention(1, [(3, 4)], 2, 4, 0, 3), "boundary", False),
    ("no channels", attention(1, [(3, 4)], 2, 0, 2, 3), "boundary", False),
    ("no batch", attention(0, [(3, 4)], 2, 4, 2, 3), "boundary", False),
    ("an empty level", attention(1, [(0, 4), (2, 2)], 1, 4, 2, 3), "boundary", False),
    ("one of everything", attention(1, [(1, 1)], 1, 1, 1, 1), "boundary", False),
    ("1,100 channels", attention(1, [(2, 3)], 1, 1100, 1, 2), "boundary", False),
]  # fmt: skip
SAMPLES = [
    Sample(op, name, make(case), scale, dtypes, demo=name.startswith("DETR encoder on"), gpu_only=large)
    for op, make in ((_F, lambda case: case), (_B, _backward))
    for name, case, scale, large in _CASES
    for dtypes in [Sample.dtypes[:3] if name.startswith("float32") else Sample.dtypes]
]
SAMPLES.append(Sample(_F, "to differentiate", attention(1, [(4, 5), (2, 3)], 2, 3, 2, 4, 4), gradcheck=True))


def _sized(draw: Callable[[int], int]) -> _Make:
    return attention(draw(3), [(draw(40), draw(40)), (draw(20), draw(20))], 4, 16, 2, draw(3000))


SIZED = [
    Sized(_F, "queries", _sized),
    Sized(_B, "queries", lambda draw: _backward(_sized(draw))),
]


def _bad_calls() -> list[BadCall]:
    value, shapes, starts, locations, weights = attention(2, [(3, 4), (2, 2)], 2, 3, 2, 5)(torch.float32)
    grad = torch.zeros(2, 5, 6)

    def bad(what: str, error: type[Exception], match: str, **changed: Any) -> BadCall:
        args = {"value": value, "spatial_shapes": shapes, "level_start_index": starts,
                "sampling_locations": locations, "attention_weights": weights, **changed}  # fmt: skip
        return BadCall(what, lambda: ms_deform_attn(**args), error, match)

    return [
        bad("value of rank 3", ValueError, r"value must have shape \[B, S, H, D\]", value=value[0]),
        bad("shapes of three numbers", ValueError, r"spatial_shapes must have shape \[L, 2\]",
            spatial_shapes=torch.zeros(2, 3, dtype=torch.int64)),
        bad("one start", ValueError, "L = 2 as in spatial_shapes", level_start_index=starts[:1]),
        bad("locations of another head", ValueError, "H = 2 as in value", sampling_locations=locations[:, :, :1]),
        bad("weights of other points", ValueError, "P = 2 as in sampling_locations",
            attention_weights=weights[..., :1]),
        bad("integer value", TypeError, "value must be float32.*got int64", value=value.long()),
        bad("float shapes", TypeError, "spatial_shapes must be int32 or int64", spatial_shapes=shapes.float()),
        bad("another index dtype", TypeError, "level_start_index int32", level_start_index=starts.int()),
        bad("float64 locations", TypeError, "sampling_locations must be float32, got float64",
            sampling_locations=locations.double()),
        bad("half weights", TypeError, "attention_weights must be float32, got float16",
            attention_weights=weights.half()),
        bad("unequal devices", ValueError, "attention_weights on meta", attention_weights=weights.to("meta")),
        bad("a list", TypeError, "must be a Tensor, got list", spatial_shapes=[[3, 4], [2, 2]]),
        bad("a level behind the end", IndexError, "level 1 must lie within the 16 rows", level_start_index=starts + 1),
        bad("a negative size", IndexError, "level 0 must lie", spatial_shapes=-shapes),
        BadCall("backward of another width", lambda: ms_deform_attn_backward(
            grad[..., 1:], value, shapes, starts, locations, weights), ValueError, r"H \* D = 6"),
        BadCall("backward of another dtype", lambda: ms_deform_attn_backward(
            grad.double(), value, shapes, starts, locations, weights), TypeError, "grad float64"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()

STANDARD = {
    op: Standard(error_scale="row", why_slower="each query gathers four pixels per point from a map in the cache")
    for op in (_F, _B)
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    forward = args if operator == _F else args[1:]
    value, _, _, _, weights = forward
    out = weights.shape[0] * weights.shape[1] * weights.shape[2] * value.shape[3] * value.element_size()
    products = 4 * weights.numel() * value.shape[3]
    if operator == _F:
        return Work(bytes_of(args) + out, 2 * products)
    return Work(bytes_of(args) + bytes_of(forward), 6 * products)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator == _B:
        return {"torch": _differentiated}
    found: dict[str, Callable[..., Any]] = {"torch": _by_grid_sample}
    mmcv = compiled_mmcv()
    if mmcv is not None:
        found["mmcv"] = lambda *args: mmcv.ms_deform_attn_forward(*args, im2col_step=64)
    return found


def _by_grid_sample(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """What one writes in torch, as Deformable DETR's own fallback does: grid_sample per level."""
    batch, _, heads, channels = value.shape
    queries, points = weights.shape[1], weights.shape[4]
    grids = 2 * locations - 1
    sampled = []
    for level, ((height, width), start) in enumerate(zip(shapes.tolist(), starts.tolist(), strict=True)):
        image = value[:, start : start + height * width].flatten(2).transpose(1, 2)
        image = image.reshape(batch * heads, channels, height, width)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1).to(value.dtype)
        sampled.append(F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False))
    weight = weights.transpose(1, 2).reshape(batch * heads, 1, queries, len(sampled) * points)
    total = (torch.stack(sampled, dim=-2).flatten(-2) * weight).sum(-1)
    return total.view(batch, heads * channels, queries).transpose(1, 2).contiguous()


def _differentiated(
    grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor
) -> Any:
    inputs = [t.detach().requires_grad_() for t in (value, locations, weights)]
    with torch.enable_grad():
        out = _by_grid_sample(inputs[0], shapes, starts, inputs[1], inputs[2])
    return torch.autograd.grad(out, inputs, grad)
