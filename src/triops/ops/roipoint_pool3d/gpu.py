"""roipoint_pool3d on GPU: a program per box lists its first points, then tiles of samples and channels are copied.

The list of a box holds its points once. The second kernel repeats them, and completes the indices behind those that
anybody reads. Rows are copied in two tiles of features, which together are hardly wider than a row, and a narrow one of
points.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._geometry.box.gpu import inside, make_frame
from triops._gpu import cdiv
from triops._gpu.rows import widths_of_tiles

POINTS = _gpu.block(1024, interpreted=2048)  # tested at once
MOST_CHANNELS = 256  # of a program
NARROWEST = 16  # channels that a tile counts for at least
TILE = _gpu.block(1024, interpreted=16384)  # of one warp: of more, each would work out the rows of all of them
WARPS = 4  # of a list


def roipoint_pool3d(points, features, boxes, count, z_origin, margin):
    batch, length, channels = features.shape
    number = boxes.shape[1]
    pooled = torch.empty((batch, number, count, 3 + channels), dtype=features.dtype, device=features.device)
    indices = torch.empty((batch, number, count), dtype=torch.int32, device=features.device)
    if indices.numel() == 0:
        return pooled, indices
    points, features = points.contiguous(), features.contiguous()
    found = torch.empty(batch * number, dtype=torch.int32, device=features.device)
    real = tl.float64 if compute_dtype(points.dtype) == torch.float64 else tl.float32
    _list_kernel[(batch * number,)](
        points, boxes.contiguous(), indices, found, length, number, count, _gpu.bits_of(margin),
        BOTTOM=z_origin == "bottom", BLOCK=POINTS, REAL=real, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    first, second, programs = widths_of_tiles(channels, MOST_CHANNELS)
    block = TILE // max(first, NARROWEST)
    blocks = cdiv(count, block)
    _copy_kernel[(batch * number * blocks, programs)](
        points, features, indices, found, pooled, length, number, count, blocks, channels, BLOCK=block, FIRST=first,
        SECOND=second, num_warps=1,
    )  # fmt: skip
    return pooled, indices


@_gpu.kernel
def _list_kernel(
    points, boxes, indices, found, length, number, count, margin_bits: tl.int64, BOTTOM: tl.constexpr,
    BLOCK: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    box = tl.program_id(0)
    points += (box // number).to(tl.int64) * length * 3
    indices += box.to(tl.int64) * count
    one = box + tl.arange(0, 1)
    frame = make_frame(boxes, one, one >= 0, margin_bits, BOTTOM, REAL)
    first, taken = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    while (first < length) & (taken < count):
        i = first + tl.arange(0, BLOCK)
        at = points + i.to(tl.int64) * 3
        x = tl.load(at, i < length, float("nan")).to(REAL)
        y = tl.load(at + 1, i < length, 0.0).to(REAL)
        z = tl.load(at + 2, i < length, 0.0).to(REAL)
        hit = inside(x, y, z, *frame)
        place = taken + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(indices + place, i, hit & (place < count))
        taken += tl.sum(hit.to(tl.int32), 0)
        first += BLOCK
    tl.store(found + box, tl.minimum(taken, count))


@_gpu.kernel(specialize=["channels"])
def _copy_kernel(
    points, features, indices, found, pooled, length, number, count, blocks, channels, BLOCK: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    box = tl.program_id(0) // blocks
    k = (tl.program_id(0) - box * blocks) * BLOCK + tl.arange(0, BLOCK)
    taken = tl.load(found + box)
    here = k < count
    used = here & (k - k + taken > 0)
    list_of_box = indices + box.to(tl.int64) * count
    i = tl.load(list_of_box + k % tl.maximum(taken, 1), mask=used, other=-1)
    row = (box // number).to(tl.int64) * length + i
    to = pooled + (box.to(tl.int64) * count + k) * (tl.cast(channels, tl.int64) + 3)
    channel = tl.program_id(1) * FIRST + tl.arange(0, FIRST)
    _copy(features + row * channels, to + 3, channel, channels, used, here)
    if SECOND:
        _copy(features + row * channels, to + 3, FIRST + tl.arange(0, SECOND), channels, used, here)
    if tl.program_id(1) == 0:
        _copy(points + row * 3, to, tl.arange(0, 4), 3, used, here)
        tl.store(list_of_box + k, i, mask=here & (k >= taken))


@triton.jit
def _copy(rows, to, column, columns, used, here):
    """Columns of rows, of those that are used; the others are 0."""
    there = (column < columns)[None, :]
    value = tl.load(rows[:, None] + column[None, :], mask=used[:, None] & there, other=0.0)
    tl.store(to[:, None] + column[None, :], value.to(to.dtype.element_ty), mask=here[:, None] & there)
