"""gather_points on CPU: planes of points element by element, rows of channels as a whole.

The backward walks the indices in order, and threads share planes or channels, so that no two add to one place.
"""

import numpy as np
import torch

from triops._clouds import check_indices
from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages
from triops._cpu.threads import run

ELEMENTS = 100_000  # worth a thread
CHANNELS = 16  # of a row that a thread takes at least, in the backward


def gather_points(features, indices, channels_last):
    batch, places = indices.shape
    index = _checked("gather_points", indices, features.shape[1 if channels_last else 2])
    channels = features.shape[2 if channels_last else 1]
    out = torch.empty((batch, places, channels) if channels_last else (batch, channels, places), dtype=features.dtype)
    in_huge_pages(out)
    bits = f"i{features.element_size()}"  # elements are moved, whatever they mean
    source, target = as_bits(features).view(bits), as_bits(out).view(bits)
    if channels_last:
        run(_gather_rows, batch * places, max(1, ELEMENTS // max(channels, 1)), source, index, target)
    else:
        run(_gather_planes, batch * channels, max(1, ELEMENTS // max(places, 1)), source, index, target)
    return out


def gather_points_backward(grad_output, indices, count, channels_last):
    batch, places = indices.shape
    index = _checked("gather_points_backward", indices, count)
    channels = grad_output.shape[2 if channels_last else 1]
    shape = (batch, count, channels) if channels_last else (batch, channels, count)
    out = torch.empty(shape, dtype=grad_output.dtype)
    in_huge_pages(out)
    total = np.zeros(1, np.float64 if grad_output.dtype == torch.float64 else np.float32)
    if channels_last:
        parts = max(1, min(torch.get_num_threads(), channels // CHANNELS, grad_output.numel() // ELEMENTS))
        run(_add_rows, parts, 1, parts, as_bits(grad_output), index, total, as_bits(out))
    else:
        grain = max(1, ELEMENTS // max(places, count, 1))
        run(_add_planes, batch * channels, grain, as_bits(grad_output), index, total, as_bits(out))
    return out


def _checked(operator, indices, count):
    check_indices(operator, indices, count)
    return as_numpy(indices.int())


@jit
def _gather_planes(begin, end, source, index, target):
    channels, places = target.shape[1:]
    for plane in range(begin, end):
        b, c = plane // channels, plane % channels
        for m in range(places):
            i = index[b, m]
            target[b, c, m] = source[b, c, np.uint32(i)] if i >= 0 else 0


@jit
def _gather_rows(begin, end, source, index, target):
    places, channels = target.shape[1:]
    for place in range(begin, end):
        b, m = place // places, place % places
        i = index[b, m]
        if i >= 0:
            for c in range(channels):
                target[b, m, c] = source[b, i, c]
        else:
            target[b, m, :] = 0


@jit
def _add_planes(begin, end, grad, index, zero, target):
    channels, count = target.shape[1:]
    total = np.empty(count, zero.dtype)
    for plane in range(begin, end):
        b, c = plane // channels, plane % channels
        total[:] = 0
        for m in range(index.shape[1]):
            i = index[b, m]
            if i >= 0:
                total[i] += widen(grad[b, c, m])
        for i in range(count):
            target[b, c, i] = narrow(total[i], target)


@jit
def _add_rows(begin, end, parts, grad, index, zero, target):
    """Part p of all channels, of every place."""
    count, channels = target.shape[1:]
    for part in range(begin, end):
        first, last = channels * part // parts, channels * (part + 1) // parts
        total = np.empty((count, last - first), zero.dtype)
        for b in range(target.shape[0]):
            total[:] = 0
            for m in range(index.shape[1]):
                i = index[b, m]
                if i >= 0:
                    for c in range(last - first):
                        total[i, c] += widen(grad[b, m, first + c])
            for i in range(count):
                for c in range(last - first):
                    target[b, i, first + c] = narrow(total[i, c], target)
