"""deform_conv2d on CPU: a block of output pixels at a time reads the map under one tap, and multiplies what it read.

Maps are read by rows of channels, so that a pixel's channels are contiguous: an NCHW map is transposed first. Products
are done in vector registers (see `row_products`), in the order of taps and channels for every output. In the backward
the gradient of what was read is kept for some blocks, since two passes share it: one over output pixels for offset and
mask, one over channels for the map, so that no two threads add to one number. All sums have the same order on every run
and with any number of threads.
"""

import math

import numpy as np
import torch

from triops._cpu.addresses import ELEMENTS, array_at, laid
from triops._cpu.jit import inline, jit
from triops._cpu.memory import as_numpy, in_huge_pages, zeros
from triops._cpu.row_products import TOGETHER, add_dot_products, add_outer_products, add_products, by_lanes
from triops._cpu.threads import run
from triops._cpu.vectors import LANES, copy_vector, transpose
from triops._dtypes import compute_dtype
from triops._rois import empty_in_format, format_of
from triops.ops.deform_conv2d.reference import Sizes, empty_gradients

BLOCK = 64  # output pixels, whose columns and sums stay in cache
WIDE = 64  # input channels of a weight gradient that are summed at a time
LINES = 8  # output channels of it that share each vector loaded: with four, 70 % of the speed
KEPT_BYTES = 4 << 20  # of gradients between the two passes, per thread
PRODUCTS = 2_000_000  # of two numbers, worth a thread
NUMBERS = 200_000  # to transpose, worth a thread


def deform_conv2d(input, offset, weight, mask, bias, stride, padding, dilation):
    sizes, real = Sizes.of(input, offset, weight), compute_dtype(input.dtype)
    channels_last = format_of(input) == torch.channels_last
    shape = sizes.batch, sizes.outputs, sizes.out_height, sizes.out_width
    out = empty_in_format(shape, real, input.device, channels_last)
    if input.numel() == 0:
        return (out.zero_() if bias is None else out.copy_(bias.view(-1, 1, 1))).to(input.dtype)
    in_huge_pages(out)
    maps, moved = _rows(input, real), laid(offset, real)
    masks, shift = None if mask is None else laid(mask, real), None if bias is None else laid(bias, real)
    run(_forward, *_blocks(sizes), maps.data_ptr(), moved.data_ptr(), 0 if masks is None else masks.data_ptr(),
        _in_lanes(weight, sizes, real), 0 if shift is None else shift.data_ptr(), out.data_ptr(), sizes.batch,
        sizes.outputs // sizes.groups, channels_last, *_plan(sizes, stride, padding, dilation))  # fmt: skip
    return out if out.dtype is input.dtype else out.to(input.dtype)


def deform_conv2d_backward(grad, input, offset, weight, mask, stride, padding, dilation, of_inputs, of_weight):
    sizes, real = Sizes.of(input, offset, weight), compute_dtype(input.dtype)
    grads = empty_gradients(input, offset, weight, mask, of_inputs, of_weight)
    if grad.numel() == 0 or input.numel() == 0:
        for found in grads:
            found.zero_()
        return grads
    maps, (moved, masks) = as_numpy(_rows(input, real)).reshape(-1), _samples(offset, mask, real)
    plan, matrices = _plan(sizes, stride, padding, dilation), _matrices(weight, sizes, real)
    given = as_numpy(_rows(grad, real)).reshape(-1, sizes.groups, sizes.outputs // sizes.groups)
    given = np.ascontiguousarray(given.swapaxes(0, 1))  # [groups, B * OH * OW, N / groups]
    found = [*grads]
    if of_inputs:
        found[:3] = _of_inputs(sizes, maps, moved, masks, given, by_lanes(matrices.swapaxes(2, 3)), plan, real)
        if format_of(grads[0]) != torch.channels_last:
            planes = _transposed(found[0], sizes.batch, sizes.height * sizes.width, sizes.channels)
            found[0] = planes.view(input.shape)
        else:
            found[0] = found[0].view(sizes.batch, sizes.height, sizes.width, sizes.channels).permute(0, 3, 1, 2)
    if of_weight:
        found[3] = _of_weight(sizes, maps, moved, masks, given, plan, real)
    # What lies as it should is returned as it is: torch's threads, once awake, are in the way of the next kernel's.
    for n, (target, source) in enumerate(zip(grads, found, strict=True)):
        source = source.view(target.shape) if n else source
        same = source.dtype == target.dtype and (source.stride() == target.stride() or target.numel() == 0)
        found[n] = source if same else target.copy_(source)
    return tuple(found)


def _of_inputs(sizes, maps, moved, masks, given, matrices, plan, real):
    """-> the gradients of input [B * H * W * C], offset and mask, flat and of dtype `real`"""
    blocks, grain = _blocks(sizes)
    padded = matrices.shape[1] * LANES
    numbers = sizes.taps * sizes.groups * BLOCK * padded  # kept per block
    together = max(min(torch.get_num_threads() * KEPT_BYTES // (numbers * maps.itemsize), blocks), 1)
    kept = torch.empty(together * numbers, dtype=real).numpy()
    grad_maps = zeros(sizes.batch * sizes.height * sizes.width * sizes.channels, dtype=real)
    grad_moved, grad_masks = torch.empty(moved.size, dtype=real), torch.empty(masks.size, dtype=real)
    lines = -(-sizes.channels // LANES)
    for first in range(0, blocks, together):
        count = min(together, blocks - first)
        run(_columns_gradient, count, grain, first, maps, moved, masks, given, matrices, plan, kept,
            grad_moved.numpy(), grad_masks.numpy())  # fmt: skip
        work = 4 * count * sizes.taps * BLOCK * LANES
        run(_maps_gradient, lines, max(PRODUCTS // work, 1), first, count, moved, masks, kept, padded, plan,
            grad_maps.numpy())  # fmt: skip
    return grad_maps, grad_moved, grad_masks


def _of_weight(sizes, maps, moved, masks, given, plan, real):
    """-> the gradient of the weight [N, C / groups, taps], of dtype `real`"""
    outputs, segment = sizes.outputs // sizes.groups, _segment(sizes)
    total = torch.empty(sizes.outputs * sizes.taps * (sizes.channels // sizes.groups), dtype=real).numpy()
    pieces = -(-segment // WIDE) * (sizes.channels // segment) * sizes.taps
    work = sizes.batch * sizes.pixels * outputs * min(segment, WIDE)
    run(_weight_gradient, pieces, max(PRODUCTS // work, 1), maps, moved, masks, given, plan, total)
    lines = total.reshape(sizes.outputs, sizes.taps, -1).swapaxes(1, 2)
    return torch.from_numpy(np.ascontiguousarray(lines))


def _blocks(sizes):
    """-> the number of blocks of output pixels, none of which crosses images; how many are worth a thread"""
    work = BLOCK * sizes.taps * sizes.channels * max(sizes.outputs // sizes.groups, 1)
    return sizes.batch * -(-sizes.pixels // BLOCK), max(PRODUCTS // max(work, 1), 1)


def _segment(sizes):
    """Channels that share a group of the convolution and an offset group: the map is read in pieces of so many."""
    return math.gcd(sizes.channels // sizes.groups, sizes.channels // sizes.offset_groups)


def _plan(sizes, stride, padding, dilation):
    """All the numbers that the kernels need, as one tuple of integers."""
    return (
        sizes.channels, sizes.height, sizes.width, sizes.out_height, sizes.out_width, sizes.kernel_height,
        sizes.kernel_width, sizes.groups, sizes.offset_groups, _segment(sizes), *stride, *padding, *dilation,
    )  # fmt: skip


def _samples(offset, mask, real):
    """Offset and mask, as flat arrays in NCHW order; no mask is an empty one."""
    moved = as_numpy(offset, real).reshape(-1)
    return moved, np.empty(0, moved.dtype) if mask is None else as_numpy(mask, real).reshape(-1)


def _matrices(weight, sizes, real):
    """The weight as an array [taps, groups, N / groups, C / groups]"""
    shape = sizes.groups, sizes.outputs // sizes.groups, sizes.channels // sizes.groups, sizes.taps
    return as_numpy(weight, real).reshape(shape).transpose(3, 0, 1, 2)


def _in_lanes(weight, sizes, real):
    """`by_lanes(_matrices(weight, sizes, real))`, flat, by a kernel that reads the weight once."""
    own, outputs = sizes.channels // sizes.groups, sizes.outputs // sizes.groups
    items, wide = sizes.groups * -(-outputs // LANES), own * sizes.taps
    lines, like = laid(weight, real), ELEMENTS[real]
    lanes = np.empty(items * wide * LANES, like.dtype)
    run(_lay_lanes, items, max(NUMBERS // (LANES * wide), 1), lines.data_ptr(), lanes, sizes.groups, outputs, own,
        sizes.taps)  # fmt: skip
    return lanes


def _rows(maps, real):
    """maps [B, C, H, W] of dtype `real` in the order [B, H, W, C] in memory: as they lie, where they lie so."""
    if format_of(maps) == torch.channels_last:
        return laid(maps.permute(0, 2, 3, 1), real)
    batch, channels, height, width = maps.shape
    return _transposed(laid(maps, real), batch, channels, height * width)


def _transposed(source, batch, lines, columns):
    """[batch, lines, columns] -> [batch, columns, lines], both in this order in memory"""
    if lines == 1 or columns == 1:
        return source
    like = ELEMENTS[source.dtype]
    # NumPy's memory: where it is large, that of `torch.empty` may come from the system anew in every call.
    target = torch.from_numpy(np.empty(source.numel(), like.dtype))
    pieces = batch * -(-columns // LANES)
    run(_transpose, pieces, max(NUMBERS // (lines * LANES), 1), source.data_ptr(), target.data_ptr(), batch, lines,
        columns, like)  # fmt: skip
    return target


@jit
def _transpose(begin, end, source, target, batch, lines, columns, like):
    """Pieces of LANES columns, counted through all matrices."""
    size, pieces = batch * lines * columns, (columns + LANES - 1) // LANES
    source, target = array_at(source, size, like), array_at(target, size, like)
    for piece in range(begin, end):
        matrix, first = piece // pieces * lines * columns, piece % pieces * LANES
        count = min(LANES, columns - first)
        transpose(lines, count, source, matrix + first, columns, target, matrix + first * lines, lines)


@jit
def _lay_lanes(begin, end, weight, lanes, groups, outputs, own, taps):
    """A weight [groups * outputs, own, taps] as lanes [taps, groups, pieces, own, LANES].

    An item is a piece, LANES outputs; they are counted through all groups.
    """
    wide, pieces = own * taps, (outputs + LANES - 1) // LANES
    lines = array_at(weight, groups * outputs * wide, lanes)
    columns = np.zeros(wide * LANES, lanes.dtype)
    for item in range(begin, end):
        group, piece = item // pieces, item % pieces
        count = min(LANES, outputs - piece * LANES)
        if count < LANES:
            columns[:] = 0
        first = (group * outputs + piece * LANES) * wide
        transpose(count, wide, lines, first, wide, columns, 0, LANES)
        for tap in range(taps):
            to = ((tap * groups + group) * pieces + piece) * own
            for c in range(own):
                copy_vector(lanes, (to + c) * LANES, columns, (c * taps + tap) * LANES)


@inline
def _position(moved, place, base, size):
    """Where a sample lies along one axis. -> the pixel below, the share of the one above it; -2: off the map"""
    at = moved.dtype.type(base) + moved[place]
    if not (at > moved.dtype.type(-1) and at < moved.dtype.type(size)):  # true for NaN
        return np.int64(-2), moved.dtype.type(0)
    below = np.floor(at)
    return np.int64(below), at - below


@inline
def _sample(moved, masks, plan, image, pixel, tap, group):
    """Where output `pixel` reads its map under a tap, in an offset group.

    -> the pixel above and to the left, as row and column, -2 where the sample lies off the map; the shares of the
    pixel below and of the one to the right; the mask
    """
    _, height, width, out_height, out_width, rows, columns, _, groups, _, dy, dx, up, left, down, right = plan
    place = (image * groups + group) * rows * columns + tap
    pixels = out_height * out_width
    y = pixel // out_width * dy - up + tap // columns * down
    x = pixel % out_width * dx - left + tap % columns * right
    top, fy = _position(moved, 2 * place * pixels + pixel, y, height)
    begin, fx = _position(moved, (2 * place + 1) * pixels + pixel, x, width)
    if top == -2 or begin == -2:
        return np.int64(-2), np.int64(-2), fy, fx, fy
    factor = masks[place * pixels + pixel] if len(masks) > 0 else moved.dtype.type(1)
    return top, begin, fy, fx, factor


@jit
def _read(maps, moved, masks, plan, image, first, count, tap, begin, end, target, to, step):
    """target[to + r * step + c - begin] = channel c of the map as pixel first + r reads it, for c in [begin, end).

    These channels lie within one offset group.
    """
    channels, height, width = plan[:3]
    group = begin // (channels // plan[8])
    one = moved.dtype.type(1)
    wide = np.uint64(end - begin)
    for r in range(count):
        top, left, fy, fx, factor = _sample(moved, masks, plan, image, first + r, tap, group)
        place = np.uint64(to + r * step)
        pixel = (image * height + top) * width + left
        a = np.uint64(pixel * channels + begin)
        below = np.uint64(width * channels)
        right = np.uint64(channels)
        if top >= 0 and left >= 0 and top + 1 < height and left + 1 < width:
            w0, w1 = (one - fy) * (one - fx) * factor, (one - fy) * fx * factor
            w2, w3 = fy * (one - fx) * factor, fy * fx * factor
            for c in range(wide):
                target[place + c] = (w0 * maps[a + c] + w1 * maps[a + right + c]) + (
                    w2 * maps[a + below + c] + w3 * maps[a + below + right + c]
                )
            continue
        for c in range(wide):
            target[place + c] = 0
        if left == -2:
            continue
        for i in range(2):
            for j in range(2):
                if 0 <= top + i < height and 0 <= left + j < width:
                    w = (fy if i else one - fy) * (fx if j else one - fx) * factor
                    corner = a + np.uint64(i) * below + np.uint64(j) * right
                    for c in range(wide):
                        target[place + c] += w * maps[corner + c]


@jit
def _multiply(source, count, matrices, k, sums):
    """sums[r, m] += source[r] @ matrices[k], for r < count."""
    for piece in range(matrices.shape[1]):
        for r in range(0, count, TOGETHER):
            if r + TOGETHER <= count:
                rows = (r, r + 1, r + 2, r + 3)
                add_products(sums, rows, source, rows, matrices, k, piece)
            else:
                for one in range(r, count):
                    add_products(sums, (one,), source, (one,), matrices, k, piece)


@jit
def _forward(begin, end, maps, moved, masks, lanes, bias, out, batch, outputs, channels_last, *plan):
    """The outputs of blocks [begin, end). masks, bias: 0 for none."""
    channels, height, width, out_height, out_width, rows, columns, groups, offset_groups, segment = plan[:10]
    pixels, own, taps = out_height * out_width, channels // groups, rows * columns
    blocks, pieces = (pixels + BLOCK - 1) // BLOCK, (outputs + LANES - 1) // LANES
    padded, samples = pieces * LANES, batch * offset_groups * taps * pixels
    maps, moved = array_at(maps, batch * height * width * channels, lanes), array_at(moved, 2 * samples, lanes)
    masks = array_at(masks, samples if masks != 0 else 0, lanes)
    bias = array_at(bias, groups * outputs if bias != 0 else 0, lanes)
    matrices = lanes.reshape((taps * groups, pieces, own, LANES))
    out = array_at(out, batch * groups * outputs * pixels, lanes)
    read = np.empty((groups, BLOCK, own), maps.dtype)
    sums = np.empty((groups, BLOCK, padded), maps.dtype)
    for block in range(begin, end):
        image, first = block // blocks, block % blocks * BLOCK
        count = min(BLOCK, pixels - first)
        for g in range(groups):
            for r in range(count):
                sums[g, r] = 0
                if len(bias) > 0:
                    sums[g, r, :outputs] = bias[g * outputs : (g + 1) * outputs]
        for tap in range(rows * columns):
            for start in range(0, channels, segment):
                to = (start // own * BLOCK) * own + start % own
                _read(maps, moved, masks, plan, image, first, count, tap, start, start + segment, read.reshape(-1), to,
                      own)  # fmt: skip
            for g in range(groups):
                _multiply(read[g], count, matrices, tap * groups + g, sums[g])
        for g in range(groups):
            if channels_last:
                for r in range(count):
                    to = ((image * pixels + first + r) * groups + g) * outputs
                    out[to : to + outputs] = sums[g, r, :outputs]
            else:
                transpose(count, outputs, sums[g].reshape(-1), 0, padded, out,
                          (image * groups + g) * outputs * pixels + first, pixels)  # fmt: skip


@jit
def _columns_gradient(
    begin, end, before, maps, moved, masks, given, matrices, plan, kept, grad_moved, grad_masks
):  # fmt: skip
    """Of blocks [begin, end) behind those `before`: the gradient of what was read, into
    kept [blocks, taps, groups, BLOCK, padded channels], and of offset and mask."""
    channels, height, width, out_height, out_width, rows, columns, groups, offset_groups, segment = plan[:10]
    pixels, taps, own = out_height * out_width, rows * columns, channels // groups
    blocks, padded = (pixels + BLOCK - 1) // BLOCK, matrices.shape[1] * LANES
    one, none = maps.dtype.type(1), maps.dtype.type(0)
    lanes = np.empty((4, LANES), maps.dtype)
    for block in range(begin, end):
        image, first = (before + block) // blocks, (before + block) % blocks * BLOCK
        count = min(BLOCK, pixels - first)
        for tap in range(taps):
            at = (block * taps + tap) * groups * BLOCK * padded
            back = kept[at : at + groups * BLOCK * padded].reshape((groups, BLOCK, padded))
            for g in range(groups):
                back[g, :count] = none
                source = given[g, image * pixels + first : image * pixels + first + count]
                _multiply(source, count, matrices, tap * groups + g, back[g])
            for group in range(offset_groups):
                low, high = group * (channels // offset_groups), (group + 1) * (channels // offset_groups)
                for r in range(count):
                    top, left, fy, fx, factor = _sample(moved, masks, plan, image, first + r, tap, group)
                    along_y, along_x, along_mask = none, none, none
                    if left != -2:
                        corner = ((image * height + top) * width + left) * channels
                        inside = top >= 0 and left >= 0 and top + 1 < height and left + 1 < width
                        lanes[:] = none
                        for start in range(low, high, segment):
                            of_row = at + (start // own * BLOCK + r) * padded + start % own
                            if inside:
                                _dot_products(kept, of_row, maps, corner + start, channels, width, segment, lanes)
                                continue
                            for i in range(2):
                                for j in range(2):
                                    if 0 <= top + i < height and 0 <= left + j < width:
                                        a = corner + start + (i * width + j) * channels
                                        for c in range(segment):
                                            lanes[2 * i + j, 0] += kept[of_row + c] * maps[a + c]
                        for i in range(2):
                            for j in range(2):
                                if inside or (0 <= top + i < height and 0 <= left + j < width):
                                    product = none
                                    for c in range(LANES):
                                        product += lanes[2 * i + j, c]
                                    wy, wx = (fy if i else one - fy), (fx if j else one - fx)
                                    along_mask += wy * wx * product
                                    along_y += (wx if i else -wx) * product
                                    along_x += (wy if j else -wy) * product
                        along_y, along_x = along_y * factor, along_x * factor
                    place = (image * offset_groups + group) * taps + tap
                    grad_moved[2 * place * pixels + first + r] = along_y
                    grad_moved[(2 * place + 1) * pixels + first + r] = along_x
                    if len(masks) > 0:
                        grad_masks[place * pixels + first + r] = along_mask


@inline
def _dot_products(left, at, maps, corner, channels, width, count, lanes):
    """lanes[i] += left[at:] * maps[corner i:], over `count` channels, for the four pixels at and around `corner`."""
    whole = count // LANES * LANES
    corners = corner, corner + channels, corner + width * channels, corner + (width + 1) * channels
    add_dot_products(lanes, left, at, maps, corners, whole)
    for i in range(4):
        for c in range(whole, count):
            lanes[i, c - whole] += left[at + c] * maps[corners[i] + c]


@jit
def _maps_gradient(begin, end, before, count, moved, masks, kept, padded, plan, grad_maps):
    """Of channels [begin, end) * LANES: what `count` blocks behind those `before` add to the gradient of the map."""
    channels, height, width, out_height, out_width, rows, columns, groups, _, segment = plan[:10]
    pixels, taps, own = out_height * out_width, rows * columns, channels // groups
    blocks, one = (pixels + BLOCK - 1) // BLOCK, grad_maps.dtype.type(1)
    low, high = begin * LANES, min(end * LANES, channels)
    below, right = np.uint64(width * channels), np.uint64(channels)
    for block in range(count):
        image, first = (before + block) // blocks, (before + block) % blocks * BLOCK
        for tap in range(taps):
            at = (block * taps + tap) * groups * BLOCK * padded
            for start in range(low // segment * segment, high, segment):
                here, behind = max(start, low), min(start + segment, high)
                group, wide = start // (channels // plan[8]), np.uint64(behind - here)
                for r in range(min(BLOCK, pixels - first)):
                    top, left, fy, fx, factor = _sample(moved, masks, plan, image, first + r, tap, group)
                    if left == -2:
                        continue
                    source = np.uint64(at + (here // own * BLOCK + r) * padded + here % own)
                    a = np.uint64(((image * height + top) * width + left) * channels + here)
                    for i in range(2):
                        for j in range(2):
                            if 0 <= top + i < height and 0 <= left + j < width:
                                w = (fy if i else one - fy) * (fx if j else one - fx) * factor
                                corner = a + np.uint64(i) * below + np.uint64(j) * right
                                for c in range(wide):
                                    grad_maps[corner + c] += w * kept[source + c]


@jit
def _weight_gradient(begin, end, maps, moved, masks, given, plan, total):
    """Pieces [begin, end) of the gradient [N, taps, C / groups]: of one tap and up to WIDE channels of a segment."""
    channels, _, _, out_height, out_width, rows, columns, groups, _, segment = plan[:10]
    pixels, taps, own, outputs = out_height * out_width, rows * columns, channels // groups, given.shape[2]
    pieces = (segment + WIDE - 1) // WIDE
    each = channels // segment * pieces
    read, sums = np.zeros((BLOCK, WIDE), maps.dtype), np.empty((outputs, WIDE), maps.dtype)
    in_order = np.arange(BLOCK).astype(np.int32)
    for piece in range(begin, end):
        tap = piece // each
        start = piece % each // pieces * segment + piece % each % pieces * WIDE
        stop = min(start + WIDE, (start // segment + 1) * segment)
        read[:] = 0
        sums[:] = 0
        for row in range(0, given.shape[1], pixels):
            for first in range(0, pixels, BLOCK):
                count = min(BLOCK, pixels - first)
                image, flat = row // pixels, read.reshape(-1)
                _read(maps, moved, masks, plan, image, first, count, tap, start, stop, flat, 0, WIDE)
                left = given[start // own, row + first : row + first + count]
                for lane in range(0, stop - start, LANES):
                    for line in range(0, outputs, LINES):
                        if line + LINES <= outputs:
                            together = (line, line + 1, line + 2, line + 3, line + 4, line + 5, line + 6, line + 7)
                            add_outer_products(sums, together, lane, left, in_order, read, in_order, 0, count)
                        else:
                            for lone in range(line, outputs):
                                add_outer_products(sums, (lone,), lane, left, in_order, read, in_order, 0, count)
        for n in range(outputs):
            to = ((start // own * outputs + n) * taps + tap) * own + start % own
            total[to : to + stop - start] = sums[n, : stop - start]
