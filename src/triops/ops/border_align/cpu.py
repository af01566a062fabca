"""border_align on CPU: the inner loops run over channels, which lie side by side in a channels-last map.

A channels_last input is read as it lies. An NCHW input is turned pixel-major one image at a time, boxes
are aligned in strips that stay in the cache, and each strip is turned back as it is written: reading
single pixels out of planes would cost several times more.
"""

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops.ops.border_align.reference import empty_like_format, empty_outputs, format_of, refuse_argmax

STRIP = 16  # boxes turned back to NCHW at a time
CHANNELS = 16  # channels of a tile when turning
PIXELS = 64
SAMPLED = 50_000  # channel samples worth a thread


def border_align_forward(input, boxes, pool_size):
    output, argmax = empty_outputs(input, boxes)
    if output.numel() == 0 or input.numel() == 0:
        return output.zero_(), argmax.zero_()
    real = compute_dtype(input.dtype)
    batch, channels, total = output.shape[:3]
    height, width = input.shape[2:]
    boxes_np = as_numpy(boxes.to(real))
    # Half types pass through float32: one sweep over the map, next to pool_size + 1 over as many boxes.
    values = output if output.dtype == real else torch.empty_like(output, dtype=real)
    grain = max(1, SAMPLED // (4 * channels * (pool_size + 1)))
    if format_of(input) == torch.channels_last:
        pixels = as_numpy(input.to(real).permute(0, 2, 3, 1)).reshape(batch, height * width, 4 * channels)
        values_np, argmax_np = as_numpy(values.permute(0, 2, 3, 1)), as_numpy(argmax.permute(0, 2, 3, 1))
        run(_align, batch * total, grain, pixels, boxes_np, height, width, pool_size, values_np, argmax_np)
    else:
        planes = as_numpy(input.to(real)).reshape(batch, 4 * channels, height * width)
        values_np, argmax_np = values.numpy().reshape(batch, channels, -1), argmax.numpy().reshape(batch, channels, -1)
        pixels = np.empty((height * width, 4 * channels), planes.dtype)
        for n in range(batch):
            run(_turn, -(-4 * channels // CHANNELS), max(1, 4096 // (height * width)), planes[n], pixels)
            run(
                _align_strips, -(-total // STRIP), -(-grain // STRIP),
                pixels, boxes_np[n], height, width, pool_size, values_np[n], argmax_np[n],
            )  # fmt: skip
    if values is not output:
        output.copy_(values)
    return output, argmax


def border_align_backward(grad_output, boxes, argmax, height, width, pool_size):
    batch, channels, total = grad_output.shape[:3]
    real = compute_dtype(grad_output.dtype)
    layout = format_of(argmax)
    grad = empty_like_format((batch, 4 * channels, height, width), real, argmax)
    out_of_range = np.zeros(1, np.bool_)
    # In memory, from one row (an edge of a box) or pixel to the next, and from one channel to the next.
    if layout == torch.channels_last:
        row_stride, channel_stride, pixel_stride, plane_stride = channels, 1, 4 * channels, 1
        block = max(1, min(64, channels))  # neighbours are read together
    else:
        row_stride, channel_stride, pixel_stride, plane_stride = 1, 4 * total, 1, height * width
        block = max(1, min(16, channels))
    grain = max(1, SAMPLED // (4 * block * max(total, 1)))
    run(
        _scatter, batch * 4 * -(-channels // block), grain,
        _flat(grad_output.to(real), layout), as_numpy(boxes.to(real)), _flat(argmax, layout),
        channels, height, width, pool_size, block, row_stride, channel_stride, pixel_stride, plane_stride,
        _flat(grad, layout), out_of_range,
    )  # fmt: skip
    if out_of_range[0]:
        refuse_argmax(pool_size)
    return grad.to(grad_output.dtype)


def _flat(tensor, layout):
    """A 4D tensor's elements in their order in memory, once it lies as `layout` says."""
    if layout == torch.channels_last:
        tensor = tensor.permute(0, 2, 3, 1)
    return as_numpy(tensor).reshape(-1)


@jit
def _neighbours(box, position, size):
    """The two pixels around a position on one axis, clamped to the map, and the share of the second."""
    real = box.dtype.type
    zero, last = real(0), real(size - 1)
    position = position if position > zero else zero
    position = position if position < last else last
    low = min(np.int64(position), size - 1)
    return low, min(low + 1, size - 1), real(position - real(low))


@jit
def _on_axis(box, position, size):
    real = box.dtype.type
    return position >= real(-1) and position <= real(size)


@jit
def _walk(box, edge, pool_size):
    """Start and stride along an edge, its fixed coordinate, and whether the box is finite."""
    x, y = (box[0], box[1]) if edge < 2 else (box[2], box[3])
    steps = box.dtype.type(pool_size)
    finite = np.isfinite(box[0]) and np.isfinite(box[1]) and np.isfinite(box[2]) and np.isfinite(box[3])
    if edge % 2 == 0:
        start, fixed, stride = x, y, (box[2] - box[0]) / steps
    else:
        start, fixed, stride = y, x, (box[3] - box[1]) / steps
    return start, (stride if edge < 2 else -stride), fixed, finite


@jit
def _locate(box, edge, position, fixed, height, width):
    """The corner pixels of a sample on the map and their weights, in the reference's order."""
    one = box.dtype.type(1)
    x, y = (position, fixed) if edge % 2 == 0 else (fixed, position)
    x_low, x_high, x_part = _neighbours(box, x, width)
    y_low, y_high, y_part = _neighbours(box, y, height)
    pixel = (y_low * width + x_low, y_low * width + x_high, y_high * width + x_low, y_high * width + x_high)
    weight = ((one - y_part) * (one - x_part), (one - y_part) * x_part, y_part * (one - x_part), y_part * x_part)
    return pixel, weight


@jit
def _first(a, b, c, d, weight, best, step_of_best):
    w1, w2, w3, w4 = weight
    for i in range(np.uint32(best.shape[0])):
        best[i] = w1 * a[i] + w2 * b[i] + w3 * c[i] + w4 * d[i]
        step_of_best[i] = 0


@jit
def _next(a, b, c, d, weight, step, best, step_of_best):
    w1, w2, w3, w4 = weight
    step = np.int32(step)
    for i in range(np.uint32(best.shape[0])):
        value = w1 * a[i] + w2 * b[i] + w3 * c[i] + w4 * d[i]
        greater = value > best[i]
        best[i] = value if greater else best[i]
        step_of_best[i] = step if greater else step_of_best[i]


@jit
def _next_two(a, b, c, d, weight, e, f, g, h, weight_after, step, best, step_of_best):
    """Two samples in one sweep over the channels, which halves the traffic on `best`."""
    w1, w2, w3, w4 = weight
    v1, v2, v3, v4 = weight_after
    step, step_after = np.int32(step), np.int32(step + 1)
    for i in range(np.uint32(best.shape[0])):
        highest, at = best[i], step_of_best[i]
        value = w1 * a[i] + w2 * b[i] + w3 * c[i] + w4 * d[i]
        greater = value > highest
        highest = value if greater else highest
        at = step if greater else at
        value = v1 * e[i] + v2 * f[i] + v3 * g[i] + v4 * h[i]
        greater = value > highest
        best[i] = value if greater else highest
        step_of_best[i] = step_after if greater else at


@jit
def _next_zero(step, best, step_of_best):
    zero, step = best.dtype.type(0), np.int32(step)
    for i in range(np.uint32(best.shape[0])):
        greater = zero > best[i]
        best[i] = zero if greater else best[i]
        step_of_best[i] = step if greater else step_of_best[i]


@jit
def _align_box(pixels, box, height, width, pool_size, output, argmax):
    """pixels [H * W, 4C], box [4] -> output, argmax [4, C]."""
    channels, real = output.shape[1], box.dtype.type
    for edge in range(4):
        first, last = edge * channels, (edge + 1) * channels
        best, step_of_best = output[edge], argmax[edge]
        start, stride, fixed, finite = _walk(box, edge, pool_size)
        if not (finite and _on_axis(box, fixed, height if edge % 2 == 0 else width)):
            best[:] = 0
            step_of_best[:] = 0
            continue
        size = width if edge % 2 == 0 else height
        step = 0
        while step <= pool_size:
            position = start + real(step) * stride
            if not _on_axis(box, position, size):
                if step == 0:
                    best[:] = 0
                    step_of_best[:] = 0
                else:
                    _next_zero(step, best, step_of_best)
                step += 1
                continue
            p, weight = _locate(box, edge, position, fixed, height, width)
            a, b = pixels[p[0], first:last], pixels[p[1], first:last]
            c, d = pixels[p[2], first:last], pixels[p[3], first:last]
            if step == 0:
                _first(a, b, c, d, weight, best, step_of_best)
                step += 1
                continue
            after = start + real(step + 1) * stride
            if step < pool_size and _on_axis(box, after, size):
                p, weight_after = _locate(box, edge, after, fixed, height, width)
                e, f = pixels[p[0], first:last], pixels[p[1], first:last]
                g, h = pixels[p[2], first:last], pixels[p[3], first:last]
                _next_two(a, b, c, d, weight, e, f, g, h, weight_after, step, best, step_of_best)
                step += 2
            else:
                _next(a, b, c, d, weight, step, best, step_of_best)
                step += 1


@jit
def _align(begin, end, pixels, boxes, height, width, pool_size, output, argmax):
    for item in range(begin, end):
        n, k = item // boxes.shape[1], item % boxes.shape[1]
        _align_box(pixels[n], boxes[n, k], height, width, pool_size, output[n, k], argmax[n, k])


@jit
def _align_strips(begin, end, pixels, boxes, height, width, pool_size, output, argmax):
    """As `_align` for one image, `STRIP` boxes a work item; output, argmax [C, 4K]."""
    channels, total = output.shape[0], boxes.shape[0]
    values = np.empty((STRIP, 4, channels), output.dtype)
    steps = np.empty((STRIP, 4, channels), np.int32)
    for strip in range(begin, end):
        first = strip * STRIP
        count = min(STRIP, total - first)
        for k in range(count):
            _align_box(pixels, boxes[first + k], height, width, pool_size, values[k], steps[k])
        for low in range(0, channels, CHANNELS):
            high = min(low + CHANNELS, channels)
            _turn_tile(values.reshape(STRIP * 4, channels), output[:, 4 * first : 4 * (first + count)], low, high)
            _turn_tile(steps.reshape(STRIP * 4, channels), argmax[:, 4 * first : 4 * (first + count)], low, high)


@jit
def _turn_tile(source, target, low, high):
    """target[c, r] = source[r, c] for low <= c < high."""
    for c in range(low, high):
        row = target[c]
        for r in range(np.uint32(row.shape[0])):
            row[r] = source[r, c]


@jit
def _turn(begin, end, planes, pixels):
    """planes [4C, H * W] -> pixels [H * W, 4C], `CHANNELS` channels a work item."""
    for block in range(begin, end):
        low, high = block * CHANNELS, min((block + 1) * CHANNELS, planes.shape[0])
        for first in range(0, planes.shape[1], PIXELS):
            for pixel in range(first, min(first + PIXELS, planes.shape[1])):
                row = pixels[pixel]
                for c in range(np.uint32(low), np.uint32(high)):
                    row[c] = planes[c, pixel]


@jit
def _scatter(
    begin, end, given, boxes, argmax, channels, height, width, pool_size, block,
    row_stride, channel_stride, pixel_stride, plane_stride, grad, out_of_range,
):  # fmt: skip
    """Writes the gradient of an item: the channels of one block, edge and image.

    No other item writes to them, so the sums come out in one order whatever the number of threads. They
    are taken in a compact tile: in the map itself pixels lie a power of two apart and fight for cache sets.
    """
    real, total, pixels = grad.dtype.type, boxes.shape[1], height * width
    blocks = -(-channels // block)
    tile = np.empty((pixels, block), grad.dtype)
    for item in range(begin, end):
        n, edge, first = item // (4 * blocks), item // blocks % 4, item % blocks * block
        count = min(block, channels - first)
        horizontal = edge % 2 == 0
        size, fixed_size = (width, height) if horizontal else (height, width)
        along, across = (1, width) if horizontal else (width, 1)
        tile[:] = 0
        for k in range(total):
            box = boxes[n, k]
            start, stride, fixed, finite = _walk(box, edge, pool_size)
            on_map = finite and pixels > 0 and _on_axis(box, fixed, fixed_size)
            low, high, fixed_part = _neighbours(box, fixed, fixed_size) if on_map else (0, 0, real(0))
            fixed_rest = real(1) - fixed_part
            on_low, on_high = low * across, high * across
            read = n * 4 * channels * total + (4 * k + edge) * row_stride + first * channel_stride
            for c in range(count):
                step, value = argmax[read], given[read]
                read += channel_stride
                if step < 0 or step > pool_size:
                    out_of_range[0] = True
                    continue
                position = start + real(step) * stride
                if not (on_map and _on_axis(box, position, size)):
                    continue
                low, high, part = _neighbours(box, position, size)
                rest = real(1) - part
                low, high = low * along, high * along
                tile[on_low + low, c] += fixed_rest * rest * value
                tile[on_low + high, c] += fixed_rest * part * value
                tile[on_high + low, c] += fixed_part * rest * value
                tile[on_high + high, c] += fixed_part * part * value
        plane = n * 4 * channels * pixels + (edge * channels + first) * plane_stride
        if plane_stride == 1:
            for pixel in range(pixels):
                grad[plane + pixel * pixel_stride : plane + pixel * pixel_stride + count] = tile[pixel, :count]
        else:
            for c in range(count):
                grad[plane + c * plane_stride : plane + c * plane_stride + pixels] = tile[:, c]
