"""roipoint_pool3d on GPU: a program per box lists its first points, then tiles of samples and channels are copied.

The list of a box holds its points once. The second kernel repeats them, and completes the indices behind those that
anybody reads.
"""

import torch
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._geometry.box.gpu import inside, make_frame
from triops._gpu import cdiv, next_power_of_2

POINTS = _gpu.block(1024, interpreted=2048)  # tested at once
MOST_CHANNELS = 64  # of a tile
TILE = _gpu.block(4096, interpreted=16384)
WARPS = 4


def roipoint_pool3d(points, features, boxes, count, z_origin, margin):
    batch, length, channels = features.shape
    number, width = boxes.shape[1], 3 + channels
    pooled = torch.empty((batch, number, count, width), dtype=features.dtype, device=features.device)
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
    block = min(next_power_of_2(width), MOST_CHANNELS)
    blocks = cdiv(count, TILE // block)
    _copy_kernel[(batch * number * blocks, cdiv(width, block))](
        points, features, indices, found, pooled, length, number, count, blocks, channels, BLOCK=TILE // block,
        CHANNELS=block, num_warps=WARPS,
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
    CHANNELS: tl.constexpr,
):  # fmt: skip
    box = tl.program_id(0) // blocks
    k = (tl.program_id(0) - box * blocks) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    taken = tl.load(found + box)
    here = k < count
    used = here & (k - k + taken > 0)
    list_of_box = indices + box.to(tl.int64) * count
    i = tl.load(list_of_box + k % tl.maximum(taken, 1), mask=used, other=-1)
    if tl.program_id(1) == 0:
        tl.store(list_of_box + k, i, mask=here & (k >= taken))
    width = tl.cast(channels, tl.int64) + 3
    row = (box // number).to(tl.int64) * length + i[:, None]
    of_points = used[:, None] & (c < 3)[None, :]
    of_features = used[:, None] & ((c >= 3) & (c < width))[None, :]
    place = tl.load(points + row * 3 + c[None, :], mask=of_points, other=0.0).to(pooled.dtype.element_ty)
    value = tl.load(features + row * channels + (c[None, :] - 3), mask=of_features, other=0.0)
    to = (box.to(tl.int64) * count + k[:, None]) * width + c[None, :]
    tl.store(pooled + to, tl.where(c[None, :] < 3, place, value), mask=here[:, None] & (c < width)[None, :])
