"""Labelled regions of an image that grow over a mask: how text detectors tell words apart. On CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

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
    from triops._plain import cpu

    first = np.flatnonzero(seeds)
    queue = np.empty(labels.size, np.int64)
    queue[: len(first)] = first
    cpu.grow(labels, mask, features, means, limit, queue, len(first))
