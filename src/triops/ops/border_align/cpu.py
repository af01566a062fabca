"""border_align on CPU: the inner loops run over channels, which lie side by side in a channels-last map.

A channels_last input is read as it lies. An NCHW input is turned pixel-major one image at a time, boxes
are aligned in strips that stay in the cache, and each strip is turned back as it is written: reading
single pixels out of planes would cost several times more.
"""

import numpy as np
import torch

from triops._launch import as_numpy, jit, run
from triops.ops.border_align.reference import compute_dtype, empty_like_format, empty_outputs, format_of, refuse_argmax

STRIP = 16  # boxes turned back to NCHW at a time
CHANNELS = 16  # channels of a tile when turning, and of one work item of the backward
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
    shape = (batch, 4 * channels, height, width)
    grad = empty_like_format(shape, real, argmax).zero_()
    out_of_range = np.zeros(1, np.bool_)
    # Seen as [N, K, 4, C] and [N, H, W, 4C] whatever the order in memory; an item owns its channels of the gradient.
    given_np = grad_output.detach().to(real).permute(0, 2, 3, 1).numpy()
    argmax_np = argmax.permute(0, 2, 3, 1).numpy()
    grad_np = grad.permute(0, 2, 3, 1).numpy()
    blocks = -(-channels // CHANNELS)
    grain = max(1, SAMPLED // (4 * CHANNELS * max(total, 1)))
    run(
        _scatter, batch * 4 * blocks, grain,
        given_np, as_numpy(boxes.to(real)), argmax_np, pool_size, blocks, grad_np, out_of_range,
    )  # fmt: skip
    if out_of_range[0]:
        refuse_argmax(pool_size)
    return grad.to(grad_output.dtype)


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
def _scatter(begin, end, given, boxes, argmax, pool_size, blocks, grad, out_of_range):
    """given, argmax [N, K, 4, C], boxes [N, K, 4] -> adds to grad [N, H, W, 4C].

    An item is the channels of one block, edge and image: no other item writes to them, so the sums
    come out in one order whatever the number of threads.
    """
    real = grad.dtype.type
    channels, height, width = argmax.shape[3], grad.shape[1], grad.shape[2]
    for item in range(begin, end):
        n, edge, block = item // (4 * blocks), item // blocks % 4, item % blocks
        low, high = block * CHANNELS, min((block + 1) * CHANNELS, channels)
        horizontal = edge % 2 == 0
        size, fixed_size = (width, height) if horizontal else (height, width)
        for k in range(boxes.shape[1]):
            box = boxes[n, k]
            start, stride, fixed, finite = _walk(box, edge, pool_size)
            fixed_on_map = finite and size > 0 and fixed_size > 0 and _on_axis(box, fixed, fixed_size)
            for c in range(low, high):
                step = argmax[n, k, edge, c]
                if step < 0 or step > pool_size:
                    out_of_range[0] = True
                    continue
                position = start + real(step) * stride
                if not (fixed_on_map and _on_axis(box, position, size)):
                    continue
                value = given[n, k, edge, c]
                x, y = (position, fixed) if horizontal else (fixed, position)
                x_low, x_high, x_part = _neighbours(box, x, width)
                y_low, y_high, y_part = _neighbours(box, y, height)
                x_rest, y_rest = real(1) - x_part, real(1) - y_part
                channel = edge * channels + c
                grad[n, y_low, x_low, channel] += y_rest * x_rest * value
                grad[n, y_low, x_high, channel] += y_rest * x_part * value
                grad[n, y_high, x_low, channel] += y_part * x_rest * value
                grad[n, y_high, x_high, channel] += y_part * x_part * value
