"""Inputs of roiaware_pool3d_forward and roiaware_pool3d_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of, compiled_mmcv
from triops.ops.roiaware_pool3d import roiaware_pool3d, roiaware_pool3d_backward, roiaware_pool3d_forward

_Make = Callable[[torch.dtype], tuple[Any, ...]]


def _part_a2(mode: str, rois: int = 128, points: int = 16_000) -> _Make:
    """PartA2: cars, and points clustered around them; 12 x 12 x 12 cells of which about one in twenty is filled."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(0)
        size = torch.tensor([4.0, 2.0, 1.6])
        boxes = torch.cat([torch.rand(rois, 2, generator=g) * 60 - 30, torch.full((rois, 1), -1.0)], 1)
        boxes = torch.cat([boxes, size.expand(rois, 3), torch.rand(rois, 1, generator=g) * 6.28], 1)
        owner = torch.randint(0, rois, (points,), generator=g)
        spread = (torch.rand(points, 3, generator=g) - 0.5) * torch.tensor([4.0, 4.0, 2.0])
        xyz = boxes[owner, :3] + spread + torch.tensor([0.0, 0.0, 0.8])
        features = torch.randn(points, 16, generator=g)
        return boxes.to(dtype), xyz.to(dtype), features.to(dtype), 12, 12, 12, 128, mode, "bottom", 0.0

    return make


def _part_a2_backward(mode: str) -> _Make:
    """The gradient of the case above."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(1)
        _, argmax, point_indices = torch.ops.triops.roiaware_pool3d_forward(*_part_a2(mode)(torch.float32))
        return point_indices, argmax, torch.randn(argmax.shape, generator=g).to(dtype), 16_000, mode

    return make


def _random_lists(
    rois: int, cells: tuple[int, int, int], slots: int, channels: int, points: int, mode: str, seed: int = 0
) -> _Make:
    """Every cell filled with random points, as many as come: the design document's own test data."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        shape = (rois, *cells)
        point_indices = torch.randint(0, max(points, 1), (*shape, slots), generator=g, dtype=torch.int32)
        point_indices[..., 0] = torch.randint(0, slots, shape, generator=g) if points else 0
        argmax = torch.randint(-1, points, (*shape, channels), generator=g, dtype=torch.int32)
        return point_indices, argmax, torch.randn(*shape, channels, generator=g).to(dtype), points, mode

    return make


def _random(
    rois: int,
    points: int,
    channels: int,
    cells: tuple[int, int, int] = (3, 4, 2),
    slots: int = 5,
    mode: str = "max",
    z_origin: str = "bottom",
    margin: float = 0.0,
    seed: int = 0,
) -> _Make:
    """Large overlapping RoIs of every heading among the points; features with many ties."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        centre = torch.rand(rois, 3, generator=g) * 10 - 5
        boxes = torch.cat([centre, torch.rand(rois, 3, generator=g) * 8, torch.rand(rois, 1, generator=g) * 14 - 7], 1)
        xyz = torch.rand(points, 3, generator=g) * 12 - 6
        features = (torch.randn(points, channels, generator=g) * 4).round() / 4
        return boxes.to(dtype), xyz.to(dtype), features.to(dtype), *cells, slots, mode, z_origin, margin

    return make


def _distinct(mode: str) -> _Make:
    """Small, and no two features within 0.1: the maximum does not change hands under gradcheck's steps."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        rois, xyz, features, *rest = _random(2, 24, 3, (2, 2, 1), 8, mode, seed=9)(dtype)
        order = torch.randperm(features.numel(), generator=torch.Generator().manual_seed(0))
        return rois, xyz, (order.view(features.shape) * 0.1).to(dtype), *rest

    return make


def _on_faces(dtype: torch.dtype) -> tuple[Any, ...]:
    """Points exactly on faces and on the borders between cells, with a margin that includes what lies outside."""
    rois = torch.tensor([[1.0, -2.0, 0.5, 4.0, 2.0, 3.0, 0.0], [1.0, -2.0, 0.5, 4.0, 2.0, 3.0, torch.pi / 2]])
    steps = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    points = torch.cartesian_prod(steps, steps, steps) + torch.tensor([1.0, -2.0, 2.0])
    features = torch.arange(2.0 * len(points)).remainder(7).view(-1, 2)
    return rois.to(dtype), points.to(dtype), features.to(dtype), 4, 2, 3, 6, "max", "bottom", 0.25


def _not_finite(mode: str) -> _Make:
    """NaN and infinities among coordinates, RoIs and features; RoIs without size, of negative and of huge size."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        inf, nan = float("inf"), float("nan")
        rois, xyz, features, *rest = _random(9, 60, 4, (2, 2, 2), 8, mode, margin=0.5, seed=3)(dtype)
        rois[1, 3], rois[2, 6], rois[3, 0] = nan, inf, -inf
        rois[4, 3:5], rois[5, 3:6], rois[6, 3:6] = 0.0, -0.5, 5e4
        rois[7, :6] = torch.tensor([0.0, 0, -5, 8, 8, 10])
        xyz[5, 0], xyz[6, 1], xyz[7, 2] = nan, inf, -inf
        features[::3, 0], features[::2, 1], features[1::2, 2], features[:, 3] = nan, -inf, inf, -inf
        return rois, xyz, features, *rest

    return make


_F, _B = "roiaware_pool3d_forward", "roiaware_pool3d_backward"
_SEED = (12, 12, 12)

SAMPLES = [
    Sample(_F, "128 RoIs, 16000 points, max", _part_a2("max"), "network", demo=True),
    Sample(_F, "128 RoIs, 16000 points, avg", _part_a2("avg"), "network"),
    Sample(_B, "128 RoIs, 16000 points, max", _part_a2_backward("max"), "network", demo=True),
    Sample(_B, "128 RoIs, 16000 points, avg", _part_a2_backward("avg"), "network"),
    Sample(_B, "every cell filled, max", _random_lists(128, _SEED, 128, 16, 16_000, "max"), "network"),
    Sample(_B, "every cell filled, avg", _random_lists(128, _SEED, 128, 16, 16_000, "avg"), "network"),
    Sample(_F, "3 RoIs, 50 points, max", _random(3, 50, 3)),
    Sample(_F, "3 RoIs, 50 points, avg", _random(3, 50, 3, mode="avg")),
    Sample(_F, "centre z, margin 1e-5", _random(4, 300, 16, (5, 3, 4), 16, "max", "center", 1e-5, seed=1)),
    Sample(_F, "negative margin, 17 channels", _random(4, 300, 17, (2, 2, 2), 9, "avg", margin=-0.1, seed=2)),
    Sample(_F, "distinct features, max", _distinct("max"), gradcheck=True),
    Sample(_F, "distinct features, avg", _distinct("avg"), gradcheck=True),
    Sample(_F, "no RoIs", _random(0, 5, 3), "boundary"),
    Sample(_F, "no points", _random(3, 0, 3), "boundary"),
    Sample(_F, "no channels", _random(3, 20, 0), "boundary"),
    Sample(_F, "1 RoI, 1 point, 1 cell, 1 channel", _random(1, 1, 1, (1, 1, 1), 2, seed=7), "boundary"),
    Sample(_F, "no room for any point", _random(2, 80, 3, slots=1), "boundary"),
    Sample(_F, "room for one point", _random(2, 80, 3, slots=2, mode="avg"), "boundary"),
    Sample(_F, "1025 points in one cell", _random(1, 1025, 2, (1, 1, 1), 2000, seed=11), "boundary"),
    Sample(_F, "300 cells a side", _random(2, 64, 1, (300, 1, 1), 3, seed=4), "boundary"),
    Sample(_F, "129 channels", _random(1, 65, 129, (2, 1, 2), 4, seed=5), "boundary"),
    Sample(_F, "points on faces", _on_faces, "boundary"),
    Sample(_F, "not finite, max", _not_finite("max"), "boundary"),
    Sample(_F, "not finite, avg", _not_finite("avg"), "boundary"),
]
for _mode in ("max", "avg"):
    SAMPLES += [
        Sample(_B, f"2 RoIs, {_mode}", _random_lists(2, (2, 3, 2), 5, 3, 7, _mode)),
        Sample(_B, f"5 RoIs, 16 channels, {_mode}", _random_lists(5, (2, 2, 4), 70, 16, 90, _mode, seed=1)),
        Sample(_B, f"no RoIs, {_mode}", _random_lists(0, (2, 3, 2), 5, 3, 7, _mode), "boundary"),
        Sample(_B, f"no points, {_mode}", _random_lists(1, (2, 3, 2), 5, 3, 0, _mode), "boundary"),
        Sample(_B, f"no channels, {_mode}", _random_lists(1, (2, 3, 2), 5, 0, 7, _mode), "boundary"),
        Sample(_B, f"one element, {_mode}", _random_lists(1, (1, 1, 1), 2, 1, 1, _mode, seed=3), "boundary"),
        Sample(_B, f"no room for any point, {_mode}", _random_lists(2, (2, 1, 2), 1, 4, 9, _mode), "boundary"),
        Sample(_B, f"33 cells, 17 channels, {_mode}", _random_lists(1, (33, 1, 1), 4, 17, 9, _mode), "boundary"),
        Sample(_B, f"129 channels, {_mode}", _random_lists(1, (2, 1, 2), 3, 129, 6, _mode, seed=4), "boundary"),
        Sample(_B, f"3000 slots, {_mode}", _random_lists(1, (1, 2, 1), 3000, 2, 50, _mode, seed=5), "boundary"),
    ]


SIZED = [
    Sized(_F, mode, lambda draw, mode=mode: _random(draw(100), draw(200_000), 16, (4, 4, 4), 32, mode))  # type: ignore[misc]
    for mode in ("max", "avg")
] + [
    Sized(_B, mode, lambda draw, mode=mode: _random_lists(  # type: ignore[misc]
        draw(100), (4, 4, 4), 8, 16, draw(9000), mode))
    for mode in ("max", "avg")
]  # fmt: skip


def _bad_forward(function: Callable[..., Any]) -> list[BadCall]:
    name = function.__name__
    rois, points, features = torch.zeros(4, 7), torch.zeros(5, 3), torch.zeros(5, 2)

    def bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
        return BadCall(f"{name}: {what}", lambda: function(*args, **options), error, match)

    good = (rois, points, features, 2)
    return [
        bad("rois of rank 3", ValueError, r"rois must have shape \[R, 7\], got \[1, 4, 7\]", rois[None], *good[1:]),
        bad("rois with 8 columns", ValueError, r"got \[4, 8\]", torch.zeros(4, 8), *good[1:]),
        bad("points with 4 columns", ValueError, r"points must have shape \[P, 3\]", rois, rois[:, :4], features, 2),
        bad("unequal points", ValueError, r"features .*P = 5 as in points, got \[4, 2\]", *good[:2], features[1:], 2),
        bad("integer rois", TypeError, "rois must be float32.*got int64", rois.long(), points.long(), features, 2),
        bad("integer features", TypeError, "features must be float32.*got int32", rois, points, features.int(), 2),
        bad("unequal dtypes", TypeError, "rois float32, points float64", rois, points.double(), features, 2),
        bad("unequal devices", ValueError, "features on meta", rois, points, features.to("meta"), 2),
        bad("a list", TypeError, "rois must be a Tensor, got list", rois.tolist(), *good[1:]),
        bad("None", TypeError, "features must be a Tensor, got NoneType", rois, points, None, 2),
        bad("out_size 0", ValueError, "out_x must be at least 1, got 0", rois, points, features, 0),
        bad("two sizes", ValueError, "out_size must be one integer or three, got 2", rois, points, features, (2, 2)),
        bad("a fraction as size", TypeError, "out_size must be integers, got float in it", *good[:3], (2, 1.5, 2)),
        bad("a word as size", TypeError, "out_size must be a sequence of integers, got str", *good[:3], "2"),
        bad("more cells than int32 can count", ValueError, "at most 2147483647 cells", rois, points, features, 2000),
        bad("more points than int32 counts in blocks", ValueError, r"points must be at most 2\*\*30.*got 1073741825",
            rois, points[:1].expand(2**30 + 1, 3), features[:1].expand(2**30 + 1, 2), 2),
        bad("no slot", ValueError, "max_points_per_voxel must be at least 1, got 0", *good, max_points_per_voxel=0),
        bad("too many slots", ValueError, "max_points_per_voxel must be at most", *good, max_points_per_voxel=2**31),
        bad("unknown mode", ValueError, "mode must be 'max' or 'avg', got 'sum'", *good, mode="sum"),
        bad("mode of another type", TypeError, "mode must be a string, got int", *good, mode=0),
        bad("unknown z_origin", ValueError, "z_origin must be 'center' or 'bottom'", *good, z_origin="top"),
        bad("margin infinite", ValueError, "margin must be finite, got inf", *good, margin=float("inf")),
    ]  # fmt: skip


def _bad_backward() -> list[BadCall]:
    lists, argmax = torch.zeros(2, 1, 1, 3, 4, dtype=torch.int32), torch.zeros(2, 1, 1, 3, 5, dtype=torch.int32)
    grad = torch.zeros(2, 1, 1, 3, 5)

    def bad(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(f"{_B}: {what}", lambda: roiaware_pool3d_backward(*args), error, match)

    def put(tensor: Tensor, where: tuple[int, ...], value: int) -> Tensor:
        changed = tensor.clone()
        changed[where] = value
        return changed

    one = put(lists, (1, 0, 0, 2, 0), 1)
    at, count, slot = (0, 0, 0, 1, 3), (1, 0, 0, 0, 0), (1, 0, 0, 2, 1)
    return [
        bad("point_indices of rank 4", ValueError, r"point_indices must have shape \[R, X", lists[0], argmax, grad, 9),
        bad("argmax of another shape", ValueError, "argmax must have shape", lists, argmax[:, :, :, :2], grad, 9),
        bad("grad_out with other channels", ValueError, "C = 5 as in argmax", lists, argmax, grad[..., :4], 9),
        bad("no slots", ValueError, "slots of point_indices must be at least 1", lists[..., :0], argmax, grad, 9),
        bad("int64 argmax", TypeError, "argmax must be int32, got int64", lists, argmax.long(), grad, 9),
        bad("int64 point_indices", TypeError, "point_indices must be int32", lists.long(), argmax, grad, 9),
        bad("integer grad_out", TypeError, "grad_out must be float32", lists, argmax, argmax, 9),
        bad("unequal devices", ValueError, "grad_out on meta", lists, argmax, grad.to("meta"), 9),
        bad("a list", TypeError, "argmax must be a Tensor, got list", lists, argmax.tolist(), grad, 9),
        bad("negative num_points", ValueError, "num_points must be at least 0, got -1", lists, argmax, grad, -1),
        bad("too many points", ValueError, "num_points must be at most", lists, argmax, grad, 2**31),
        bad("a fraction of points", TypeError, "num_points must be an integer", lists, argmax, grad, 1.5),
        bad("unknown mode", ValueError, "mode must be 'max' or 'avg', got '1'", lists, argmax, grad, 9, "1"),
        bad("argmax too high", IndexError, r"argmax must lie in -1\.\.8", lists, put(argmax, at, 9), grad, 9),
        bad("argmax too low", IndexError, r"argmax must lie in -1\.\.8", lists, put(argmax, at, -2), grad, 9),
        bad("count too high", IndexError, r"count .* in 0\.\.3", put(lists, count, 4), argmax, grad, 9, "avg"),
        bad("count too low", IndexError, r"count .* in 0\.\.3", put(lists, count, -1), argmax, grad, 9, "avg"),
        bad("index too high", IndexError, r"must lie in 0\.\.8", put(one, slot, 2**31 - 1), argmax, grad, 9, "avg"),
        bad("index too low", IndexError, r"must lie in 0\.\.8", put(one, slot, -1), argmax, grad, 9, "avg"),
    ]  # fmt: skip


BAD_CALLS = [*_bad_forward(roiaware_pool3d), *_bad_forward(roiaware_pool3d_forward), *_bad_backward()]

STANDARD = {
    _F: Standard(why_slower="the points of each RoI are found, and sorted by cell, before anything is pooled"),
    _B: Standard(
        error_scale="row", why_slower="gradients are added to points in no order of memory, many cells to one point"
    ),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    if operator == _F:
        rois, points, features, x, y, z, slots = args[:7]
        cells = rois.shape[0] * x * y * z
        written = cells * (slots * 4 + features.shape[1] * (4 + features.element_size()))
        return Work(bytes_of((rois, points, features)) + written, 14 * rois.shape[0] * points.shape[0])
    point_indices, argmax, grad_out, num_points, mode = args
    channels, size = grad_out.shape[-1], grad_out.element_size()
    written = num_points * channels * size
    if mode == "max":
        entries = int((argmax >= 0).sum())
        return Work(argmax.numel() * 4 + entries * size + written, entries)
    # Of a list only what is filled; the count of an empty one costs a sector of 32 bytes.
    counts = point_indices[..., 0]
    filled, entries = int((counts > 0).sum()), int(counts.sum())
    return Work(counts.numel() * 32 + entries * 4 + filled * channels * size + written, entries * channels)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": _vectorised_forward if operator == _F else _vectorised_backward}
    _ext = compiled_mmcv()
    if _ext is None:
        return found

    def mmcv_forward(
        rois: Tensor, points: Tensor, features: Tensor, x: int, y: int, z: int, slots: int, mode: str, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = (rois.shape[0], x, y, z)
        pooled = features.new_zeros((*shape, features.shape[1]))
        argmax = torch.zeros_like(pooled, dtype=torch.int32)
        lists = argmax.new_zeros((*shape, slots))
        _ext.roiaware_pool3d_forward(rois, points, features, argmax, lists, pooled, pool_method=int(mode == "avg"))
        return pooled, argmax, lists

    def mmcv_backward(lists: Tensor, argmax: Tensor, grad_out: Tensor, num_points: int, mode: str) -> Tensor:
        grad_in = grad_out.new_zeros((num_points, grad_out.shape[-1]))
        _ext.roiaware_pool3d_backward(lists, argmax, grad_out.contiguous(), grad_in, pool_method=int(mode == "avg"))
        return grad_in

    if torch.cuda.is_available():  # mmcv has no CPU kernel
        found["mmcv"] = mmcv_forward if operator == _F else mmcv_backward
    return found


def _vectorised_forward(
    rois: Tensor, points: Tensor, features: Tensor, x: int, y: int, z: int, slots: int, mode: str, z_origin: str,
    margin: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The plain formulation in torch: all RoIs against all points, then a sort of the pairs by cell."""
    shift = points[None] - rois[:, None, :3]
    if z_origin == "center":
        shift[..., 2] += rois[:, None, 5] / 2
    cos, sin = rois[:, 6:].cos(), rois[:, 6:].sin()
    local = [shift[..., 0] * cos + shift[..., 1] * sin, shift[..., 1] * cos - shift[..., 0] * sin, shift[..., 2]]
    size = rois[:, 3:6, None]
    held = (local[2] - size[:, 2] / 2).abs() <= size[:, 2] / 2
    held &= (local[0].abs() < size[:, 0] / 2 + margin) & (local[1].abs() < size[:, 1] / 2 + margin)
    local[0], local[1] = local[0] + size[:, 0] / 2, local[1] + size[:, 1] / 2
    roi, point = held.nonzero(as_tuple=True)
    cell = roi
    for axis, cells in enumerate((x, y, z)):
        position = local[axis][roi, point] / (size[roi, axis, 0] / cells)
        cell = cell * cells + position.long().clamp(0, cells - 1)
    cell, order = cell.sort(stable=True)
    point = point[order]
    total = rois.shape[0] * x * y * z
    count = torch.bincount(cell, minlength=total)
    rank = torch.arange(len(cell), device=cell.device) - (count.cumsum(0) - count)[cell]
    keep = rank < slots - 1
    cell, point, rank = cell[keep], point[keep], rank[keep]
    lists = torch.zeros((total, slots), dtype=torch.int32, device=rois.device)
    lists[:, 0] = count.clamp(max=slots - 1)
    lists[cell, rank + 1] = point.int()
    value, rows = features[point], cell[:, None].expand(-1, features.shape[1])
    argmax = torch.full((total, features.shape[1]), -1, dtype=torch.int32, device=rois.device)
    if mode == "avg":
        pooled = features.new_zeros((total, features.shape[1])).index_add_(0, cell, value)
        pooled = pooled / lists[:, :1].clamp(min=1)
    else:
        pooled = features.new_full(argmax.shape, -torch.inf).scatter_reduce_(0, rows, value, "amax")
        candidate = torch.where(value == pooled[cell], point[:, None], len(points)).int()
        argmax.fill_(len(points)).scatter_reduce_(0, rows, candidate, "amin")
        argmax = torch.where(argmax == len(points), -1, argmax)
        pooled = torch.where(argmax < 0, 0, pooled)
    shape = (rois.shape[0], x, y, z, -1)
    channels = features.shape[1]
    return pooled.view(*shape[:4], channels), argmax.view(*shape[:4], channels), lists.view(*shape[:4], slots)


def _vectorised_backward(point_indices: Tensor, argmax: Tensor, grad_out: Tensor, num_points: int, mode: str) -> Tensor:
    """The plain formulation in torch: one scatter, or one index_add over all listed points."""
    channels, slots = grad_out.shape[-1], point_indices.shape[-1]
    grad_in = grad_out.new_zeros((num_points, channels))
    grad = grad_out.reshape(-1, channels)
    if mode == "max":
        winner = argmax.reshape(-1, channels).long()
        return grad_in.scatter_add_(0, winner.clamp(min=0), torch.where(winner >= 0, grad, 0))
    lists = point_indices.reshape(-1, slots)
    count = lists[:, :1]
    cell, slot = (torch.arange(1, slots, device=lists.device) <= count).nonzero(as_tuple=True)
    return grad_in.index_add_(0, lists[cell, slot + 1], (grad / count.clamp(min=1))[cell])
