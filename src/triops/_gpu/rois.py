"""Pooling from feature maps on GPU: a program takes bins of one box and a block of channels.

Channels lie across the lanes where the map is channels-last, bins where it is NCHW, so a tile is [bins, channels] or
[channels, bins]. What is known per bin is worked out on a block [bins] and spread over the tile by `over_bins`.
"""

import triton
import triton.language as tl

from triops import _gpu
from triops._check import strict
from triops._gpu.arithmetic import as_mask, divide
from triops._rois import FEW_SAMPLES, MOST_SAMPLES, check_images

MOST_CHANNELS = 256  # of a program
BINS = 64  # of a program, where lanes lie along bins
FEW_READS = _gpu.block(2**22, interpreted=0)  # up to these, a map is read as it lies: a copy is one more launch
ADAPTIVE_SAMPLES = 16  # that a bin is taken to have where their number is adaptive and the host does not know it
FEW = tl.constexpr(FEW_SAMPLES)
MOST = tl.constexpr(float(MOST_SAMPLES))


def check_images_if_strict(operator, boxes, batch):
    """TRIOPS_CHECK=1 reads the image indices on a GPU, which synchronises. Kernels survive all of them."""
    if boxes.device.type != "cpu" and strict():  # CPU tensors: the interpreter stands in for a GPU
        check_images(operator, boxes, batch)


def programs(pooled, numbers, channels_last, in_order_of=0):
    """How the bins of boxes are shared out among programs.

    pooled: what the boxes have or get, [K, C, PH, PW].
    numbers: bins times channels of a program of one warp.
    in_order_of: images of the map, each of which one program per block of channels walks all boxes for; 0 if they go
    side by side.
    -> grid, blocks of bins per box, constants and options of the kernel
    """
    total, channels, rows, columns = pooled
    bins, block = (1, 32) if in_order_of else _tile(rows * columns, channels, numbers, channels_last)
    blocks = _gpu.cdiv(rows * columns, bins)
    options = {
        "CHANNELS_LAST": channels_last, "BINS": bins, "CHANNELS": block,
        "num_warps": 1 if in_order_of else max(1, min(bins * block // 256, 4)), "enable_fp_fusion": False,
    }  # fmt: skip
    return (in_order_of or total * blocks, _gpu.cdiv(channels, block)), blocks, options


def launch_moved_where_it_pays(launch, channels_last, shape, pooled, sampling_ratio, key):
    """`launch(moved)`: a map that is NCHW is moved to channels-last first, where boxes read a good part of it.

    shape, pooled: of the map and of what the boxes have or get. key: what else decides over the kernels.
    """
    if channels_last:
        launch(False)
        return
    batch, channels, height, width = shape
    samples = pooled[0] * pooled[2] * pooled[3] * (sampling_ratio**2 if sampling_ratio > 0 else ADAPTIVE_SAMPLES)
    key = (*key, sampling_ratio <= 0, channels, pooled[2] * pooled[3])
    _gpu.compile_once(key, lambda: (launch(False), launch(True)))
    launch(samples >= batch * height * width and samples * channels > FEW_READS)


def _tile(bins, channels, numbers, channels_last):
    """Bins and channels of a program, powers of two; about `numbers` in all, except in the interpreter."""
    numbers = _gpu.block(numbers, interpreted=8192)
    if channels_last:
        block = min(_gpu.next_power_of_2(channels), MOST_CHANNELS)
        return max(1, min(numbers // block, _gpu.next_power_of_2(bins))), block
    block = min(_gpu.next_power_of_2(bins), BINS)
    return block, max(1, min(numbers // block, _gpu.next_power_of_2(channels)))


@triton.jit
def image_of(boxes, roi, batch, FIELDS: tl.constexpr):
    """The image of a box of so many fields, and whether there is one."""
    image = tl.load(boxes + roi * FIELDS)
    valid = (image > -1) & (image < batch)
    return tl.where(valid, image, 0).to(tl.int64), valid


@triton.jit
def tile_of_block(block, bins, channels, CHANNELS_LAST: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr):
    """Bins and channels of a program that takes this block of a box's bins, and which of the tile there are."""
    number = block * BINS + tl.arange(0, BINS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return number, channel, over_bins(number < bins, CHANNELS_LAST) & over_channels(channel < channels, CHANNELS_LAST)


@triton.jit
def cut_box(boxes, roi, axis, scale, pooled, ratio, ADAPTIVE: tl.constexpr, ALIGNED: tl.constexpr, REAL: tl.constexpr):
    """Start of a box (x1, y1, x2, y2) along an axis, length and samples of a bin, and whether the box is finite."""
    offset: tl.constexpr = 0.5 if ALIGNED else 0.0
    start = tl.load(boxes + roi * 5 + 1 + axis).to(REAL) * scale - offset
    extent = (tl.load(boxes + roi * 5 + 3 + axis).to(REAL) * scale - offset) - start
    finite = (tl.abs(start) < float("inf")) & (tl.abs(extent) < float("inf"))
    start = tl.where(finite, start, 0.0)
    extent = tl.where(finite, extent, 0.0)
    if not ALIGNED:
        extent = tl.maximum(extent, 1.0)
    length, samples = bins_of(extent, pooled, ratio, ADAPTIVE)
    return start, length, tl.where(finite, samples, 0), finite


@triton.jit
def bins_of(extent, pooled, ratio, ADAPTIVE: tl.constexpr):
    """Length of a bin, and its samples along this axis."""
    length = divide(extent, tl.cast(pooled, extent.dtype))
    if ADAPTIVE:
        samples = tl.minimum(tl.maximum(tl.ceil(length.to(tl.float32)), 0.0), MOST).to(tl.int32)
    else:
        samples = tl.cast(ratio, tl.int32)
    return length, samples


@triton.jit
def samples_within(base, length, samples, low, high, ADAPTIVE: tl.constexpr):
    """Samples [begin, end) of each bin, among which are all those from `low` to `high`."""
    REAL: tl.constexpr = base.dtype
    begin = tl.zeros(base.shape, tl.int32)
    end = begin + samples
    if ADAPTIVE:
        count = samples.to(REAL)
        step = length / tl.maximum(count, 1.0)  # about a pixel or more where there are many
        first = tl.floor((low - base) / step - 0.5) - 1.0
        last = tl.ceil((high - base) / step - 0.5) + 2.0
        many = as_mask(samples > FEW, base)
        first = tl.minimum(tl.maximum(tl.where(many, first, 0.0), 0.0), count)
        last = tl.minimum(tl.maximum(tl.where(many, last, count), 0.0), count)
        begin = first.to(tl.int32)
        end = tl.maximum(begin, last.to(tl.int32))
    return begin, end


@triton.jit
def sample_position(base, length, samples, sample):
    """Where samples of bins lie that begin at `base`."""
    REAL: tl.constexpr = base.dtype
    along = (sample.to(REAL) + 0.5) * length
    return base + divide(along, tl.zeros(base.shape, REAL) + tl.maximum(samples, 1).to(REAL))


@triton.jit
def neighbors(position, size):
    """Whether a position is on one axis of the map, the two pixels around it, and the share of the second."""
    end = tl.cast(size, position.dtype)
    on_map = (position >= -1.0) & (position <= end)
    position = tl.where(on_map, tl.minimum(tl.maximum(position, 0.0), end - 1.0), 0.0)
    low = tl.minimum(position.to(tl.int32), size - 1)
    return on_map, low, tl.minimum(low + 1, size - 1), position - low.to(position.dtype)


@triton.jit
def over_bins(x, CHANNELS_LAST: tl.constexpr):
    """A block of bins as one side of a tile."""
    if CHANNELS_LAST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def over_channels(x, CHANNELS_LAST: tl.constexpr):
    """A block of channels as the other side."""
    if CHANNELS_LAST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def output_offsets(roi, number, channel, bins, channels, CHANNELS_LAST: tl.constexpr):
    """Offsets of a tile of the outputs."""
    at = over_bins(number, CHANNELS_LAST)
    return bin_offsets(roi, at, over_channels(channel, CHANNELS_LAST), bins, channels, CHANNELS_LAST)


@triton.jit
def bin_offsets(roi, number, channel, bins, channels, CHANNELS_LAST: tl.constexpr):
    """Offsets of outputs that lie in memory one way or the other; bins and channels of any shape."""
    if CHANNELS_LAST:
        return (roi * bins + tl.cast(number, tl.int64)) * channels + channel.to(tl.int64)
    else:
        return (roi * channels + channel.to(tl.int64)) * bins + tl.cast(number, tl.int64)


@triton.jit
def pixel_offsets(row, column, width, channels, CHANNELS_LAST: tl.constexpr):
    """Offsets of a block of pixels, one per bin."""
    at = row.to(tl.int64) * width + column
    if CHANNELS_LAST:
        at = at * channels
    return over_bins(at, CHANNELS_LAST)


@triton.jit
def plane_offsets(image, channel, height, width, channels, CHANNELS_LAST: tl.constexpr):
    """Offsets of the first pixel of each channel of an image."""
    c = over_channels(channel, CHANNELS_LAST).to(tl.int64)
    size = tl.cast(height, tl.int64) * width
    if CHANNELS_LAST:
        return image * size * channels + c
    else:
        return (image * channels + c) * size


@triton.jit
def read_bilinear(
    plane, low_y, high_y, part_y, low_x, high_x, part_x, width, channels, mask,
    CHANNELS_LAST: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """A tile of values between four pixels per bin, 0 outside of the mask. `plane`: pointers from `plane_offsets`."""
    rest_y = 1.0 - part_y
    rest_x = 1.0 - part_x
    at = plane + pixel_offsets(low_y, low_x, width, channels, CHANNELS_LAST)
    value = over_bins(rest_y * rest_x, CHANNELS_LAST) * tl.load(at, mask=mask, other=0.0).to(REAL)
    at = plane + pixel_offsets(low_y, high_x, width, channels, CHANNELS_LAST)
    value = value + over_bins(rest_y * part_x, CHANNELS_LAST) * tl.load(at, mask=mask, other=0.0).to(REAL)
    at = plane + pixel_offsets(high_y, low_x, width, channels, CHANNELS_LAST)
    value = value + over_bins(part_y * rest_x, CHANNELS_LAST) * tl.load(at, mask=mask, other=0.0).to(REAL)
    at = plane + pixel_offsets(high_y, high_x, width, channels, CHANNELS_LAST)
    return value + over_bins(part_y * part_x, CHANNELS_LAST) * tl.load(at, mask=mask, other=0.0).to(REAL)


@triton.jit
def add_bilinear(
    plane, value, low_y, high_y, part_y, low_x, high_x, part_x, width, channels, mask, CHANNELS_LAST: tl.constexpr
):
    """Add a tile of values to four pixels per bin, by their weights in `read_bilinear`."""
    for down in tl.static_range(2):
        for right in tl.static_range(2):
            weight = (part_y if down else 1.0 - part_y) * (part_x if right else 1.0 - part_x)
            at = pixel_offsets(high_y if down else low_y, high_x if right else low_x, width, channels, CHANNELS_LAST)
            tl.atomic_add(plane + at, over_bins(weight, CHANNELS_LAST) * value, mask=mask, sem="relaxed")
