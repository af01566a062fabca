"""border_align on GPU.

Forward: lanes on channels, so that a pixel of a channels-last map is one wide load; horizontal and vertical
edges are compiled apart. Where the map outgrows the second-level cache, boxes are first ordered by the
fixed coordinate of the edge, so that neighbouring boxes read the same rows. An NCHW map is turned first and
the results are turned back: gathering single pixels out of planes costs ten times more.

Backward: each output adds its four corner weights with one wide atomic to a scratch that keeps, for every
pixel, four sums (its own and those of its right, lower and lower right neighbours); a second pass adds the
four that meet in a pixel. The scratch is cleared and used again for one group of channels after the other.
Under `torch.use_deterministic_algorithms` one program walks all boxes for an edge and a block of channels in
order, and an address is only ever written by one thread.
"""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import as_mask
from triops.ops.border_align.reference import (
    check_argmax,
    empty_like_format,
    empty_outputs,
    format_of,
)

TURN = _gpu.block(64, interpreted=256)  # side of a tile when turning
SECOND_LEVEL_CACHE = 64 * 2**20  # a map beyond this is read in order of the boxes' fixed coordinate
MANY_BOXES = 1024  # fewer boxes than this are not worth ordering
BINS = 256  # of that order
BYTE_STEPS = 256  # numbers of steps that travel as bytes while results lie channels-last
WIDE = 2**31  # elements of an image or of the scratch from which offsets take 64 bits
SCRATCH = 250 * 2**20  # bytes the backward's scratch may take, unless one channel of one image needs more


def border_align_forward(input, boxes, pool_size):
    output, argmax = empty_outputs(input, boxes)
    if output.numel() == 0 or input.numel() == 0:
        return output.zero_(), argmax.zero_()
    boxes = boxes.contiguous()
    if format_of(input) == torch.channels_last:
        _align(input, boxes, pool_size, output, argmax)
        return output, argmax
    batch, channels, height, width = input.shape
    total = boxes.shape[1]
    pixels = torch.empty((batch, height, width, channels), dtype=input.dtype, device=input.device)
    values = torch.empty((batch, total, 4, channels // 4), dtype=input.dtype, device=input.device)
    steps = torch.empty(values.shape, dtype=torch.uint8 if pool_size < BYTE_STEPS else torch.int32, device=input.device)
    _turn(input.contiguous(), pixels, batch, channels, height * width)
    _align(pixels.permute(0, 3, 1, 2), boxes, pool_size, values, steps)
    _turn(values, output, batch, 4 * total, channels // 4, steps, argmax)
    return output, argmax


def border_align_backward(grad_output, boxes, argmax, height, width, pool_size):
    check_argmax_if_strict(argmax, pool_size)
    batch, channels = grad_output.shape[:2]
    grad = empty_like_format((batch, 4 * channels, height, width), grad_output.dtype, argmax)
    if grad.numel() == 0 or grad_output.numel() == 0:
        return grad.zero_()
    layout = format_of(argmax)
    grad_output, argmax = grad_output.contiguous(memory_format=layout), argmax.contiguous(memory_format=layout)
    boxes = boxes.contiguous()
    _accumulate(grad_output, boxes, argmax, pool_size, grad, layout == torch.channels_last)
    return grad


def check_argmax_if_strict(argmax, pool_size):
    if argmax.device.type != "cpu":  # CPU tensors: the interpreter stands in for a GPU
        check_argmax(argmax, pool_size)


def _align(input, boxes, pool_size, output, argmax):
    """input [N, 4C, H, W] with channels side by side; output, argmax in memory order [N, K, 4, C]."""
    batch, channels, height, width = input.shape[0], input.shape[1] // 4, input.shape[2], input.shape[3]
    total = boxes.shape[1]
    size = input.element_size()
    in_order = input.numel() * size > SECOND_LEVEL_CACHE and total >= MANY_BOXES
    order = _order_by_fixed_coordinate(boxes, height, width) if in_order else boxes
    box_block, channel_block, boxes_a_program, warps, unroll = _forward_blocks(size, in_order)
    channel_block = min(channel_block, 1 << (channels - 1).bit_length())
    chunks, channel_blocks = _ceil_div(total, boxes_a_program), _ceil_div(channels, channel_block)
    image_stride, _, row_stride, column_stride = input.stride()
    _align_kernel[(batch * 4 * channel_blocks * chunks,)](
        input, boxes, order, output, argmax,
        channels, total, height, width, pool_size, chunks, channel_blocks, image_stride, row_stride, column_stride,
        ORDERED=in_order, EVEN=channels % channel_block == 0, WIDE=height * row_stride >= WIDE,
        BOXES_A_PROGRAM=boxes_a_program, BOXES=box_block, CHANNELS=channel_block, UNROLL=unroll,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _forward_blocks(element_size, in_order):
    """Boxes and channels of a tile, boxes of a program, warps, unrolled steps; the fastest tried on an H200."""
    if _gpu.INTERPRETED:
        return 256, 128, 256, 4, 1
    if in_order:
        return 32, 32, 128, 8, 2
    return (4, 256, 4, 4, 2) if element_size == 2 else (4, 128, 4, 4, 2)


def _order_by_fixed_coordinate(boxes, height, width):
    """int32 [N, 4, K]: for each edge the boxes by the row or column it lies in. Order within one does not matter."""
    batch, total = boxes.shape[:2]
    order = torch.empty((batch, 4, total), dtype=torch.int32, device=boxes.device)
    counts = torch.zeros((batch, 4, 2, BINS), dtype=torch.int32, device=boxes.device)
    block = 256
    blocks = _ceil_div(total, block)
    _count_kernel[(batch * 4 * blocks,)](
        boxes, counts, total, height, width, blocks, BLOCK=block, BINS=BINS, num_warps=4
    )
    _place_kernel[(batch * 4 * blocks,)](
        boxes, counts, order, total, height, width, blocks, BLOCK=block, BINS=BINS, num_warps=4
    )
    return order


def _turn(source, target, batch, rows, columns, second_source=None, second_target=None):
    """[batch, rows, columns] -> [batch, columns, rows], and a second pair in the same launch."""
    row_blocks, column_blocks = _ceil_div(rows, TURN), _ceil_div(columns, TURN)
    two = second_source is not None
    _turn_kernel[(batch * row_blocks * column_blocks,)](
        source, target, second_source if two else source, second_target if two else target,
        rows, columns, row_blocks, column_blocks, TWO=two, TILE=TURN, num_warps=4,
    )  # fmt: skip


def _accumulate(grad_output, boxes, argmax, pool_size, grad, channels_last):
    batch, channels, total = grad_output.shape[:3]
    height, width = grad.shape[2:]
    row_block, channel_block, warps = _scatter_blocks(channels_last)
    x_block, y_block, sum_channels, sum_warps = _sum_blocks(channels_last)
    image_step = 4 * total * channels
    row_step, channel_step = (channels, 1) if channels_last else (1, 4 * total)
    row_blocks = _ceil_div(4 * total, row_block)
    first_step, span, next_step = row_block, row_block, row_block
    if torch.are_deterministic_algorithms_enabled():
        # One program an edge and block of channels, one box after the other.
        row_block, channel_block, warps, row_blocks = 1, 32, 1, 4
        first_step, span, next_step = 1, 4 * total, 4

    real = compute_dtype(grad.dtype)
    images, group = _split(batch, channels, 16 * height * width * real.itemsize, channel_block)
    scratch = None
    for image in range(0, batch, images):
        image_count = min(images, batch - image)
        for channel in range(0, channels, group):
            count = min(group, channels - channel)
            if scratch is None:
                scratch = torch.zeros(images * group * 4 * height * width * 4, dtype=real, device=grad.device)
            else:
                scratch.zero_()
            if channels_last:
                strides = height * width * 4 * count, count, 1, width * 4 * count, 4 * count
            else:
                strides = 4 * count * height * width, count * height * width, height * width, width, 1
            wide = scratch.numel() >= WIDE
            channel_blocks = _ceil_div(count, channel_block)
            _scatter_kernel[(image_count * channel_blocks * row_blocks,)](
                grad_output, boxes, argmax, scratch,
                image, channel, count, total, height, width, pool_size, row_blocks, channel_blocks,
                first_step, span, next_step, image_step, row_step, channel_step, *strides,
                WIDE=wide, ROWS=row_block, CHANNELS=channel_block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
            x_blocks, y_blocks = _ceil_div(width, x_block), _ceil_div(height, y_block)
            sum_blocks = _ceil_div(4 * count, sum_channels)
            _sum_kernel[(image_count * sum_blocks * x_blocks * y_blocks,)](
                scratch, grad, image, channel, count, channels, height, width, x_blocks, y_blocks, sum_blocks,
                *strides, *grad.stride(),
                WIDE=wide, ROWS=y_block, COLUMNS=x_block, CHANNELS=sum_channels, num_warps=sum_warps,
            )  # fmt: skip


def _scatter_blocks(channels_last):
    """Rows (a box's edge) and channels of a tile, and warps; lanes lie along whichever is contiguous."""
    if _gpu.INTERPRETED:
        return 256, 16, 4
    return (8, 32, 4) if channels_last else (64, 1, 1)


def _sum_blocks(channels_last):
    """Columns, rows and channels of a program, and warps."""
    if _gpu.INTERPRETED:
        return 16, 64, 32, 4
    return (4, 13, 32, 2) if channels_last else (64, 13, 2, 2)


def _ceil_div(a, b):
    return -(-a // b)  # Triton's own takes 10 us on the host


def _split(batch, channels, bytes_a_channel, channel_block):
    """Images and channels that share the scratch at a time: whole blocks of channels where they fit."""
    fit = max(1, SCRATCH // bytes_a_channel)
    images = max(1, min(batch, fit // min(channels, channel_block)))
    group = min(channels, fit // images)
    if group > channel_block:
        groups = _ceil_div(channels, group // channel_block * channel_block)
        group = _ceil_div(_ceil_div(channels, groups), channel_block) * channel_block
    return images, max(1, min(group, channels))


@triton.jit
def _divide(numerator, denominator):
    """IEEE division: the positions of samples, and so argmax, depend on it."""
    if numerator.dtype == tl.float32:
        return tl.div_rn(numerator, denominator)
    else:
        return numerator / denominator


@triton.jit
def _load_box(boxes, box, mask, REAL: tl.constexpr):
    """x1, y1, x2, y2; a box that is not there or not finite is moved off the map."""
    field = boxes + box.to(tl.int64) * 4
    x1 = tl.load(field, mask, 0.0).to(REAL)
    y1 = tl.load(field + 1, mask, 0.0).to(REAL)
    x2 = tl.load(field + 2, mask, 0.0).to(REAL)
    y2 = tl.load(field + 3, mask, 0.0).to(REAL)
    inf = float("inf")
    finite = (tl.abs(x1) < inf) & (tl.abs(y1) < inf) & (tl.abs(x2) < inf) & (tl.abs(y2) < inf) & mask
    x1 = tl.where(finite, x1, -9.0)
    y1 = tl.where(finite, y1, -9.0)
    x2 = tl.where(finite, x2, -9.0)
    y2 = tl.where(finite, y2, -9.0)
    return x1, y1, x2, y2


@triton.jit
def _stride(low, high, pool_size, forwards):
    """Stride along an edge. An extent beyond the largest float has both ends off the map: no stride is needed."""
    extent = high - low
    stride = _divide(extent, tl.full(extent.shape, pool_size, extent.dtype))
    stride = tl.where(tl.abs(stride) < float("inf"), stride, 0.0)
    return tl.where(forwards, stride, -stride)


@triton.jit
def _neighbours(position, size):
    """Whether a position is on one axis of the map, the two pixels around it, and the share of the second."""
    end = tl.full((), 0, position.dtype) + size
    on_map = (position >= -1.0) & (position <= end)
    position = tl.minimum(tl.maximum(position, 0.0), end - 1.0)
    low = tl.minimum(position.to(tl.int32), size - 1)
    return on_map, low, tl.minimum(low + 1, size - 1), position - low.to(position.dtype)


@triton.jit
def _walk(
    pixels, start, stride, size, step_stride, fixed_low, fixed_high, fixed_part, fixed_on_map, channel_mask, pool_size,
    HORIZONTAL: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BOXES: tl.constexpr, CHANNELS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Best value and its step [BOXES, CHANNELS] along an edge. pixels [1, CHANNELS]: pointers to pixel 0."""
    REAL: tl.constexpr = start.dtype
    OFFSET: tl.constexpr = tl.int64 if WIDE else tl.int32
    on_low, on_high = pixels + fixed_low[:, None], pixels + fixed_high[:, None]
    fixed_rest = 1.0 - fixed_part
    best = tl.zeros((BOXES, CHANNELS), REAL)
    step_of_best = tl.zeros((BOXES, CHANNELS), tl.int32)
    for step in tl.range(0, pool_size + 1, loop_unroll_factor=UNROLL):
        on_map, low, high, part = _neighbours(start + step * stride, size)
        rest = 1.0 - part
        load = (on_map & fixed_on_map)[:, None]
        if not EVEN:
            load = load & channel_mask
        low = (low.to(OFFSET) * step_stride)[:, None]
        high = (high.to(OFFSET) * step_stride)[:, None]
        first = tl.load(on_low + low, load, 0.0).to(REAL)
        along = tl.load(on_low + high, load, 0.0).to(REAL)
        across = tl.load(on_high + low, load, 0.0).to(REAL)
        last = tl.load(on_high + high, load, 0.0).to(REAL)
        # The reference's order: upper left, upper right, lower left, lower right.
        value = (fixed_rest * rest)[:, None] * first
        if HORIZONTAL:
            value = value + (fixed_rest * part)[:, None] * along
            value = value + (fixed_part * rest)[:, None] * across
        else:
            value = value + (rest * fixed_part)[:, None] * across
            value = value + (part * fixed_rest)[:, None] * along
        value = value + (fixed_part * part)[:, None] * last
        greater = (value > best) | (step == 0)
        best = tl.where(greater, value, best)
        step_of_best = tl.where(greater, step, step_of_best)
    return best, step_of_best


@_gpu.kernel
def _align_kernel(
    input, boxes, order, output, argmax,
    channels, total, height, width, pool_size, chunks, channel_blocks, image_stride, row_stride, column_stride,
    ORDERED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    BOXES_A_PROGRAM: tl.constexpr, BOXES: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    OFFSET: tl.constexpr = tl.int64 if WIDE else tl.int32
    program = tl.program_id(0)
    chunk, rest = program % chunks, program // chunks
    block, edge, n = rest % channel_blocks, rest // channel_blocks % 4, (rest // channel_blocks // 4).to(tl.int64)
    c = block * CHANNELS + tl.arange(0, CHANNELS)[None]
    channel_mask = c < channels
    pixels = input + n * image_stride + edge.to(tl.int64) * channels + c
    forwards = edge < 2
    for first in range(0, BOXES_A_PROGRAM, BOXES):
        k = chunk * BOXES_A_PROGRAM + first + tl.arange(0, BOXES)
        mask = k < total
        if ORDERED:
            k = tl.load(order + (n * 4 + edge) * total + k, mask, 0)
        x1, y1, x2, y2 = _load_box(boxes, n * total + k, mask, REAL)
        if edge % 2 == 0:
            on_map, low, high, part = _neighbours(tl.where(forwards, y1, y2), height)
            best, step_of_best = _walk(
                pixels, tl.where(forwards, x1, x2), _stride(x1, x2, pool_size, forwards), width, column_stride,
                low.to(OFFSET) * row_stride, high.to(OFFSET) * row_stride, part, on_map, channel_mask, pool_size,
                True, EVEN, WIDE, BOXES, CHANNELS, UNROLL,
            )  # fmt: skip
        else:
            on_map, low, high, part = _neighbours(tl.where(forwards, x1, x2), width)
            best, step_of_best = _walk(
                pixels, tl.where(forwards, y1, y2), _stride(y1, y2, pool_size, forwards), height, row_stride,
                low.to(OFFSET) * column_stride, high.to(OFFSET) * column_stride, part, on_map, channel_mask,
                pool_size, False, EVEN, WIDE, BOXES, CHANNELS, UNROLL,
            )  # fmt: skip
        offset = ((n * total + k) * 4 + edge)[:, None] * channels + c
        store = mask[:, None]
        if not EVEN:
            store = store & channel_mask
        tl.store(output + offset, best.to(output.dtype.element_ty), store)
        tl.store(argmax + offset, step_of_best.to(argmax.dtype.element_ty), store)


@triton.jit
def _bin(boxes, total, height, width, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """A block of boxes of one image and edge, and the bin of the row or column that the edge lies in."""
    list_number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    n, edge = (list_number // 4).to(tl.int64), list_number % 4
    horizontal = edge % 2 == 0
    field = tl.where(edge < 2, 0, 2) + tl.where(horizontal, 1, 0)
    size = tl.where(horizontal, height, width)
    k = block * BLOCK + tl.arange(0, BLOCK)
    mask = k < total
    fixed = tl.load(boxes + (n * total + k) * 4 + field, mask, 0.0).to(tl.float32)
    fixed = tl.where(fixed > 0, fixed, 0.0)  # also for NaN
    pixel = tl.minimum(fixed, 2147483520.0).to(tl.int32)
    bin = tl.minimum(tl.minimum(pixel, size - 1) // tl.cdiv(size, BINS), BINS - 1)
    return list_number, k, mask, bin


@_gpu.kernel
def _count_kernel(boxes, counts, total, height, width, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    list_number, _, mask, bin = _bin(boxes, total, height, width, blocks, BLOCK, BINS)
    tl.atomic_add(counts + list_number * 2 * BINS + bin, 1, mask, sem="relaxed")


@_gpu.kernel
def _place_kernel(boxes, counts, order, total, height, width, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    list_number, k, mask, bin = _bin(boxes, total, height, width, blocks, BLOCK, BINS)
    count = tl.load(counts + list_number * 2 * BINS + tl.arange(0, BINS))
    before = tl.cumsum(count, 0) - count
    taken = tl.atomic_add(counts + list_number * 2 * BINS + BINS + bin, 1, mask, sem="relaxed")
    tl.store(order + list_number.to(tl.int64) * total + tl.gather(before, bin, 0) + taken, k, mask)


@_gpu.kernel
def _turn_kernel(
    source, target, second_source, second_target, rows, columns, row_blocks, column_blocks,
    TWO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    r = (program % row_blocks) * TILE + tl.arange(0, TILE)
    c = (program // row_blocks % column_blocks) * TILE + tl.arange(0, TILE)
    b = (program // row_blocks // column_blocks).to(tl.int64) * rows * columns
    mask = (r < rows)[:, None] & (c < columns)[None]
    turned_mask = (r < rows)[None] & (c < columns)[:, None]
    offset = b + r[:, None].to(tl.int64) * columns + c[None]
    turned = b + c[:, None].to(tl.int64) * rows + r[None]
    tl.store(target + turned, tl.trans(tl.load(source + offset, mask)).to(target.dtype.element_ty), turned_mask)
    if TWO:
        value = tl.trans(tl.load(second_source + offset, mask))
        tl.store(second_target + turned, value.to(second_target.dtype.element_ty), turned_mask)


@_gpu.kernel
def _scatter_kernel(
    grad_output, boxes, argmax, scratch,
    image, channel, count, total, height, width, pool_size, row_blocks, channel_blocks,
    first_step, span, next_step, image_step, row_step, channel_step,
    scratch_n, scratch_e, scratch_c, scratch_y, scratch_x,
    WIDE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Adds [own, right, lower, lower right] shares to the scratch [n, e, c, y, x, 4] of this group of channels."""
    REAL: tl.constexpr = scratch.dtype.element_ty
    OFFSET: tl.constexpr = tl.int64 if WIDE else tl.int32
    program = tl.program_id(0)
    row_block, rest = program % row_blocks, program // row_blocks
    n, c = rest // channel_blocks, (rest % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)[None]
    read = (image + n).to(tl.int64) * image_step + (channel + c).to(tl.int64) * channel_step
    corner = tl.arange(0, 4)[None, None]
    for first in range(row_block * first_step, row_block * first_step + span, next_step):
        row = first + tl.arange(0, ROWS)
        k, edge = row // 4, row % 4
        mask = k < total
        x1, y1, x2, y2 = _load_box(boxes, (image + n).to(tl.int64) * total + k, mask, REAL)
        forwards, horizontal = edge < 2, edge % 2 == 0
        x, y = tl.where(forwards, x1, x2), tl.where(forwards, y1, y2)
        stride = tl.where(horizontal, _stride(x1, x2, pool_size, forwards), _stride(y1, y2, pool_size, forwards))
        start, fixed = tl.where(horizontal, x, y), tl.where(horizontal, y, x)
        size, fixed_size = tl.where(horizontal, width, height), tl.where(horizontal, height, width)
        fixed_on_map, fixed_low, _, fixed_part = _neighbours(fixed, fixed_size)
        mask = mask[:, None] & (c < count)
        offset = read + row[:, None].to(tl.int64) * row_step
        step = tl.load(argmax + offset, mask, -1)
        given = tl.load(grad_output + offset, mask, 0.0).to(REAL)
        on_map, low, _, part = _neighbours(start[:, None] + step.to(REAL) * stride[:, None], size[:, None])
        add = mask & on_map & fixed_on_map[:, None] & (step >= 0) & (step <= pool_size)
        horizontal, fixed_low = horizontal[:, None], fixed_low[:, None]
        fixed_part = tl.broadcast_to(fixed_part[:, None], part.shape)
        x_low, y_low = tl.where(horizontal, low, fixed_low), tl.where(horizontal, fixed_low, low)
        x_part, y_part = tl.where(horizontal, part, fixed_part), tl.where(horizontal, fixed_part, part)
        pixel = y_low.to(OFFSET) * scratch_y + x_low.to(OFFSET) * scratch_x
        pixel += n.to(OFFSET) * scratch_n + edge[:, None].to(OFFSET) * scratch_e + c.to(OFFSET) * scratch_c
        x_part, y_part = x_part[:, :, None], y_part[:, :, None]
        x_share = tl.where(corner % 2 == 1, x_part, 1.0 - x_part)
        y_share = tl.where(corner >= 2, y_part, 1.0 - y_part)
        tl.atomic_add(
            scratch + (pixel * 4)[:, :, None] + corner, y_share * x_share * given[:, :, None],
            add[:, :, None] & (corner >= 0), sem="relaxed",
        )  # fmt: skip


@_gpu.kernel
def _sum_kernel(
    scratch, grad, image, channel, count, channels, height, width, x_blocks, y_blocks, channel_blocks,
    scratch_n, scratch_e, scratch_c, scratch_y, scratch_x, grad_n, grad_c, grad_y, grad_x,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A pixel's gradient: its own sum and the shares that its left, upper and upper left neighbours hold for it."""
    OFFSET: tl.constexpr = tl.int64 if WIDE else tl.int32
    program = tl.program_id(0)
    x_block, y_block = program % x_blocks, program // x_blocks % y_blocks
    rest = program // x_blocks // y_blocks
    n, flat = rest // channel_blocks, (rest % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)[None]
    edge, c = flat // count, flat % count
    x = x_block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    mask = (x < width) & (edge < 4)
    has_left = mask & (x > 0)
    y = y_block * ROWS
    source = n.to(OFFSET) * scratch_n + edge.to(OFFSET) * scratch_e + c.to(OFFSET) * scratch_c
    source = scratch + (source + y.to(OFFSET) * scratch_y + x.to(OFFSET) * scratch_x) * 4
    left = source - scratch_x * 4
    target = (image + n).to(tl.int64) * grad_n + (edge * channels + channel + c).to(tl.int64) * grad_c
    target = grad + target + y.to(tl.int64) * grad_y + x.to(tl.int64) * grad_x
    has_upper = as_mask(y > 0, mask)
    upper = tl.load(source - scratch_y * 4 + 2, mask & has_upper, 0.0)
    upper += tl.load(left - scratch_y * 4 + 3, has_left & has_upper, 0.0)
    for _ in range(y, tl.minimum(y + ROWS, height)):
        total = tl.load(source, mask, 0.0) + tl.load(left + 1, has_left, 0.0) + upper
        tl.store(target, total.to(grad.dtype.element_ty), mask)
        upper = tl.load(source + 2, mask, 0.0) + tl.load(left + 3, has_left, 0.0)
        source += scratch_y * 4
        left += scratch_y * 4
        target += grad_y
