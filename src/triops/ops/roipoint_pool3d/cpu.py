"""roipoint_pool3d on CPU: each box tests the points within its bounds in order, until it has enough."""

import numpy as np
import torch

from triops._cpu.half import as_bits
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy, in_huge_pages
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._geometry.box.cpu import bounds, frames, inside

TESTS = 100_000  # points times boxes worth a thread


def roipoint_pool3d(points, features, boxes, count, z_origin, margin):
    batch, length, channels = features.shape
    number, real = boxes.shape[1], compute_dtype(points.dtype)
    indices = torch.empty((batch, number, count), dtype=torch.int32)
    pooled = torch.empty((batch, number, count, 3 + channels), dtype=features.dtype)
    in_huge_pages(pooled)
    place = as_numpy(points, real)
    box = as_numpy(boxes.to(real).reshape(batch * number, 7))
    bits = f"i{features.element_size()}"  # elements are moved, whatever they mean
    moved = (as_bits(t).view(bits) for t in (points.to(features.dtype), features, pooled))
    grain = max(1, TESTS // max(length + count * channels, 1))
    run(_pool, batch * number, grain, place, box, z_origin == "bottom", margin, *moved, indices.numpy())
    return pooled, indices


@jit
def _pool(begin, end, place, boxes, bottom, margin, points, features, pooled, indices):
    number, count = indices.shape[1:]
    frame = frames(boxes[begin:end], bottom, margin)
    for box in range(begin, end):
        b, m = box // number, box % number
        low_x, high_x, low_y, high_y, _, _ = bounds(frame[box - begin])
        found = 0
        for i in range(place.shape[1]):
            x, y = place[b, i, 0], place[b, i, 1]
            if (
                (x >= low_x) & (x <= high_x) & (y >= low_y) & (y <= high_y)
                and found < count
                and inside(x, y, place[b, i, 2], frame[box - begin])
            ):
                indices[b, m, found] = i
                found += 1
        if found == 0:
            indices[b, m, :] = -1
            pooled[b, m] = 0
        for k in range(count if found else 0):
            i = indices[b, m, np.uint32(k) % np.uint32(found)]
            indices[b, m, k] = i
            for d in range(3):
                pooled[b, m, k, d] = points[b, i, d]
            for c in range(features.shape[2]):
                pooled[b, m, k, 3 + c] = features[b, i, c]
