"""three_interpolate on CPU: planes of points element by element, rows of channels in vectors.

The backward walks the places in order, and threads share planes, channels or places, so that no two add to one number.
"""

import torch

from triops._clouds import check_indices
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages, zeros
from triops._cpu.threads import run
from triops._dtypes import compute_dtype

ELEMENTS = 50_000  # worth a thread
CHANNELS = 16  # of a row that a thread takes at least, in the backward


def three_interpolate(features, indices, weights, channels_last):
    batch, places, _ = indices.shape
    check_indices("three_interpolate", indices, features.shape[1 if channels_last else 2])
    source, index, weight = _as_arrays(features, indices, weights)
    channels = features.shape[2 if channels_last else 1]
    shape = (batch, places, channels) if channels_last else (batch, channels, places)
    out = torch.empty(shape, dtype=compute_dtype(features.dtype))
    in_huge_pages(out)
    if channels_last:
        grain = max(1, ELEMENTS // max(channels, 1))
        run(_interpolate_rows, batch * places, grain, source, index, weight, out.numpy())
    else:
        grain = max(1, ELEMENTS // max(places, 1))
        run(_interpolate_planes, batch * channels, grain, source, index, weight, out.numpy())
    return out.to(features.dtype)


def three_interpolate_backward(grad_output, features, indices, weights, channels_last, of_weights):
    batch, places, _ = indices.shape
    check_indices("three_interpolate_backward", indices, features.shape[1 if channels_last else 2])
    real, channels = compute_dtype(features.dtype), features.shape[2 if channels_last else 1]
    grad, index, weight = _as_arrays(grad_output, indices, weights)
    sums = zeros(*features.shape, dtype=real)
    if channels_last:
        parts = max(1, min(torch.get_num_threads(), channels // CHANNELS, grad_output.numel() // ELEMENTS))
        run(_add_rows, parts, 1, parts, grad, index, weight, sums.numpy())
    else:
        grain = max(1, ELEMENTS // max(places, 1))
        run(_add_planes, batch * channels, grain, grad, index, weight, sums.numpy())
    grad_weights = weights.new_empty(0)
    if of_weights:
        products = zeros(*weights.shape, dtype=real)
        rows = (t if channels_last else t.mT for t in (features, grad_output))  # copied where they lie in planes
        source, grad = (as_numpy(t, real) for t in rows)
        run(_multiply, batch * places, max(1, ELEMENTS // max(channels, 1)), source, grad, index, products.numpy())
        grad_weights = products.to(weights.dtype)
    return sums.to(features.dtype), grad_weights


def _as_arrays(features, indices, weights):
    """In the dtype that is computed in; indices int32."""
    real = compute_dtype(features.dtype)
    return as_numpy(features, real), as_numpy(indices.int()), as_numpy(weights, real)


@jit
def _interpolate_planes(begin, end, source, index, weight, out):
    channels, places = out.shape[1:]
    for plane in range(begin, end):
        b, c = plane // channels, plane % channels
        for n in range(places):
            total = weight.dtype.type(0)
            for k in range(index.shape[2]):
                i = index[b, n, k]
                if i >= 0:
                    total += weight[b, n, k] * source[b, c, i]
            out[b, c, n] = total


@jit
def _interpolate_rows(begin, end, source, index, weight, out):
    places, channels = out.shape[1:]
    for place in range(begin, end):
        b, n = place // places, place % places
        out[b, n, :] = 0
        for k in range(index.shape[2]):
            i, w = index[b, n, k], weight[b, n, k]
            if i >= 0:
                for c in range(channels):
                    out[b, n, c] += w * source[b, i, c]


@jit
def _add_planes(begin, end, grad, index, weight, sums):
    channels = sums.shape[1]
    for plane in range(begin, end):
        b, c = plane // channels, plane % channels
        for n in range(index.shape[1]):
            for k in range(index.shape[2]):
                i = index[b, n, k]
                if i >= 0:
                    sums[b, c, i] += weight[b, n, k] * grad[b, c, n]


@jit
def _add_rows(begin, end, parts, grad, index, weight, sums):
    """Part p of all channels, of every place."""
    channels = sums.shape[2]
    for part in range(begin, end):
        first, last = channels * part // parts, channels * (part + 1) // parts
        for b in range(index.shape[0]):
            for n in range(index.shape[1]):
                for k in range(index.shape[2]):
                    i, w = index[b, n, k], weight[b, n, k]
                    if i >= 0:
                        for c in range(first, last):
                            sums[b, i, c] += w * grad[b, n, c]


@jit
def _multiply(begin, end, source, grad, index, products):
    places = index.shape[1]
    for place in range(begin, end):
        b, n = place // places, place % places
        for k in range(index.shape[2]):
            i = index[b, n, k]
            if i >= 0:
                total = products.dtype.type(0)
                for c in range(source.shape[2]):
                    total += source[b, i, c] * grad[b, n, c]
                products[b, n, k] = total
