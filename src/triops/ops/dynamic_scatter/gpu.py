"""dynamic_scatter on GPU: a stable sort groups the points by voxel; no float is added by an atomic.

Keys are flat cell numbers in the grid that the highest coordinates span, which stay on the device. They are int32, as
these are sorted in half the time. Where they overflow, the number of voxels, the one thing the host waits for, is -1,
and everything is done again in int64. `_segment_kernel` numbers the runs of equal keys; `_reduce_kernel` reduces them.
The backward is a gather; for "max" an atomic minimum of indices finds the lowest point that holds each maximum.
"""

import torch
import triton
import triton.language as tl

from triops import _check, _gpu
from triops._gpu.arithmetic import as_mask, divide
from triops._gpu.memory import load_run, store_run
from triops._gpu.scan import before_block, running_sums
from triops.ops.dynamic_scatter.reference import check_indices

BLOCK = 1024
TILE = _gpu.block(128, interpreted=4096)  # elements of the result per program
POINTS_PER_STEP = 4  # of a voxel
NO_VOXEL = {torch.int32: 2**31 - 1, torch.int64: 2**62}
SUM, MEAN, MAX = 0, 1, 2
_REDUCE = {"sum": SUM, "mean": MEAN, "max": MAX}
_SUM, _MEAN, _MAX = tl.constexpr(SUM), tl.constexpr(MEAN), tl.constexpr(MAX)


def dynamic_scatter_forward(features, coords, reduce):
    features, coords, device = features.contiguous(), coords.contiguous(), features.device
    (total, channels), axes = features.shape, coords.shape[1]
    point_to_voxel = torch.empty(total, dtype=torch.int32, device=device)
    voxels = 0
    if total:
        for make_keys in (_int32_keys, _int64_keys, _ranks):
            keys, fits = make_keys(coords)
            order, starts, number = _group(keys, fits, point_to_voxel)
            voxels = int(number)
            if voxels >= 0:
                break
    reduced = torch.empty((voxels, channels), dtype=features.dtype, device=device)
    voxel_coords = torch.empty((voxels, axes), dtype=coords.dtype, device=device)
    counts = torch.empty(voxels, dtype=torch.int32, device=device)
    if total:
        width, height, channel_tiles = _tile_shape(channels)
        _reduce_kernel[(max(_gpu.cdiv(voxels, height), 1) * channel_tiles,)](
            features, coords, order, starts, reduced, voxel_coords, counts, voxels, channels, channel_tiles,
            AXES=axes, REDUCE=_REDUCE[reduce], HEIGHT=height, POINTS=POINTS_PER_STEP, WIDTH=width, num_warps=4,
        )  # fmt: skip
    return reduced, voxel_coords, point_to_voxel, counts


def dynamic_scatter_backward(grad_reduced, features, reduced, point_to_voxel, counts, reduce):
    (total, channels), voxels = features.shape, reduced.shape[0]
    if _check.strict():
        check_indices(point_to_voxel, voxels)
    grad_features = torch.empty((total, channels), dtype=features.dtype, device=features.device)
    if grad_features.numel() == 0:
        return grad_features
    grad_reduced, point_to_voxel, counts = grad_reduced.contiguous(), point_to_voxel.contiguous(), counts.contiguous()
    width, height, channel_tiles = _tile_shape(channels, 4 * TILE)
    grid, winners = (_gpu.cdiv(total, height) * channel_tiles,), counts
    if reduce == "max":
        winners = torch.full((voxels, channels), total, dtype=torch.int32, device=features.device)
        _winner_kernel[grid](
            features.contiguous(), reduced.contiguous(), point_to_voxel, winners, total, voxels, channels,
            channel_tiles, HEIGHT=height, WIDTH=width, num_warps=4,
        )  # fmt: skip
    _gradient_kernel[grid](
        grad_reduced, point_to_voxel, counts, winners, grad_features, total, voxels, channels, channel_tiles,
        REDUCE=_REDUCE[reduce], HEIGHT=height, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return grad_features


def _tile_shape(channels, size=TILE):
    """-> channels and rows of a tile, and the number of tiles that cover all channels."""
    width = min(_gpu.next_power_of_2(channels), 64)
    return width, max(size // width, 1), max(_gpu.cdiv(channels, width), 1)


def _int32_keys(coords):
    return _flat_keys(coords, torch.int32)


def _int64_keys(coords):
    return _flat_keys(coords, torch.int64)


def _flat_keys(coords, dtype):
    """-> keys [N], and int64 [1]: 1 if they fit the dtype, else 0 and the keys are meaningless."""
    total, axes = coords.shape
    blocks = _gpu.cdiv(total, BLOCK)
    highest = torch.zeros(axes + 1, dtype=torch.int64, device=coords.device)
    keys = torch.empty(total, dtype=dtype, device=coords.device)
    _extent_kernel[(blocks,)](coords, highest, total, AXES=axes, BLOCK=BLOCK, num_warps=4)
    _key_kernel[(blocks,)](coords, highest, keys, total, AXES=axes, NO_VOXEL=NO_VOXEL[dtype], BLOCK=BLOCK, num_warps=4)
    return keys, highest[axes:]


def _ranks(coords):
    """Keys of coordinates that are too large for a flat number."""
    kept = (coords >= 0).all(1)
    keys = torch.full((len(coords),), NO_VOXEL[torch.int64], dtype=torch.int64, device=coords.device)
    keys[kept] = coords[kept].unique(dim=0, return_inverse=True)[1]
    return keys, torch.ones(1, dtype=torch.int64, device=coords.device)


def _group(keys, fits, point_to_voxel):
    """-> order [N] by voxel, then by point; where in it the voxels begin; the number of voxels, -1 if keys did not fit.

    Fills point_to_voxel.
    """
    total = keys.shape[0]
    ascending, order = keys.sort(stable=True)
    blocks = _gpu.cdiv(total, BLOCK)
    new_voxels = torch.empty(blocks, dtype=torch.int32, device=keys.device)
    starts = torch.empty(total + 1, dtype=torch.int32, device=keys.device)
    number = torch.empty((), dtype=torch.int32, device=keys.device)
    _count_kernel[(blocks,)](ascending, new_voxels, total, BLOCK=BLOCK, num_warps=4)
    new_voxels, _, summed = running_sums(new_voxels, 0, 1, blocks)
    _segment_kernel[(blocks,)](
        ascending, order, new_voxels, fits, starts, point_to_voxel, number, total, blocks, summed,
        NO_VOXEL=NO_VOXEL[keys.dtype], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return order, starts, number


@_gpu.kernel
def _extent_kernel(coords, highest, total, AXES: tl.constexpr, BLOCK: tl.constexpr):
    """The highest coordinates among rows without a negative one."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = coords + i.to(tl.int64) * AXES
    kept = i < total
    for axis in tl.static_range(AXES):
        kept = kept & (tl.load(at + axis, mask=i < total, other=-1) >= 0)
    for axis in tl.static_range(AXES):
        value = tl.load(at + axis, mask=kept, other=0).to(tl.int64)
        tl.atomic_max(highest + axis, tl.max(value, 0), sem="relaxed")


@_gpu.kernel
def _key_kernel(coords, highest, keys, total, AXES: tl.constexpr, NO_VOXEL: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = coords + i.to(tl.int64) * AXES
    kept = i < total
    key = tl.zeros([BLOCK], tl.int64)
    volume = tl.full((), 1.0, tl.float64)
    for axis in tl.static_range(AXES):
        value = tl.load(at + axis, mask=i < total, other=-1).to(tl.int64)
        maximum = tl.load(highest + axis)
        kept = kept & (value >= 0)
        key = key * (maximum + 1) + value
        volume = volume * (maximum.to(tl.float64) + 1.0)
    key = tl.where(kept, key, NO_VOXEL).to(keys.dtype.element_ty)
    store_run(keys + i, key, i < total, (tl.program_id(0) + 1) * BLOCK <= total)
    if tl.program_id(0) == 0:
        tl.store(highest + AXES, (volume < NO_VOXEL).to(tl.int64))


@triton.jit
def _begins(keys, i, total, BLOCK: tl.constexpr):
    """-> the keys, and whether a run of equal ones begins here."""
    key = load_run(keys + i, i < total, (tl.program_id(0) + 1) * BLOCK <= total, -1)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < total), other=-1)
    return key, (i < total) & ((i == 0) | (key != before))


@_gpu.kernel
def _count_kernel(keys, new_voxels, total, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, begins = _begins(keys, i, total, BLOCK)
    tl.store(new_voxels + tl.program_id(0), tl.sum(begins.to(tl.int32), 0))


@_gpu.kernel
def _segment_kernel(
    keys, order, new_voxels, fits, starts, point_to_voxel, number, total, blocks, summed,
    NO_VOXEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Points without a voxel, if any, are the last run."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, begins = _begins(keys, i, total, BLOCK)
    before, everything = before_block(new_voxels, blocks, summed, tl.program_id(0))
    run = before + tl.cumsum(begins.to(tl.int32), 0) - 1
    tl.store(starts + run, i, mask=begins)
    point = load_run(order + i, i < total, (tl.program_id(0) + 1) * BLOCK <= total, 0)
    tl.store(point_to_voxel + point, tl.where(key == NO_VOXEL, -1, run), mask=i < total)
    if tl.program_id(0) == 0:
        tl.store(starts + everything, total)
        voxels = everything - (tl.load(keys + (total - 1)) == NO_VOXEL).to(tl.int32)
        tl.store(number, tl.where(tl.load(fits) != 0, voxels, -1))


@triton.jit
def _tile(channel_tiles, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Rows and channels of this program."""
    row = (tl.program_id(0) // channel_tiles) * HEIGHT + tl.arange(0, HEIGHT)
    channel = (tl.program_id(0) % channel_tiles) * WIDTH + tl.arange(0, WIDTH)
    return row, channel


@_gpu.kernel(specialize=("channels",))
def _reduce_kernel(
    features, coords, order, starts, reduced, voxel_coords, counts, voxels, channels, channel_tiles,
    AXES: tl.constexpr, REDUCE: tl.constexpr, HEIGHT: tl.constexpr, POINTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if features.dtype.element_ty == tl.float64 else tl.float32
    voxel, channel = _tile(channel_tiles, HEIGHT, WIDTH)
    exists = voxel < voxels
    begin = tl.load(starts + voxel, mask=exists, other=0)
    end = tl.load(starts + voxel + 1, mask=exists, other=0)
    nothing = 0.0
    if REDUCE == _MAX:
        nothing = float("-inf")
    result = tl.full([HEIGHT, WIDTH], nothing, REAL)
    for k in range(0, tl.max(end - begin, 0), POINTS):
        j = begin[:, None] + (k + tl.arange(0, POINTS))[None, :]
        valid = j < end[:, None]
        point = tl.load(order + j, mask=valid, other=0)
        value = tl.load(
            features + point[:, :, None] * channels + channel[None, None, :],
            mask=valid[:, :, None] & (channel < channels)[None, None, :],
            other=nothing,
        ).to(REAL)
        if REDUCE == _MAX:
            value = tl.where(value == value, value, nothing)
            result = tl.maximum(result, tl.max(value, 1))
        else:
            result += tl.sum(value, 1)
    count = end - begin
    if REDUCE == _MEAN:
        result = divide(result, tl.broadcast_to(tl.maximum(count, 1).to(REAL)[:, None], [HEIGHT, WIDTH]))
    at = voxel.to(tl.int64)[:, None] * channels + channel[None, :]
    inside = exists[:, None] & (channel < channels)[None, :]
    tl.store(reduced + at, result.to(reduced.dtype.element_ty), mask=inside)

    first_tile = exists & as_mask(tl.program_id(0) % channel_tiles == 0, exists)
    tl.store(counts + voxel, count, mask=first_tile)
    first = tl.load(order + begin, mask=first_tile, other=0)
    for axis in tl.static_range(AXES):
        value = tl.load(coords + first * AXES + axis, mask=first_tile, other=0)
        tl.store(voxel_coords + voxel.to(tl.int64) * AXES + axis, value, mask=first_tile)


@_gpu.kernel(specialize=("channels",))
def _winner_kernel(
    features, reduced, point_to_voxel, winners, total, voxels, channels, channel_tiles,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    point, channel = _tile(channel_tiles, HEIGHT, WIDTH)
    voxel = tl.load(point_to_voxel + point, mask=point < total, other=-1)
    inside = ((voxel >= 0) & (voxel < voxels))[:, None] & (channel < channels)[None, :]
    at = voxel.to(tl.int64)[:, None] * channels + channel[None, :]
    value = tl.load(features + point.to(tl.int64)[:, None] * channels + channel[None, :], mask=inside, other=0.0)
    maximum = tl.load(reduced + at, mask=inside, other=0.0)
    index = tl.broadcast_to(point[:, None], [HEIGHT, WIDTH])
    tl.atomic_min(winners + at, index, mask=inside & (value == maximum), sem="relaxed")


@_gpu.kernel(specialize=("channels",))
def _gradient_kernel(
    grad_reduced, point_to_voxel, counts, winners, grad_features, total, voxels, channels, channel_tiles,
    REDUCE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if grad_reduced.dtype.element_ty == tl.float64 else tl.float32
    point, channel = _tile(channel_tiles, HEIGHT, WIDTH)
    voxel = tl.load(point_to_voxel + point, mask=point < total, other=-1)
    kept = (voxel >= 0) & (voxel < voxels)
    exists = (channel < channels)[None, :]
    mask = kept[:, None] & exists
    at = voxel.to(tl.int64)[:, None] * channels + channel[None, :]
    if REDUCE == _MAX:
        mask = mask & (tl.load(winners + at, mask=mask, other=-1) == point[:, None])
    grad = tl.load(grad_reduced + at, mask=mask, other=0.0)
    if REDUCE == _MEAN:
        count = tl.load(counts + voxel, mask=kept, other=1).to(REAL)
        grad = divide(grad.to(REAL), tl.broadcast_to(count[:, None], [HEIGHT, WIDTH]))
    to = grad_features + point.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(to, grad.to(grad_features.dtype.element_ty), mask=(point < total)[:, None] & exists)
