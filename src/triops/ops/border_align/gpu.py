"""border_align on GPU.

Forward: lanes are channels, so that a pixel of a channels-last map is one contiguous load; horizontal and vertical
edges have a loop each. Where the map exceeds the L2 cache, boxes are first sorted by the fixed coordinate of the
edge, so that boxes processed together read the same rows. A large NCHW map is transposed first and the results are
transposed back: gathering single pixels out of planes takes ten times longer. Where there is little to do, the launches
would take longer than that: results go to their planes at once, and of a small map pixels come from there.

Backward: each output adds its four corner shares with one vector atomic to a scratch that keeps four sums per pixel
(for itself and for its right, lower and lower right neighbors); a second pass adds up the four sums that belong to a
pixel. The scratch is cleared and reused for one group of channels after the other. Under
`torch.use_deterministic_algorithms` one program walks all boxes in order for an edge and a block of channels, so that
an address is only ever written by one thread.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype
from triops._gpu.arithmetic import as_mask, divide
from triops._gpu.maps import in_format
from triops._rois import empty_like_format, format_of
from triops.ops.border_align.reference import check_argmax, empty_outputs

TRANSPOSE_TILE = _gpu.block(64, interpreted=256)  # rows and columns
L2_CACHE = 64 * 2**20  # bytes of a map from which boxes are sorted by their fixed coordinate
MANY_BOXES = 1024  # fewer boxes than this are not worth sorting
BINS = 256  # of that sort
BYTE_STEPS = 256  # pool sizes below this keep steps as bytes until they are transposed
NEEDS_INT64 = 2**31  # elements of an image or of the scratch from which offsets are int64
FEW_SAMPLES = _gpu.block(2**19, interpreted=2000)  # up to these, pixels are read where they lie
FEW_OUTPUTS = _gpu.block(2**20, interpreted=1000)  # up to these, results are written where they are to lie
UNIT = 16  # channels: groups are multiples of it where the number of channels is
SCRATCH = 250 * 2**20  # bytes of the backward's scratch, unless one channel of one image needs more


def border_align_forward(input, boxes, pool_size):
    output, argmax = empty_outputs(input, boxes)
    if output.numel() == 0 or input.numel() == 0:
        return output.zero_(), argmax.zero_()
    boxes = boxes.contiguous()
    if format_of(input) == torch.channels_last:
        _align(input, boxes, pool_size, output, argmax)
        return output, argmax
    input = input.contiguous()

    def launch(read_planes, write_planes):
        maps = input if read_planes else in_format(input, channels_last=True)
        if write_planes:
            _align(maps, boxes, pool_size, output, argmax, read_planes, write_planes)
        else:
            _align_and_transpose(maps, boxes, pool_size, output, argmax)

    ways = (True, True), (False, True), (False, False)
    key = "border_align of planes", input.dtype, input.shape[1], pool_size < BYTE_STEPS
    _gpu.compile_once(key, lambda: [launch(*way) for way in ways])
    few = output.numel() * (pool_size + 1) <= FEW_SAMPLES
    launch(few, few or output.numel() <= FEW_OUTPUTS)
    return output, argmax


def _align_and_transpose(input, boxes, pool_size, output, argmax):
    """Of a channels-last input, to output and argmax in memory order [N, C, K, 4]."""
    batch, channels, total = input.shape[0], input.shape[1] // 4, boxes.shape[1]
    values = torch.empty((batch, total, 4, channels), dtype=input.dtype, device=input.device)
    steps = torch.empty(values.shape, dtype=torch.uint8 if pool_size < BYTE_STEPS else torch.int32, device=input.device)
    _align(input, boxes, pool_size, values, steps)
    _transpose(values, output, batch, channels, 4 * total, steps, argmax)


def border_align_backward(grad_output, boxes, argmax, height, width, pool_size):
    check_argmax_if_strict(argmax, pool_size)
    batch, channels = grad_output.shape[:2]
    grad = empty_like_format((batch, 4 * channels, height, width), grad_output.dtype, argmax)
    if grad.numel() == 0 or grad_output.numel() == 0:
        return grad.zero_()
    memory = format_of(argmax)
    grad_output, argmax = grad_output.contiguous(memory_format=memory), argmax.contiguous(memory_format=memory)
    layout = _layout(memory == torch.channels_last, torch.are_deterministic_algorithms_enabled())
    _accumulate(grad_output, boxes.contiguous(), argmax, pool_size, grad, layout)
    return grad


def check_argmax_if_strict(argmax, pool_size):
    if argmax.device.type != "cpu":  # CPU tensors: the interpreter stands in for a GPU
        check_argmax(argmax, pool_size)


def _align(input, boxes, pool_size, output, argmax, read_planes=False, write_planes=False):
    """input [N, 4C, H, W] with channels side by side, results in memory order [N, K, 4, C]; or planes of either."""
    batch, channels, height, width = input.shape[0], input.shape[1] // 4, input.shape[2], input.shape[3]
    total = boxes.shape[1]
    size = input.element_size()
    image_stride, _, row_stride, column_stride = input.stride()
    if not read_planes and (row_stride % column_stride or image_stride % column_stride):
        input = input.contiguous(memory_format=torch.channels_last)
        image_stride, _, row_stride, column_stride = input.stride()

    def launch(in_order):
        order = _order_by_fixed_coordinate(boxes, height, width) if in_order else boxes
        box_block, channel_block, boxes_per_program, warps, unroll = _forward_blocks(size, in_order)
        channel_block = min(channel_block, _gpu.next_power_of_2(channels))
        chunks, channel_blocks = _gpu.cdiv(total, boxes_per_program), _gpu.cdiv(channels, channel_block)
        _align_kernel[(batch * 4 * channel_blocks * chunks,)](
            input, boxes, order, output, argmax, channels, total, height, width, pool_size, chunks, channel_blocks,
            image_stride // column_stride, row_stride // column_stride, column_stride,
            ORDERED=in_order, EVEN=channels % channel_block == 0, INT64=height * row_stride >= NEEDS_INT64,
            READ_PLANES=read_planes, WRITE_PLANES=write_planes,
            BOXES_PER_PROGRAM=boxes_per_program, BOXES=box_block, CHANNELS=channel_block, UNROLL=unroll,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip

    key = "border_align", input.dtype, argmax.dtype, channels, read_planes, write_planes
    _gpu.compile_once(key, lambda: (launch(False), launch(True)))
    launch(input.numel() * size > L2_CACHE and total >= MANY_BOXES)


def _forward_blocks(element_size, in_order):
    """Boxes and channels of a tile, boxes per program, warps, unrolled steps; the fastest tried on an H200."""
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
    blocks = _gpu.cdiv(total, block)
    _count_kernel[(batch * 4 * blocks,)](
        boxes, counts, total, height, width, blocks, BLOCK=block, BINS=BINS, num_warps=4
    )
    _place_kernel[(batch * 4 * blocks,)](
        boxes, counts, order, total, height, width, blocks, BLOCK=block, BINS=BINS, num_warps=4
    )
    return order


def _transpose(source, target, batch, channels, positions, second_source, second_target):
    """[batch, positions, channels] -> [batch, channels, positions], and a second pair in the same launch."""
    channel_blocks, position_blocks = _gpu.cdiv(channels, TRANSPOSE_TILE), _gpu.cdiv(positions, TRANSPOSE_TILE)
    _transpose_kernel[(batch * channel_blocks * position_blocks,)](
        source, target, second_source, second_target, channels, positions // 4, channel_blocks, position_blocks,
        TILE=TRANSPOSE_TILE, num_warps=4,
    )  # fmt: skip


class Layout(NamedTuple):
    """How the backward is cut into programs, for one way in which a map lies in memory."""

    channels_last: bool
    in_order: bool  # one program per edge and block of channels, one box after the other
    rows: int  # a row is one edge of one box; with the channels a tile of the scatter
    channels: int
    warps: int
    sum_rows: int  # pixels and channels per program of the sum
    sum_columns: int
    sum_channels: int
    sum_warps: int


def _layout(channels_last, in_order):
    if _gpu.INTERPRETED:
        layout = Layout(channels_last, in_order, 256, 16, 4, 64, 16, 32, 4)
    elif channels_last:
        layout = Layout(channels_last, in_order, 8, 32, 4, 13, 4, 32, 2)
    else:  # lanes lie along the boxes, which are contiguous here
        layout = Layout(channels_last, in_order, 64, 1, 1, 13, 64, 2, 2)
    return layout._replace(rows=1, channels=32, warps=1) if in_order else layout


class Part(NamedTuple):
    """Images and channels whose gradients pass through the scratch together."""

    first_image: int
    images: int
    first_channel: int
    channels: int
    unit: int  # of which both numbers of channels are multiples: by it the compiler sees aligned loads


def _accumulate(grad_output, boxes, argmax, pool_size, grad, layout):
    """Fill grad [N, 4C, H, W], part by part: scatter into the scratch, then sum what it holds for each pixel."""
    batch, channels = grad_output.shape[:2]
    pixels = grad.shape[2] * grad.shape[3]
    real = compute_dtype(grad.dtype)
    images, group = _split(batch, channels, 16 * pixels * real.itemsize, max(layout.channels, UNIT))
    unit = UNIT if channels % UNIT == group % UNIT == 0 else 1
    scratch = torch.empty(images * group * 16 * pixels, dtype=real, device=grad.device)
    for image in range(0, batch, images):
        for channel in range(0, channels, group):
            part = Part(image, min(images, batch - image), channel, min(group, channels - channel), unit)
            scratch.zero_()
            _scatter(grad_output, boxes, argmax, pool_size, part, scratch, grad.shape, layout)
            _sum(scratch, part, grad, layout)


def _scatter(grad_output, boxes, argmax, pool_size, part, scratch, shape, layout):
    """Add each output's gradient to the four sums of one pixel of the scratch."""
    channels, total, unit = grad_output.shape[1], grad_output.shape[2], part.unit
    row_blocks = 4 if layout.in_order else _gpu.cdiv(4 * total, layout.rows)
    channel_blocks = _gpu.cdiv(part.channels, layout.channels)
    _scatter_kernel[(part.images * channel_blocks * row_blocks,)](
        grad_output, boxes, argmax, scratch,
        part.first_image, part.first_channel // unit, part.channels // unit, channels, total, *shape[2:], pool_size,
        row_blocks, channel_blocks,
        IN_ORDER=layout.in_order, ROWS=layout.rows, CHANNELS=layout.channels, CHANNELS_LAST=layout.channels_last,
        UNIT=unit, INT64=scratch.numel() >= NEEDS_INT64, num_warps=layout.warps, enable_fp_fusion=False,
    )  # fmt: skip


def _sum(scratch, part, grad, layout):
    """Write the gradient of each pixel of a part: the sum of what the scratch holds for it."""
    channels, height, width, unit = grad.shape[1] // 4, grad.shape[2], grad.shape[3], part.unit
    x_blocks, y_blocks = _gpu.cdiv(width, layout.sum_columns), _gpu.cdiv(height, layout.sum_rows)
    channel_blocks = _gpu.cdiv(4 * part.channels, layout.sum_channels)
    _sum_kernel[(part.images * channel_blocks * x_blocks * y_blocks,)](
        scratch, grad, part.first_image, part.first_channel // unit, part.channels // unit, channels, height, width,
        x_blocks, y_blocks, channel_blocks,
        ROWS=layout.sum_rows, COLUMNS=layout.sum_columns, CHANNELS=layout.sum_channels,
        CHANNELS_LAST=layout.channels_last, UNIT=unit, INT64=scratch.numel() >= NEEDS_INT64, num_warps=layout.sum_warps,
    )  # fmt: skip


def _split(batch, channels, bytes_per_channel, channel_block):
    """Images and channels that share the scratch at a time: whole blocks of channels where they fit."""
    fit = max(1, SCRATCH // bytes_per_channel)
    images = max(1, min(batch, fit // min(channels, channel_block)))
    group = min(channels, fit // images)
    if group > channel_block:
        groups = _gpu.cdiv(channels, group // channel_block * channel_block)
        group = _gpu.cdiv(_gpu.cdiv(channels, groups), channel_block) * channel_block
    return images, max(1, min(group, channels))


@triton.jit
def _load_box(boxes, box, mask, REAL: tl.constexpr):
    """x1, y1, x2, y2; a box that is masked or not finite is moved off the map."""
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
    stride = divide(extent, tl.full(extent.shape, pool_size, extent.dtype))
    stride = tl.where(tl.abs(stride) < float("inf"), stride, 0.0)
    return tl.where(forwards, stride, -stride)


@triton.jit
def _neighbors(position, size):
    """Whether a position is on one axis of the map, the two pixels around it, and the share of the second."""
    end = tl.full((), 0, position.dtype) + size
    on_map = (position >= -1.0) & (position <= end)
    position = tl.minimum(tl.maximum(position, 0.0), end - 1.0)
    low = tl.minimum(position.to(tl.int32), size - 1)
    return on_map, low, tl.minimum(low + 1, size - 1), position - low.to(position.dtype)


@triton.jit
def _walk(
    pixels, start, stride, size, step_stride, fixed_low, fixed_high, fixed_part, fixed_on_map, channel_mask, pool_size,
    HORIZONTAL: tl.constexpr, EVEN: tl.constexpr, INT64: tl.constexpr, BOXES: tl.constexpr, CHANNELS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Best value and its step [BOXES, CHANNELS] along an edge. pixels [1, CHANNELS]: pointers to pixel 0."""
    REAL: tl.constexpr = start.dtype
    OFFSET: tl.constexpr = tl.int64 if INT64 else tl.int32
    on_low, on_high = pixels + fixed_low[:, None], pixels + fixed_high[:, None]
    fixed_rest = 1.0 - fixed_part
    best = tl.zeros((BOXES, CHANNELS), REAL)
    step_of_best = tl.zeros((BOXES, CHANNELS), tl.int32)
    for step in tl.range(0, pool_size + 1, loop_unroll_factor=UNROLL):
        on_map, low, high, part = _neighbors(start + step * stride, size)
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


@_gpu.kernel(specialize=("channels", "column_stride"))
def _align_kernel(
    input, boxes, order, output, argmax,
    channels, total, height, width, pool_size, chunks, channel_blocks, image_pitch, row_pitch, column_stride,
    ORDERED: tl.constexpr, EVEN: tl.constexpr, INT64: tl.constexpr,
    READ_PLANES: tl.constexpr, WRITE_PLANES: tl.constexpr,
    BOXES_PER_PROGRAM: tl.constexpr, BOXES: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    OFFSET: tl.constexpr = tl.int64 if INT64 else tl.int32
    # Pitches are strides in columns: so the compiler sees by the columns' stride that all loads are aligned.
    row_stride = row_pitch.to(OFFSET) * column_stride
    program = tl.program_id(0)
    chunk, rest = program % chunks, program // chunks
    block, edge, n = rest % channel_blocks, rest // channel_blocks % 4, (rest // channel_blocks // 4).to(tl.int64)
    c = block * CHANNELS + tl.arange(0, CHANNELS)[None]
    channel_mask = c < channels
    plane = edge.to(tl.int64) * channels + c
    if READ_PLANES:
        plane = plane * height * width
    pixels = input + n * image_pitch * column_stride + plane
    forwards = edge < 2
    for first in range(0, BOXES_PER_PROGRAM, BOXES):
        k = chunk * BOXES_PER_PROGRAM + first + tl.arange(0, BOXES)
        mask = k < total
        if ORDERED:
            k = tl.load(order + (n * 4 + edge) * total + k, mask, 0)
        x1, y1, x2, y2 = _load_box(boxes, n * total + k, mask, REAL)
        if edge % 2 == 0:
            on_map, low, high, part = _neighbors(tl.where(forwards, y1, y2), height)
            best, step_of_best = _walk(
                pixels, tl.where(forwards, x1, x2), _stride(x1, x2, pool_size, forwards), width, column_stride,
                low.to(OFFSET) * row_stride, high.to(OFFSET) * row_stride, part, on_map, channel_mask, pool_size,
                True, EVEN, INT64, BOXES, CHANNELS, UNROLL,
            )  # fmt: skip
        else:
            on_map, low, high, part = _neighbors(tl.where(forwards, x1, x2), width)
            best, step_of_best = _walk(
                pixels, tl.where(forwards, y1, y2), _stride(y1, y2, pool_size, forwards), height, row_stride,
                low.to(OFFSET) * column_stride, high.to(OFFSET) * column_stride, part, on_map, channel_mask,
                pool_size, False, EVEN, INT64, BOXES, CHANNELS, UNROLL,
            )  # fmt: skip
        if WRITE_PLANES:
            offset = ((n * channels + c) * total + k[:, None]) * 4 + edge
        else:
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
    rank = tl.atomic_add(counts + list_number * 2 * BINS + BINS + bin, 1, mask, sem="relaxed")
    tl.store(order + list_number.to(tl.int64) * total + tl.gather(before, bin, 0) + rank, k, mask)


@_gpu.kernel(specialize=("channels",))
def _transpose_kernel(
    source, target, second_source, second_target, channels, boxes, channel_blocks, position_blocks, TILE: tl.constexpr
):
    """[batch, 4 * boxes, channels] -> [batch, channels, 4 * boxes]; that there are four edges shows in wide stores."""
    positions = boxes * 4
    program = tl.program_id(0)
    p = (program % position_blocks) * TILE + tl.arange(0, TILE)
    c = (program // position_blocks % channel_blocks) * TILE + tl.arange(0, TILE)
    b = (program // position_blocks // channel_blocks).to(tl.int64) * positions * channels
    mask = (p < positions)[:, None] & (c < channels)[None]
    transposed_mask = (p < positions)[None] & (c < channels)[:, None]
    offset = b + p[:, None].to(tl.int64) * channels + c[None]
    transposed = b + c[:, None].to(tl.int64) * positions + p[None]
    value = tl.trans(tl.load(source + offset, mask))
    tl.store(target + transposed, value.to(target.dtype.element_ty), transposed_mask)
    value = tl.trans(tl.load(second_source + offset, mask))
    tl.store(second_target + transposed, value.to(second_target.dtype.element_ty), transposed_mask)


@triton.jit
def _scratch_offset(n, edge, c, y, x, count, height, width, CHANNELS_LAST: tl.constexpr, OFFSET: tl.constexpr):
    """Into the scratch, which holds four sums for each pixel of a map of 4 edges and `count` channels."""
    n, edge, c, y, x = n.to(OFFSET), edge.to(OFFSET), c.to(OFFSET), y.to(OFFSET), x.to(OFFSET)
    if CHANNELS_LAST:
        return ((((n * height + y) * width + x) * 4 + edge) * count + c) * 4
    else:
        return ((((n * 4 + edge) * count + c) * height + y) * width + x) * 4


@_gpu.kernel(specialize=("channels",))
def _scatter_kernel(
    grad_output, boxes, argmax, scratch,
    image, channel, count, channels, total, height, width, pool_size, row_blocks, channel_blocks,
    IN_ORDER: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    UNIT: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Adds [own, right, lower, lower right] shares to the scratch of these images and this group of channels.

    The group is `UNIT * count` channels from `UNIT * channel` on: by the unit the compiler sees aligned loads.
    """
    channel, count = channel * UNIT, count * UNIT
    REAL: tl.constexpr = scratch.dtype.element_ty
    OFFSET: tl.constexpr = tl.int64 if INT64 else tl.int32
    program = tl.program_id(0)
    row_block, rest = program % row_blocks, program // row_blocks
    n, c = rest // channel_blocks, (rest % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)[None]
    first_box = (image + n).to(tl.int64) * total
    corner = tl.arange(0, 4)[None, None]
    begin, end, step_size = row_block * ROWS, row_block * ROWS + ROWS, ROWS
    if IN_ORDER:
        end, step_size = 4 * total, 4
    for first in range(begin, end, step_size):
        row = first + tl.arange(0, ROWS)
        k, edge = row // 4, row % 4
        mask = k < total
        x1, y1, x2, y2 = _load_box(boxes, first_box + k, mask, REAL)
        forwards, horizontal = edge < 2, edge % 2 == 0
        x, y = tl.where(forwards, x1, x2), tl.where(forwards, y1, y2)
        stride = tl.where(horizontal, _stride(x1, x2, pool_size, forwards), _stride(y1, y2, pool_size, forwards))
        start, fixed = tl.where(horizontal, x, y), tl.where(horizontal, y, x)
        size, fixed_size = tl.where(horizontal, width, height), tl.where(horizontal, height, width)
        fixed_on_map, fixed_low, _, fixed_part = _neighbors(fixed, fixed_size)
        mask = mask[:, None] & (c < count)
        if CHANNELS_LAST:
            offset = (first_box * 4 + row)[:, None] * channels + (channel + c)
        else:
            offset = (first_box * channels + (channel + c).to(tl.int64) * total) * 4 + row[:, None]
        step = tl.load(argmax + offset, mask, -1)
        gradient = tl.load(grad_output + offset, mask, 0.0).to(REAL)
        on_map, low, _, part = _neighbors(start[:, None] + step.to(REAL) * stride[:, None], size[:, None])
        add = mask & on_map & fixed_on_map[:, None] & (step >= 0) & (step <= pool_size)
        horizontal, fixed_low = horizontal[:, None], fixed_low[:, None]
        fixed_part = tl.broadcast_to(fixed_part[:, None], part.shape)
        x_low, y_low = tl.where(horizontal, low, fixed_low), tl.where(horizontal, fixed_low, low)
        x_part, y_part = tl.where(horizontal, part, fixed_part), tl.where(horizontal, fixed_part, part)
        pixel = _scratch_offset(n, edge[:, None], c, y_low, x_low, count, height, width, CHANNELS_LAST, OFFSET)
        x_part, y_part = x_part[:, :, None], y_part[:, :, None]
        x_share = tl.where(corner % 2 == 1, x_part, 1.0 - x_part)
        y_share = tl.where(corner >= 2, y_part, 1.0 - y_part)
        tl.atomic_add(
            scratch + pixel[:, :, None] + corner, y_share * x_share * gradient[:, :, None],
            add[:, :, None] & (corner >= 0), sem="relaxed",
        )  # fmt: skip


@_gpu.kernel(specialize=("channels",))
def _sum_kernel(
    scratch, grad, image, channel, count, channels, height, width, x_blocks, y_blocks, channel_blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    UNIT: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """A pixel's gradient: its own sum and the shares that its left, upper and upper left neighbors hold for it."""
    channel, count = channel * UNIT, count * UNIT
    OFFSET: tl.constexpr = tl.int64 if INT64 else tl.int32
    program = tl.program_id(0)
    x_block, y_block = program % x_blocks, program // x_blocks % y_blocks
    rest = program // x_blocks // y_blocks
    n, flat = rest // channel_blocks, (rest % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)[None]
    edge, c = flat // count, flat % count
    x = x_block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    mask = (x < width) & (edge < 4)
    has_left = mask & (x > 0)
    y = y_block * ROWS
    source = scratch + _scratch_offset(n, edge, c, y, x, count, height, width, CHANNELS_LAST, OFFSET)
    image_row, plane = (image + n).to(tl.int64) * height + y, edge * channels + channel + c
    if CHANNELS_LAST:
        left = source - count.to(OFFSET) * 16
        row_step = width.to(OFFSET) * count * 16
        target = grad + (image_row * width + x) * (channels * 4) + plane
        target_step = width.to(tl.int64) * channels * 4
    else:
        left = source - 4
        row_step = width.to(OFFSET) * 4
        target = grad + (((image + n).to(tl.int64) * channels * 4 + plane) * height + y) * width + x
        target_step = width.to(tl.int64)
    has_upper = as_mask(y > 0, mask)
    upper = tl.load(source - row_step + 2, mask & has_upper, 0.0)
    upper += tl.load(left - row_step + 3, has_left & has_upper, 0.0)
    for _ in range(y, tl.minimum(y + ROWS, height)):
        total = tl.load(source, mask, 0.0) + tl.load(left + 1, has_left, 0.0) + upper
        tl.store(target, total.to(grad.dtype.element_ty), mask)
        upper = tl.load(source + 2, mask, 0.0) + tl.load(left + 3, has_left, 0.0)
        source += row_step
        left += row_step
        target += target_step
