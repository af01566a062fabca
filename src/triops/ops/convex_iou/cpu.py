"""convex_iou on CPU: hulls once per set of points, then the pairs whose bounding boxes overlap."""

import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._cpu.threads import run
from triops._dtypes import compute_dtype
from triops._geometry.polygon.cpu import make_polygons, overlap

GRAIN = 2_000  # pairs worth a thread


def convex_iou(pointsets, polygons, mode, aligned):
    shape = (len(pointsets),) if aligned else (len(pointsets), len(polygons))
    out = torch.empty(shape, dtype=compute_dtype(pointsets.dtype))
    if out.numel():
        columns = 1 if aligned else shape[1]
        operands = make_polygons(pointsets), make_polygons(polygons), mode == "iou", aligned
        run(_overlaps, shape[0], max(1, GRAIN // columns), *operands, as_numpy(out.view(shape[0], columns)))
    return out.to(pointsets.dtype)


@jit
def _overlaps(begin, end, first, second, over_union, aligned, out):
    for i in range(begin, end):
        for j in range(out.shape[1]):
            out[i, j] = overlap(first[i], second[i if aligned else j], over_union)
