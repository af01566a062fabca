"""The k nearest points of a query, or the k lowest indices in a ball around it, by bounding boxes of sorted points.

Points are sorted by cloud and along a space-filling curve; each 32 of them in a row make a chunk with a bounding box,
each 128 chunks a group with one. One warp serves a query. It keeps the k smallest (key, index), and visits the chunks
whose key is not larger than the worst of those, smallest first. The key of a point is its squared distance, that of a
box its distance; in a ball it is the index, and the lowest index among the points of a box.

A box's distance is computed by the same operations as that of a point: rounding is monotone, so no point in the box is
nearer, not by one bit, and the answer is that of brute force.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu import bits_of, cdiv, next_power_of_2
from triops._gpu.arithmetic import finite, from_bits

CHUNK = 32  # points with one box; 64 take up to 40 % longer on an H200
GROUP = 128  # chunks with one box
SPLITS = _gpu.block(64, interpreted=1)  # programs that look for the extent of the clouds
CHUNKS = _gpu.block(4, interpreted=128)  # per program that makes them
QUERIES = _gpu.block(1, interpreted=64)  # per program of the search
UNSORTED = 2048  # points of all clouds up to which sorting costs more than it saves
BLOCK = 1024
WARP = 32
RANKED = range(9, WARP + 1)  # results of which all are compared with all

_CHUNK, _GROUP, _SPLITS = tl.constexpr(CHUNK), tl.constexpr(GROUP), tl.constexpr(SPLITS)
_HIGHEST = tl.constexpr(2**31 - 1)

BALL, NEAREST, THREE = 0, 1, 2  # what is searched, and what stands where there are no more neighbors


class Clouds(NamedTuple):
    """Rows [N, 3] of one or more clouds. offsets: int32 [B + 1], or any tensor where all have `each` rows."""

    rows: torch.Tensor
    offsets: torch.Tensor
    each: int
    batch: int
    ragged: bool

    @staticmethod
    def of(points, offsets):
        if points.dim() == 3:
            return Clouds(points.reshape(-1, 3).contiguous(), points, points.shape[1], points.shape[0], False)
        rows = points.contiguous()
        if offsets is None:
            return Clouds(rows, points, max(len(rows), 1), 1, False)
        # Offsets that do not ascend must not lead anywhere else.
        return Clouds(rows, offsets.clamp(0, len(rows)).cummax(0).values.int(), 1, len(offsets) - 1, True)


class Boxes(NamedTuple):
    """Points [3, N] in chunks, their indices [N], and of each chunk and group its box [6, n] and its lowest index."""

    points: torch.Tensor
    numbers: torch.Tensor
    boxes: torch.Tensor
    lowest: torch.Tensor
    group_boxes: torch.Tensor
    group_lowest: torch.Tensor


def boxes_of(clouds):
    if clouds.rows.shape[0] > 0:
        key = "neighbors", clouds.rows.dtype, clouds.offsets.dtype, clouds.ragged
        _gpu.compile_once(key, lambda: [_boxes_of(clouds, sort) for sort in (False, True)])
    return _boxes_of(clouds, clouds.rows.shape[0] > UNSORTED)


def _boxes_of(clouds, sort):
    rows, count, device = clouds.rows, clouds.rows.shape[0], clouds.rows.device
    real = compute_dtype(rows.dtype)
    chunks = cdiv(count, CHUNK)
    groups = cdiv(chunks, GROUP)
    made = Boxes(
        torch.empty((3, count), dtype=real, device=device), torch.empty(count, dtype=torch.int32, device=device),
        torch.empty((6, chunks), dtype=real, device=device), torch.empty(chunks, dtype=torch.int32, device=device),
        torch.empty((6, groups), dtype=real, device=device), torch.empty(groups, dtype=torch.int32, device=device),
    )  # fmt: skip
    if count == 0:
        return made
    order = _order(clouds, real) if sort else made.numbers
    _chunk_kernel[(cdiv(chunks, CHUNKS),)](
        rows, order, *made[:4], count, chunks, SORTED=sort, CHUNKS=CHUNKS, num_warps=4
    )
    _group_kernel[(groups,)](*made[2:], chunks, groups, num_warps=4)
    return made


def _order(clouds, real):
    """Rows by cloud, then along a curve that fills the space of all clouds."""
    rows, count = clouds.rows, clouds.rows.shape[0]
    extents = torch.empty((6, SPLITS), dtype=real, device=rows.device)
    keys = torch.empty(count, dtype=torch.int32, device=rows.device)
    cloud_bits = clouds.batch.bit_length()
    bits = min(10, (31 - cloud_bits) // 3)
    _extent_kernel[(SPLITS,)](rows, extents, count, BLOCK=BLOCK, num_warps=4)
    _key_kernel[(cdiv(count, BLOCK),)](
        rows, extents, keys, clouds.offsets, clouds.each, clouds.batch, cloud_bits, count, bits,
        RAGGED=clouds.ragged, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return keys.sort(stable=True).indices


def search(kind, points, queries, k, indices, distances=None, *, near=0.0, far=0.0, none=-1, root=False):
    """Fill indices [M, k] int32 and, unless in a ball, distances [M, k] of the compute dtype.

    kind: BALL, NEAREST or THREE. near, far: the radii of a ball. none: what stands for a ball without points.
    root: whether distances are not squared.
    """
    boxes, total = boxes_of(points), queries.rows.shape[0]
    if total == 0:
        return
    real = tl.float64 if points.rows.dtype == torch.float64 else tl.float32
    lanes = max(WARP, next_power_of_2(k))  # a whole warp has instructions for the least and the most
    _search_kernel[(cdiv(total, QUERIES),)](
        *boxes, queries.rows, points.offsets, queries.offsets, indices, indices if distances is None else distances,
        points.rows.shape[0], boxes.lowest.shape[0], boxes.group_lowest.shape[0], points.each, queries.each,
        points.batch, points.batch.bit_length(), total, k, none, bits_of(near), bits_of(far),
        KIND=kind, ROOT=root, RAGGED=points.ragged, RANKED=k in RANKED, K=lanes, QUERIES=QUERIES, REAL=real,
        num_warps=max(1, lanes // 256), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _load_point(rows, i, inside, REAL: tl.constexpr):
    """-> x, y, z of rows i, and whether they are finite."""
    at = rows + i.to(tl.int64) * 3
    x = tl.load(at, mask=inside, other=float("nan")).to(REAL)
    y = tl.load(at + 1, mask=inside, other=float("nan")).to(REAL)
    z = tl.load(at + 2, mask=inside, other=float("nan")).to(REAL)
    return x, y, z, finite(x) & finite(y) & finite(z)


@triton.jit
def _store_boxes(boxes, n, at, inside, x, y, z, high_x, high_y, high_z):
    boxes += at
    tl.store(boxes, x, mask=inside)
    tl.store(boxes + n, y, mask=inside)
    tl.store(boxes + 2 * n, z, mask=inside)
    tl.store(boxes + 3 * n, high_x, mask=inside)
    tl.store(boxes + 4 * n, high_y, mask=inside)
    tl.store(boxes + 5 * n, high_z, mask=inside)


@triton.jit
def _cloud_of(offsets, each, batch, steps, i, RAGGED: tl.constexpr):
    """The cloud of rows i; `batch` for those behind the last."""
    if RAGGED:
        low = tl.zeros_like(i)
        high = low + batch
        for _ in range(steps):  # as many as halve `batch` to 0
            middle = (low + high) // 2
            open = low < high
            after = open & (tl.load(offsets + middle + 1, mask=open, other=0) <= i)
            low, high = tl.where(after, middle + 1, low), tl.where(open & (after == 0), middle, high)
        return low
    else:
        return i // each


@_gpu.kernel
def _extent_kernel(rows, extents, count, BLOCK: tl.constexpr):
    """Of all points that are finite, by program."""
    REAL: tl.constexpr = extents.dtype.element_ty
    low_x = tl.full((BLOCK,), float("inf"), REAL)
    low_y, low_z = low_x, low_x
    high_x, high_y, high_z = -low_x, -low_x, -low_x
    for begin in range(tl.program_id(0) * BLOCK, count, _SPLITS * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        x, y, z, valid = _load_point(rows, i, i < count, REAL)
        low_x, high_x = tl.minimum(low_x, tl.where(valid, x, low_x)), tl.maximum(high_x, tl.where(valid, x, high_x))
        low_y, high_y = tl.minimum(low_y, tl.where(valid, y, low_y)), tl.maximum(high_y, tl.where(valid, y, high_y))
        low_z, high_z = tl.minimum(low_z, tl.where(valid, z, low_z)), tl.maximum(high_z, tl.where(valid, z, high_z))
    _store_boxes(extents, _SPLITS, tl.program_id(0), True, tl.min(low_x, 0), tl.min(low_y, 0), tl.min(low_z, 0),
                 tl.max(high_x, 0), tl.max(high_y, 0), tl.max(high_z, 0))  # fmt: skip


@triton.jit
def _spread(x):
    """The lowest 10 bits of x at every third place."""
    x = (x | (x << 16)) & 0x030000FF
    x = (x | (x << 8)) & 0x0300F00F
    x = (x | (x << 4)) & 0x030C30C3
    return (x | (x << 2)) & 0x09249249


@triton.jit
def _cell(x, low, scale, last, valid):
    """Which of 2**bits cells along an axis; halves, since the whole extent may overflow."""
    return tl.minimum(tl.where(valid, (x * 0.5 - low * 0.5) * scale, 0.0), last).to(tl.int32)


@_gpu.kernel
def _key_kernel(
    rows, extents, keys, offsets, each, batch, steps, count, bits, RAGGED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    REAL: tl.constexpr = extents.dtype.element_ty
    split = tl.arange(0, _SPLITS)
    low_x = tl.min(tl.load(extents + split), 0)
    low_y = tl.min(tl.load(extents + _SPLITS + split), 0)
    low_z = tl.min(tl.load(extents + 2 * _SPLITS + split), 0)
    half_x = tl.max(tl.load(extents + 3 * _SPLITS + split), 0) * 0.5 - low_x * 0.5
    half_y = tl.max(tl.load(extents + 4 * _SPLITS + split), 0) * 0.5 - low_y * 0.5
    half_z = tl.max(tl.load(extents + 5 * _SPLITS + split), 0) * 0.5 - low_z * 0.5
    last = ((tl.full((), 1, tl.int32) << bits) - 1).to(REAL)
    widest = tl.maximum(tl.maximum(half_x, half_y), half_z)
    scale = tl.where(widest > 1e-30, last / widest, 0.0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y, z, valid = _load_point(rows, i, i < count, REAL)
    key = _spread(_cell(x, low_x, scale, last, valid)) | (_spread(_cell(y, low_y, scale, last, valid)) << 1)
    key |= _spread(_cell(z, low_z, scale, last, valid)) << 2
    cloud = _cloud_of(offsets, each, batch, steps, i, RAGGED)
    tl.store(keys + i, (cloud << (3 * bits)) | key, mask=i < count)


@_gpu.kernel
def _chunk_kernel(
    rows, order, points, index, boxes, lowest, count, chunks, SORTED: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    REAL: tl.constexpr = points.dtype.element_ty
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    at = chunk[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    inside = at < count
    row = at
    if SORTED:
        row = tl.load(order + at, mask=inside, other=0).to(tl.int32)
    x, y, z, valid = _load_point(rows, row, inside, REAL)
    n = tl.cast(count, tl.int64)
    tl.store(points + at, x, mask=inside)
    tl.store(points + n + at, y, mask=inside)
    tl.store(points + 2 * n + at, z, mask=inside)
    tl.store(index + at, row, mask=inside)
    tl.store(lowest + chunk, tl.min(tl.where(valid, row, _HIGHEST), 1), mask=chunk < chunks)
    low, high = float("inf"), float("-inf")
    _store_boxes(
        boxes, chunks, chunk, chunk < chunks,
        tl.min(tl.where(valid, x, low), 1), tl.min(tl.where(valid, y, low), 1), tl.min(tl.where(valid, z, low), 1),
        tl.max(tl.where(valid, x, high), 1), tl.max(tl.where(valid, y, high), 1), tl.max(tl.where(valid, z, high), 1),
    )  # fmt: skip


@triton.jit
def _load_boxes(boxes, n, at, inside):
    boxes += at
    infinity = float("inf")
    x = tl.load(boxes, mask=inside, other=infinity)
    y = tl.load(boxes + n, mask=inside, other=infinity)
    z = tl.load(boxes + 2 * n, mask=inside, other=infinity)
    high_x = tl.load(boxes + 3 * n, mask=inside, other=-infinity)
    high_y = tl.load(boxes + 4 * n, mask=inside, other=-infinity)
    high_z = tl.load(boxes + 5 * n, mask=inside, other=-infinity)
    return x, y, z, high_x, high_y, high_z


@_gpu.kernel
def _group_kernel(boxes, lowest, group_boxes, group_lowest, chunks, groups):
    group = tl.program_id(0)
    at = group * _GROUP + tl.arange(0, _GROUP)
    inside = at < chunks
    x, y, z, high_x, high_y, high_z = _load_boxes(boxes, chunks, at, inside)
    tl.store(group_lowest + group, tl.min(tl.load(lowest + at, mask=inside, other=_HIGHEST), 0))
    _store_boxes(group_boxes, groups, group, True, tl.min(x, 0), tl.min(y, 0), tl.min(z, 0),
                 tl.max(high_x, 0), tl.max(high_y, 0), tl.max(high_z, 0))  # fmt: skip


@triton.jit
def _outside(value, low, high):
    """How far a value lies outside of an interval."""
    return tl.maximum(tl.maximum(low - value, value - high), 0.0)


@triton.jit
def _box_keys(boxes, lowest, n, at, inside, x, y, z, far, limit, KIND: tl.constexpr):
    """No point of a box has a smaller key; `limit` where none matters."""
    low_x, low_y, low_z, high_x, high_y, high_z = _load_boxes(boxes, n, at, inside)
    dx, dy, dz = _outside(x, low_x, high_x), _outside(y, low_y, high_y), _outside(z, low_z, high_z)
    d = (dx * dx + dy * dy) + dz * dz
    if KIND == 0:
        return tl.where((d < far) | (d == 0), tl.load(lowest + at, mask=inside, other=_HIGHEST), limit)
    else:
        return _distance_key(d)


@triton.jit
def _distance_key(d):
    """The bits of a distance, which as an integer have the order of the numbers: a GPU has an instruction for the least
    integer of a warp. What is not a number is infinite."""
    d = tl.where(d < float("inf"), d, float("inf"))
    return d.to(tl.int64 if d.dtype == tl.float64 else tl.int32, bitcast=True)


@triton.jit
def _least(x):
    """Of each row."""
    return tl.min(x, 1, keep_dims=True)


@triton.jit
def _most(x):
    return tl.max(x, 1, keep_dims=True)


@triton.jit
def _any(mask):
    return tl.max(tl.max(mask.to(tl.int32), 1), 0) > 0


@_gpu.kernel
def _search_kernel(
    points, index, boxes, lowest, group_boxes, group_lowest, queries, offsets, query_offsets, indices, distances,
    count, chunks, groups, each, query_each, batch, steps, total, k, none, near_bits, far_bits,
    KIND: tl.constexpr, ROOT: tl.constexpr, RAGGED: tl.constexpr, RANKED: tl.constexpr, K: tl.constexpr,
    QUERIES: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    # A value per query is [QUERIES, 1].
    q = (tl.program_id(0) * QUERIES + tl.arange(0, QUERIES))[:, None]
    n = tl.cast(count, tl.int64)
    cloud = _cloud_of(query_offsets, query_each, batch, steps, q, RAGGED)
    begin, end, base = cloud * each, cloud * each + each, cloud * each
    if RAGGED:
        begin = tl.load(offsets + cloud, mask=cloud < batch, other=0)
        end = tl.load(offsets + cloud + 1, mask=cloud < batch, other=0)
        base = tl.zeros_like(begin)
    x, y, z, valid_query = _load_point(queries, q, q < total, REAL)
    # What is not a number would lie in every box (`maximum` drops it), and visit them all; infinity lies in none.
    x = tl.where(valid_query, x, float("inf"))
    end = tl.where(valid_query, tl.minimum(end, count), begin)
    near, far = from_bits(near_bits, REAL), from_bits(far_bits, REAL)
    near, far = near * near, far * far

    # The k smallest so far, in any order: (limit, an index of its own) where there is none yet.
    lane = tl.arange(0, K)[None, :]
    if KIND == 0:
        limit = tl.full((QUERIES, 1), 2147483647, tl.int32)
    else:
        limit = _distance_key(tl.full((QUERIES, 1), float("inf"), REAL))
    best_key = tl.where(lane < k, limit, -1)
    best_index = _HIGHEST - lane + tl.zeros_like(q)
    worst_key, worst_index = limit, tl.full((QUERIES, 1), 2147483647, tl.int32)

    # Where there is no point, no chunk either: it could lie behind the last.
    first_chunk = tl.where(begin < end, begin // _CHUNK, 0)
    last_chunk = tl.where(begin < end, (end + (_CHUNK - 1)) // _CHUNK, 0)
    first_group, last_group = first_chunk // _GROUP, (last_chunk + (_GROUP - 1)) // _GROUP
    first_start = tl.min(tl.min(first_group, 1), 0)
    last_start = tl.max(tl.max(last_group, 1), 0)
    for start in range(first_start, last_start, _GROUP):
        # As wide as its mask: Triton 3.4 broadcasts masks to pointers, and not the other way round.
        group = start + tl.arange(0, _GROUP)[None, :] + tl.zeros_like(q)
        inside = (group >= first_group) & (group < last_group)
        group_key = _box_keys(group_boxes, group_lowest, groups, group, inside, x, y, z, far, limit, KIND)
        nearest = _least(group_key)
        visit_group = (nearest < limit) & (nearest <= worst_key)
        while _any(visit_group):
            this = _least(tl.where(visit_group & (group_key == nearest), group, _HIGHEST))
            group_key = tl.where(group == this, limit, group_key)
            chunk = tl.where(visit_group, this, 0) * _GROUP + tl.arange(0, _GROUP)[None, :]
            within = visit_group & (chunk >= first_chunk) & (chunk < last_chunk)
            chunk_key = _box_keys(boxes, lowest, chunks, chunk, within, x, y, z, far, limit, KIND)
            nearest = _least(chunk_key)
            visit = (nearest < limit) & (nearest <= worst_key)
            while _any(visit):
                this = _least(tl.where(visit & (chunk_key == nearest), chunk, _HIGHEST))
                chunk_key = tl.where(chunk == this, limit, chunk_key)
                at = tl.where(visit, this, 0) * _CHUNK + tl.arange(0, _CHUNK)[None, :]
                here = visit & (at >= begin) & (at < end)
                dx = x - tl.load(points + at, mask=here, other=float("nan"))
                dy = y - tl.load(points + n + at, mask=here, other=float("nan"))
                dz = z - tl.load(points + 2 * n + at, mask=here, other=float("nan"))
                own = tl.load(index + at, mask=here, other=0)
                d = (dx * dx + dy * dy) + dz * dz
                key = _distance_key(d)
                if KIND == 0:
                    key = tl.where((d == 0) | ((d >= near) & (d < far)), own, limit)
                key = tl.where((key < worst_key) | ((key == worst_key) & (own < worst_index)), key, limit)
                smallest = _least(key)
                while _any(smallest < limit):
                    chosen = _least(tl.where(key == smallest, own, _HIGHEST))
                    replaced = (smallest < limit) & (best_key == worst_key) & (best_index == worst_index)
                    best_key = tl.where(replaced, smallest, best_key)
                    best_index = tl.where(replaced, chosen, best_index)
                    worst_key = _most(best_key)
                    worst_index = _most(tl.where(best_key == worst_key, best_index, -1))
                    better = (key < worst_key) | ((key == worst_key) & (own < worst_index))
                    key = tl.where(better & (own != chosen), key, limit)
                    smallest = _least(key)
                nearest = _least(chunk_key)
                visit = (nearest < limit) & (nearest <= worst_key)
            nearest = _least(group_key)
            visit_group = (nearest < limit) & (nearest <= worst_key)

    best_key = tl.where(lane < k, best_key, limit)
    if KIND == 0:
        first = _least(best_key)
        missing = tl.where(first < limit, first - base, none)
    elif KIND == 1:
        missing = tl.full((QUERIES, 1), -1, tl.int32)
    else:
        missing = begin - base
    at = q.to(tl.int64) * k
    valid = q < total
    if RANKED:
        key, key2 = best_key[:, None, :], best_key[:, :, None]
        before = (key < key2) | ((key == key2) & (best_index[:, None, :] < best_index[:, :, None]))
        slot = tl.sum(before.to(tl.int32), 2)
        tl.store(indices + at + slot, tl.where(best_key < limit, best_index - base, missing), mask=valid & (slot < k))
        if KIND != 0:
            tl.store(distances + at + slot, _distance(best_key, ROOT, REAL), mask=valid & (slot < k))
    else:
        for slot in range(k):
            smallest = _least(best_key)
            chosen = _least(tl.where(best_key == smallest, best_index, _HIGHEST))
            best_key = tl.where(best_index == chosen, limit, best_key)
            tl.store(indices + at + slot, tl.where(smallest < limit, chosen - base, missing), mask=valid)
            if KIND != 0:
                tl.store(distances + at + slot, _distance(smallest, ROOT, REAL), mask=valid)


@triton.jit
def _distance(key, ROOT: tl.constexpr, REAL: tl.constexpr):
    squared = key.to(REAL, bitcast=True)
    if not ROOT:
        return squared
    elif squared.dtype == tl.float64:
        return tl.sqrt(squared)
    else:
        return tl.sqrt_rn(squared)
