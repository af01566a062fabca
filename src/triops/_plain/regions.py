"""Labelled regions of an image that grow over a mask: how text detectors tell words apart. On CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from triops import _op

Array = np.ndarray[Any, Any]


def expand_regions(labels: Tensor, mask: Tensor, least_area: int) -> Array:
    """Labels int32 [H, W], from 1 on, spread over a mask [H, W] by steps to the four neighbors -> int32 [H, W].

    A pixel goes to the label that reaches it first, of several to the one that comes first in the image. Labels of
    fewer than `least_area` pixels are dropped.
    """
    seeds = _array(labels, np.int32)
    area = np.bincount(seeds.ravel(), minlength=1)
    area[0] = 0
    grown = np.where(area[seeds] >= max(least_area, 1), seeds, 0).astype(np.int32)
    nothing = np.zeros((*grown.shape, 0), np.float32), np.zeros((len(area), 0), np.float32)
    _grow(grown, _array(mask, np.bool_), *nothing, np.float32(1), grown > 0)
    return grown


def group_pixels(
    score: Tensor, mask: Tensor, features: Tensor, labels: Tensor, contour: Tensor, regions: int, distance: float
) -> list[list[float]]:
    """Labels int32 [H, W] spread from their contours over a mask, to pixels with features [H, W, F] like theirs.

    -> per label from 0 to regions - 1 the mean score, the number of pixels, and x and y of each, row by row. A pixel
    is like a label where its features are nearer than `distance` to the mean of those that had the label at first.
    """
    grown, vectors, values = _array(labels, np.int32), _array(features, np.float32), _array(score, np.float32)
    inside = grown > 0
    means, count = np.zeros((regions, vectors.shape[2]), np.float32), np.zeros(regions, np.float32)
    np.add.at(means, grown[inside], vectors[inside])
    np.add.at(count, grown[inside], np.float32(1))
    means /= np.maximum(count, 1)[:, None]
    limit = np.float32(distance) * np.float32(distance)
    _grow(grown, _array(mask, np.bool_), vectors, means, limit, inside & _array(contour, np.bool_))

    y, x = np.nonzero(grown > 0)
    own = grown[y, x]
    total, pixels = np.zeros(regions, np.float32), np.bincount(own, minlength=regions)
    np.add.at(total, own, values[y, x])
    mean = total / np.maximum(pixels, 1).astype(np.float32)
    places = np.stack([x, y], 1)[np.argsort(own, kind="stable")].astype(np.float32)
    parts = np.split(places, np.cumsum(pixels)[:-1])
    return [[float(mean[i]), float(pixels[i]), *part.ravel().tolist()] for i, part in enumerate(parts)]


def _array(tensor: Tensor, dtype: Any) -> Array:
    return np.array(tensor.detach().cpu().numpy(), dtype, order="C")  # a copy, which may be written to


def _grow(labels: Array, mask: Array, features: Array, means: Array, limit: np.float32, seeds: Array) -> None:
    search = spread
    reason = _op.why_unusable("cpu")
    if reason:
        _op.warn_unusable("cpu", reason)
    else:
        from triops._plain import cpu

        search = cpu.spread

    first = np.flatnonzero(seeds)
    queue = np.empty(labels.size, np.int64)
    queue[: len(first)] = first
    search(labels, mask, features, means, limit, queue, len(first))


def spread(
    labels: Array, mask: Array, features: Array, means: Array, limit: np.float32, queue: Array, count: int
) -> None:
    """Labels [H, W] spread from the `count` pixels in the queue, first come, first served, over the mask.

    A pixel is taken while its features [H, W, F] are nearer to the mean [L, F] of the label than the root of `limit`.
    queue [H * W] holds flat pixels, and ends up with all that were taken. `_plain.cpu` compiles it.
    """
    height, width = labels.shape
    done = 0
    while done < count:
        y, x = queue[done] // width, queue[done] % width
        done += 1
        label = labels[y, x]
        for dy, dx in ((0, -1), (0, 1), (-1, 0), (1, 0)):
            row, column = y + dy, x + dx
            if row < 0 or row >= height or column < 0 or column >= width:
                continue
            if not mask[row, column] or labels[row, column] > 0:
                continue
            distance = np.float32(0)
            for f in range(features.shape[2]):  # each term is rounded to float32, as mmcv does
                part = np.float64(means[label, f] - features[row, column, f])
                distance = np.float32(np.float64(distance) + part * part)
            if distance >= limit:
                continue
            labels[row, column] = label
            queue[count] = row * width + column
            count += 1
