"""bbox_overlaps on GPU: a run of column boxes stays in registers, and row boxes are loaded as scalars.

The gradient takes two launches of one kernel, one per set of boxes: every program owns the boxes whose gradients it
sums, so there are no atomics and every run gives the same bits.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from triops import _gpu
from triops._dtypes import compute_dtype
from triops.ops.bbox_overlaps import batches, output_shape

ALIGNED_BLOCK = _gpu.block(256, interpreted=4096)
BACKWARD_OWN = _gpu.block(32, interpreted=128)  # boxes per program of the backward, whose gradients it sums
BACKWARD_OTHERS = _gpu.block(32, interpreted=512)  # boxes of the other set per step
BACKWARD_PROGRAMS = 1024  # enough to fill a GPU; with fewer boxes, several programs share one

INTERPRETED = tl.constexpr(_gpu.INTERPRETED)  # the interpreter has no libdevice
# The forward takes heights in quarters. That is exact and cancels in the ratio, and keeps every denominator below
# 2**126, above which the fast division gives 0.
Y_UNIT = tl.constexpr(0.25)


def bbox_overlaps(bboxes1, bboxes2, mode, aligned, offset):
    shape = output_shape(bboxes1, bboxes2, aligned)
    out = torch.empty(shape, dtype=bboxes1.dtype, device=bboxes1.device)
    total = out.numel()
    if total == 0:
        return out
    if aligned:
        if bboxes1.shape != bboxes2.shape:
            bboxes1, bboxes2 = bboxes1.expand(*shape, 4), bboxes2.expand(*shape, 4)
        _aligned_kernel[(-(-total // ALIGNED_BLOCK),)](
            bboxes1.contiguous(), bboxes2.contiguous(), out, total,
            IOF=mode == "iof", OFFSET=offset, BLOCK=ALIGNED_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    count1, count2 = shape[-2:]
    boxes1, stride1 = _batches(bboxes1, shape[:-2])
    boxes2, stride2 = _batches(bboxes2, shape[:-2])
    half = out.element_size() == 2
    if half and boxes2.data_ptr() % 8:  # a view into a larger tensor; a box is read as 8 bytes
        boxes2 = boxes2.clone()

    def launch(rows, columns, warps, unit):
        row_tiles, column_tiles = -(-count1 // rows), -(-count2 // columns)
        _overlaps_kernel[(total // (count1 * count2) * row_tiles * column_tiles,)](
            boxes1, boxes2, out, stride1, stride2, count1, count2 // unit, rows, row_tiles, column_tiles,
            UNIT=unit, IOF=mode == "iof", OFFSET=offset, COLUMNS=columns, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip

    def launch_all():
        for tile in _tiles(half):
            for unit in (8, 1) if half else (1,):
                launch(*tile, unit)

    _gpu.compile_once(("bbox_overlaps", out.dtype, mode, offset), launch_all)
    launch(*_tile(total, count2, half), 8 if half and count2 % 8 == 0 else 1)
    return out


def bbox_overlaps_backward(grad, bboxes1, bboxes2, mode, aligned, offset):
    if grad.numel() == 0:
        return torch.zeros_like(bboxes1), torch.zeros_like(bboxes2)
    real = compute_dtype(grad.dtype)
    if aligned:
        grad1, grad2 = torch.empty((2, *grad.shape, 4), dtype=real, device=grad.device)
        _aligned_backward_kernel[(-(-grad.numel() // ALIGNED_BLOCK),)](
            grad.contiguous(), bboxes1.expand(*grad.shape, 4).contiguous(), bboxes2.expand(*grad.shape, 4).contiguous(),
            grad1, grad2, grad.numel(),
            IOF=mode == "iof", OFFSET=offset, BLOCK=ALIGNED_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        lead, (count1, count2) = grad.shape[:-2], grad.shape[-2:]
        grad = grad.reshape(-1, count1, count2)
        boxes1, boxes2 = _batches(bboxes1, lead), _batches(bboxes2, lead)
        axis1, axis2 = (2, 1) if grad.is_contiguous() else (1, 2) if grad.mT.is_contiguous() else (0, 0)
        area1, area2 = (0, 1) if mode == "iof" else (2, 2)

        def launch(unit):
            return (
                _gradient(grad, axis1, unit, boxes1, boxes2, count1, count2, area1, offset),
                _gradient(grad.mT, axis2, unit, boxes2, boxes1, count2, count1, area2, offset),
            )

        key = "bbox_overlaps_backward", grad.dtype, mode, offset, axis1
        _gpu.compile_once(key, lambda: (launch(1), axis1 and launch(8)))
        row = {0: 1, 1: count1, 2: count2}[axis1]
        grad1, grad2 = launch(8 if axis1 and row % 8 == 0 else 1)
        grad1, grad2 = grad1.view(*lead, count1, 4), grad2.view(*lead, count2, 4)
    return tuple(g.sum_to_size(b.shape).to(b.dtype).contiguous() for g, b in ((grad1, bboxes1), (grad2, bboxes2)))


def _gradient(grad, axis, unit, own, others, own_count, other_count, area, offset):
    """The gradient of one set, [B, own_count, 4]. `area`: whose area is the base: 0 own, 1 the other's, 2 both.

    axis: of grad [B, own_count, other_count], in whose memory it comes last, 0 if it has none; its size is a multiple
    of `unit`.
    """
    batch = grad.shape[0]
    own_tiles = _gpu.cdiv(own_count, BACKWARD_OWN)
    other_tiles = _gpu.cdiv(other_count, BACKWARD_OTHERS)
    parts = min(_gpu.cdiv(BACKWARD_PROGRAMS, batch * own_tiles), other_tiles)
    share = _gpu.cdiv(other_tiles, parts) * BACKWARD_OTHERS
    out = torch.empty((parts, batch, own_count, 4), dtype=compute_dtype(grad.dtype), device=grad.device)
    _backward_kernel[(parts * batch * own_tiles,)](
        grad, own[0], others[0], out, own[1], others[1], *grad.stride(), batch,
        own_count // (unit if axis == 1 else 1), other_count // (unit if axis == 2 else 1), own_tiles, share,
        AXIS=axis, UNIT=unit, AREA=area, OFFSET=offset, OWN=BACKWARD_OWN, OTHERS=BACKWARD_OTHERS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def _batches(bboxes, lead):
    """[B, rows, 4] in one piece, and how many boxes lie between batches: 0 where all share one."""
    if bboxes.dim() == 2:
        return bboxes.contiguous(), 0
    bboxes = batches(bboxes, lead).contiguous()
    return bboxes, bboxes.shape[1] if bboxes.shape[0] > 1 else 0


def _tile(total, count2, half):
    """Rows and columns of a program, and its warps, as measured on an H200. Rows are not compiled in."""
    if _gpu.INTERPRETED:
        return 64, 1024, 1
    small, large = _tiles(half)
    if count2 <= 256:
        return small
    if total < 10**8:  # many programs to fill the GPU
        return large
    return (64, *large[1:]) if half else (32, *small[1:])  # many rows, to reuse the loaded columns


def _tiles(half):
    """A tile for each kernel that `_tile` can choose."""
    return (16, 256, 1), (16, 512, 1) if half else (8, 512, 2)


@triton.jit
def _load_boxes(boxes, i, mask, REAL: tl.constexpr):
    """x1, y1, x2, y2 of boxes `i`, each read in one piece."""
    fields = tl.load(boxes + i[:, None] * 4 + tl.arange(0, 4)[None, :], mask[:, None], 0.0).to(REAL)
    x, y = tl.split(tl.reshape(fields, (fields.shape[0], 2, 2)))
    x1, x2 = tl.split(x)
    y1, y2 = tl.split(y)
    return x1, y1, x2, y2


@triton.jit
def _load_half_boxes(boxes, i, mask):
    """The same for a half type, a box as one integer: so a thread holds the neighbors that it stores together."""
    HALF: tl.constexpr = boxes.dtype.element_ty
    fields = tl.load(boxes.to(tl.pointer_type(tl.int64)) + i, mask, 0)
    x1 = fields.to(tl.int16).to(HALF, bitcast=True)
    y1 = (fields >> 16).to(tl.int16).to(HALF, bitcast=True)
    x2 = (fields >> 32).to(tl.int16).to(HALF, bitcast=True)
    y2 = (fields >> 48).to(tl.int16).to(HALF, bitcast=True)
    return x1.to(tl.float32), y1.to(tl.float32), x2.to(tl.float32), y2.to(tl.float32)


@triton.jit
def _area(x1, y1, x2, y2, OFFSET_X: tl.constexpr, OFFSET_Y: tl.constexpr):
    """Never negative, so that a ratio without overlap cannot turn positive; not finite where the box is not."""
    return tl.abs((x2 - x1 + OFFSET_X) * (y2 - y1 + OFFSET_Y))


@triton.jit
def _zero(x1, y1, x2, y2):
    """0, or NaN where the box is not finite."""
    return ((x1 - x1) + (y1 - y1)) + ((x2 - x2) + (y2 - y2))


@triton.jit
def _quotient(a, b, EXACT: tl.constexpr):
    """a / b for 0 <= a <= b < 2**126, in a third of the time of an IEEE division."""
    if INTERPRETED or a.dtype == tl.float64:
        quotient = a / b
    elif EXACT:
        inverse = libdevice.fast_dividef(1.0, b)
        quotient = a * inverse
        # The remainder, divided too. (`-b` would be a subtraction, `b * -1` is a flipped sign.)
        quotient = tl.fma(tl.fma(b * -1.0, quotient, a), inverse, quotient)
    else:
        quotient = libdevice.fast_dividef(a, b)
    return quotient


@triton.jit
def _overlap(
    x1, y1, x2, y2, area, other_x1, other_y1, other_x2, other_y2, weight,
    IOF: tl.constexpr, OFFSET_X: tl.constexpr, OFFSET_Y: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    width = tl.minimum(x2, other_x2) - tl.maximum(x1, other_x1)
    height = tl.minimum(y2, other_y2) - tl.maximum(y1, other_y1)
    if OFFSET_X:
        width += OFFSET_X
        height += OFFSET_Y
    # The height may stay negative: a ratio below 0 ends as 0 anyway.
    inter = tl.maximum(width, 0.0) * height
    base = area + weight
    if not IOF:
        base -= inter
    if OFFSET_X:
        base = tl.where(base < OFFSET_Y, OFFSET_Y, base)  # keeps NaN, which tl.maximum would drop
    # A box that is not finite makes the base infinite or NaN, and so the ratio 0 or NaN.
    ratio = _quotient(inter, base, EXACT)
    return tl.where(ratio > 0, ratio, 0.0)


@_gpu.kernel
def _overlaps_kernel(
    boxes1, boxes2, out, stride1, stride2, count1, units2, rows, row_tiles, column_tiles,
    UNIT: tl.constexpr, IOF: tl.constexpr, OFFSET: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`rows` boxes of the first set against COLUMNS of the second, of which there are `units2 * UNIT`.

    By a UNIT of 8 the compiler sees that the rows of a half type start aligned, and stores 16 bytes at a time. Other
    types have a unit of 1: there a box in one load leaves neighboring columns with neighboring threads, which store
    one by one, coalesced; 16 bytes at a time would need every row rearranged.
    """
    REAL: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    EXACT: tl.constexpr = out.dtype.element_ty == REAL
    OFFSET_Y: tl.constexpr = OFFSET * Y_UNIT
    count2 = units2 * UNIT
    tile = tl.program_id(0)
    row_tile = tile % row_tiles
    column_tile = tile // row_tiles % column_tiles
    batch = (tile // row_tiles // column_tiles).to(tl.int64)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < count2
    if EXACT:
        x1, y1, x2, y2 = _load_boxes(boxes2 + batch * stride2 * 4, columns.to(tl.int64), inside, REAL)
    else:
        x1, y1, x2, y2 = _load_half_boxes(boxes2 + batch * stride2 * 4, columns.to(tl.int64), inside)
    y1, y2 = y1 * Y_UNIT, y2 * Y_UNIT
    # What a second box adds to the denominator.
    weight = _zero(x1, y1, x2, y2) if IOF else _area(x1, y1, x2, y2, OFFSET, OFFSET_Y)
    first = row_tile * rows
    box = boxes1 + (batch * stride1 + first) * 4
    row = out + (batch * count1 + first) * count2
    for _ in range(first, tl.minimum(first + rows, count1)):
        a, b, c, d = tl.load(box), tl.load(box + 1), tl.load(box + 2), tl.load(box + 3)
        a, b, c, d = a.to(REAL), b.to(REAL) * Y_UNIT, c.to(REAL), d.to(REAL) * Y_UNIT
        area = _area(a, b, c, d, OFFSET, OFFSET_Y)
        overlap = _overlap(a, b, c, d, area, x1, y1, x2, y2, weight, IOF, OFFSET, OFFSET_Y, EXACT)
        tl.store(row + columns, overlap.to(out.dtype.element_ty), inside)
        box += 4
        row += count2


@_gpu.kernel
def _aligned_kernel(
    boxes1, boxes2, out, count,
    IOF: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    EXACT: tl.constexpr = out.dtype.element_ty == REAL
    OFFSET_Y: tl.constexpr = OFFSET * Y_UNIT
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    a, b, c, d = _load_boxes(boxes1, i, inside, REAL)
    x1, y1, x2, y2 = _load_boxes(boxes2, i, inside, REAL)
    b, d, y1, y2 = b * Y_UNIT, d * Y_UNIT, y1 * Y_UNIT, y2 * Y_UNIT
    area = _area(a, b, c, d, OFFSET, OFFSET_Y)
    weight = _zero(x1, y1, x2, y2) if IOF else _area(x1, y1, x2, y2, OFFSET, OFFSET_Y)
    overlap = _overlap(a, b, c, d, area, x1, y1, x2, y2, weight, IOF, OFFSET, OFFSET_Y, EXACT)
    tl.store(out + i, overlap.to(out.dtype.element_ty), inside)


@triton.jit
def _share(low, high):
    """How far `low` is the lesser of the two: 1 where it is, 1/2 where they are equal, else 0."""
    return tl.where(low < high, 1.0, tl.where(low == high, 0.5, 0.0))


@triton.jit
def _slopes(
    grad, x1, y1, x2, y2, other_x1, other_y1, other_x2, other_y2, AREA: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Derivatives by the width and the height of the intersection, and by the areas; 0 where nothing overlaps."""
    finite = _zero(x1, y1, x2, y2) + _zero(other_x1, other_y1, other_x2, other_y2) == 0
    width = tl.minimum(x2, other_x2) - tl.maximum(x1, other_x1) + OFFSET
    height = tl.minimum(y2, other_y2) - tl.maximum(y1, other_y1) + OFFSET
    inter = width * height
    area = _area(x1, y1, x2, y2, OFFSET, OFFSET)
    other_area = _area(other_x1, other_y1, other_x2, other_y2, OFFSET, OFFSET)
    if AREA == 0:
        base = area + inter * 0
    elif AREA == 1:
        base = other_area + inter * 0
    else:
        base = (area + other_area) - inter
    denominator = tl.where(base < OFFSET, OFFSET, base)
    overlapping = finite & (width >= 0) & (height >= 0) & (denominator > 0) & (denominator < float("inf"))
    by_inter = tl.where(overlapping, grad / denominator, 0.0)
    by_area = tl.where(overlapping & (base >= OFFSET), -(inter / denominator) * by_inter, 0.0)
    if AREA == 2:
        by_inter -= by_area
    return tl.where(overlapping, by_inter * height, 0.0), tl.where(overlapping, by_inter * width, 0.0), by_area


@triton.jit
def _side(low, high, OFFSET: tl.constexpr):
    """A box's width or height. One too long for a float counts as 0: its box has no gradient, and 0 * inf is NaN."""
    side = high - low + OFFSET
    return tl.where(tl.abs(side) < float("inf"), side, 0.0)


@triton.jit
def _store_gradient(out, i, mask, x1, y1, x2, y2):
    tl.store(out + i * 4, x1, mask)
    tl.store(out + i * 4 + 1, y1, mask)
    tl.store(out + i * 4 + 2, x2, mask)
    tl.store(out + i * 4 + 3, y2, mask)


@_gpu.kernel
def _backward_kernel(
    grad, own, others, out, own_stride, other_stride, by_batch, by_own, by_other,
    batches, own_count, other_count, own_tiles, share,
    AXIS: tl.constexpr, UNIT: tl.constexpr, AREA: tl.constexpr, OFFSET: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """A program sums for OWN boxes over a share of the others; AXIS and AREA as in `_gradient`.

    The size of the axis comes in units: by a UNIT of 8 the compiler sees that its rows start aligned.
    """
    REAL: tl.constexpr = out.dtype.element_ty
    if AXIS == 1:
        own_count = own_count * UNIT
        by_own, by_other, by_batch = 1, own_count, own_count.to(tl.int64) * other_count
    elif AXIS == 2:
        other_count = other_count * UNIT
        by_own, by_other, by_batch = other_count, 1, own_count.to(tl.int64) * other_count
    tile = tl.program_id(0)
    part = (tile // own_tiles // batches).to(tl.int64)
    batch = (tile // own_tiles % batches).to(tl.int64)
    i = (tile % own_tiles).to(tl.int64) * OWN + tl.arange(0, OWN)
    own_inside = i < own_count
    x1, y1, x2, y2 = _load_boxes(own + batch * own_stride * 4, i, own_inside, REAL)
    width, height = _side(x1, x2, OFFSET)[:, None], _side(y1, y2, OFFSET)[:, None]
    sum_x1 = tl.zeros((OWN, OTHERS), REAL)
    sum_y1 = tl.zeros((OWN, OTHERS), REAL)
    sum_x2 = tl.zeros((OWN, OTHERS), REAL)
    sum_y2 = tl.zeros((OWN, OTHERS), REAL)
    for start in range(part * share, tl.minimum((part + 1) * share, other_count), OTHERS):
        j = start + tl.arange(0, OTHERS)
        inside = own_inside[:, None] & (j < other_count)[None, :]
        slope = tl.load(grad + batch * by_batch + i[:, None] * by_own + j[None, :] * by_other, inside, 0.0).to(REAL)
        a, b, c, d = _load_boxes(others + batch * other_stride * 4, j, j < other_count, REAL)
        a, b, c, d = a[None, :], b[None, :], c[None, :], d[None, :]
        by_width, by_height, by_area = _slopes(
            slope, x1[:, None], y1[:, None], x2[:, None], y2[:, None], a, b, c, d, AREA, OFFSET
        )
        if AREA == 1:
            by_area = tl.zeros_like(by_area)
        sum_x1 -= by_width * _share(a, x1[:, None]) + by_area * height
        sum_y1 -= by_height * _share(b, y1[:, None]) + by_area * width
        sum_x2 += by_width * _share(x2[:, None], c) + by_area * height
        sum_y2 += by_height * _share(y2[:, None], d) + by_area * width
    out += (part * batches + batch) * own_count * 4
    _store_gradient(out, i, own_inside, tl.sum(sum_x1, 1), tl.sum(sum_y1, 1), tl.sum(sum_x2, 1), tl.sum(sum_y2, 1))


@_gpu.kernel
def _aligned_backward_kernel(
    grad, boxes1, boxes2, grad1, grad2, count,
    IOF: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = grad1.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x1, y1, x2, y2 = _load_boxes(boxes1, i, inside, REAL)
    a, b, c, d = _load_boxes(boxes2, i, inside, REAL)
    slope = tl.load(grad + i, inside, 0.0).to(REAL)
    AREA: tl.constexpr = 0 if IOF else 2
    by_width, by_height, by_area = _slopes(slope, x1, y1, x2, y2, a, b, c, d, AREA, OFFSET)
    side_x, side_y = by_area * _side(y1, y2, OFFSET), by_area * _side(x1, x2, OFFSET)
    _store_gradient(
        grad1, i, inside,
        -(by_width * _share(a, x1) + side_x), -(by_height * _share(b, y1) + side_y),
        by_width * _share(x2, c) + side_x, by_height * _share(y2, d) + side_y,
    )  # fmt: skip
    if IOF:
        by_area = tl.zeros_like(by_area)
    side_x, side_y = by_area * _side(b, d, OFFSET), by_area * _side(a, c, OFFSET)
    _store_gradient(
        grad2, i, inside,
        -(by_width * _share(x1, a) + side_x), -(by_height * _share(y1, b) + side_y),
        by_width * _share(c, x2) + side_x, by_height * _share(d, y2) + side_y,
    )  # fmt: skip
