"""Overlaps of the objects and detections of each frame: in the image, from above and in space.

Only pairs that overlap by more than a threshold are kept: a pair that does not can never be matched. All frames go to
the operators together, as one list of pairs, a few million at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import triops
from triops.data.kitti_labels import Floats
from triops.evaluate.sources import Ints, Objects

KINDS = ("2D", "BEV", "3D")
PAIRS_AT_ONCE = 2_000_000  # some 200 MB


class Candidates(NamedTuple):
    """Detections that overlap objects, of each kind, object by object.

    Those of object `g` for kind `k` are entries `starts[k, g]` to `starts[k, g + 1]` of the others, in the order of the
    detections.
    """

    starts: Ints
    detection: Ints
    overlap: Floats


def candidates(truth: Objects, found: Objects, above: tuple[float, float, float], device: str) -> Candidates:
    """The pairs whose overlap of each kind is larger than `above`."""
    kept: list[list[tuple[Ints, Ints, Floats]]] = [[] for _ in KINDS]
    for i, j in pairs(truth, found):
        with np.errstate(over="ignore", invalid="ignore"):  # boxes beyond all measure overlap nothing
            overlaps = _overlaps(truth, found, i, j, device)
        for kind, (rows, columns, overlap) in enumerate(overlaps):
            large = overlap > above[kind]
            kept[kind].append((rows[large], columns[large], overlap[large]))
    starts, begin = np.zeros((len(KINDS), len(truth.name) + 1), np.int64), 0
    for kind, parts in enumerate(kept):
        counts = np.zeros(len(truth.name), np.int64)
        for rows, _, _ in parts:
            counts += np.bincount(rows, minlength=len(counts))
        starts[kind, 0] = begin
        starts[kind, 1:] = begin + np.cumsum(counts)
        begin = int(starts[kind, -1])
    detections = [part[1] for parts in kept for part in parts]
    values = [part[2] for parts in kept for part in parts]
    return Candidates(
        starts, np.concatenate(detections) if detections else np.zeros(0, np.int64),
        np.concatenate(values) if values else np.zeros(0),
    )  # fmt: skip


def pairs(truth: Objects, found: Objects) -> Iterator[tuple[Ints, Ints]]:
    """Every object with every detection of its frame: rows of `truth` and `found`, in order, in parts."""
    per_object = np.diff(found.offsets)[truth.frame_of()]
    ends = np.cumsum(per_object)
    first_detection = found.offsets[:-1][truth.frame_of()]
    begin = 0
    while begin < len(per_object):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + PAIRS_AT_ONCE, "right")))
        counts = per_object[begin:end]
        rows = np.repeat(np.arange(begin, end), counts)
        shift = first_detection[begin:end] - (ends[begin:end] - counts - done)
        yield rows, np.arange(len(rows)) + np.repeat(shift, counts)
        begin = end


def _overlaps(
    truth: Objects, found: Objects, i: Ints, j: Ints, device: str
) -> list[tuple[Ints, Ints, Floats]]:  # fmt: skip
    rows, columns = _meet_in_image(truth.bbox, found.bbox, i, j)
    image = triops.bbox_overlaps(_tensor(truth.bbox[rows], device), _tensor(found.bbox[columns], device), aligned=True)
    near = _near_from_above(truth, found, i, j)
    a, b = i[near], j[near]
    first, second = rectangles(truth)[a], rectangles(found)[b]
    shared = _array(
        triops.box_iou_rotated(
            _tensor(first, device), _tensor(second, device), "area", aligned=True, clockwise=False
        )
    )  # fmt: skip
    area_a, area_b = first[:, 2] * first[:, 3], second[:, 2] * second[:, 3]
    above = _ratio(shared, area_a + area_b - shared)
    # y points down, and a location is the middle of the bottom
    bottom_a, bottom_b = truth.location[a, 1], found.location[b, 1]
    height_a, height_b = truth.dimensions[a, 1], found.dimensions[b, 1]
    common = np.minimum(bottom_a, bottom_b) - np.maximum(bottom_a - height_a, bottom_b - height_b)
    volume = shared * np.maximum(common, 0)
    space = _ratio(volume, area_a * height_a + area_b * height_b - volume)
    return [(rows, columns, _array(image)), (a, b, above), (a, b, space)]


def covered_by_dont_care(truth: Objects, found: Objects, device: str) -> Floats:
    """For each detection the largest share of its image box that lies in one region of the frame marked DontCare."""
    regions = truth.name == "dontcare"
    frames = truth.frame_of()[regions]
    counts = np.bincount(frames, minlength=len(truth.offsets) - 1)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    only = truth._replace(offsets=offsets, name=truth.name[regions], bbox=truth.bbox[regions])
    share = np.zeros(len(found.name))
    for i, j in pairs(only, found):
        rows, columns = _meet_in_image(only.bbox, found.bbox, i, j)
        covered = triops.bbox_overlaps(
            _tensor(found.bbox[columns], device), _tensor(only.bbox[rows], device), mode="iof", aligned=True
        )
        np.maximum.at(share, columns, _array(covered))
    return share


def rectangles(objects: Objects) -> Floats:
    """x, z, length, width and rotation_y of each object [N, 5], seen from above."""
    return np.column_stack([objects.location[:, [0, 2]], objects.dimensions[:, [0, 2]], objects.rotation_y])


def _meet_in_image(a: Floats, b: Floats, i: Ints, j: Ints) -> tuple[Ints, Ints]:
    """The pairs whose boxes share any part of the image."""
    meet = (a[i, 0] < b[j, 2]) & (b[j, 0] < a[i, 2]) & (a[i, 1] < b[j, 3]) & (b[j, 1] < a[i, 3])
    return i[meet], j[meet]


def _near_from_above(truth: Objects, found: Objects, i: Ints, j: Ints) -> npt.NDArray[np.bool_]:
    """Pairs whose circumscribed circles meet."""
    reach_a = np.hypot(truth.dimensions[:, 0], truth.dimensions[:, 2]) / 2
    reach_b = np.hypot(found.dimensions[:, 0], found.dimensions[:, 2]) / 2
    reach = reach_a[i] + reach_b[j]
    apart_x = np.abs(truth.location[i, 0] - found.location[j, 0])
    apart_z = np.abs(truth.location[i, 2] - found.location[j, 2])
    near: npt.NDArray[np.bool_] = (apart_x < reach) & (apart_z < reach)
    return near


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(part), where=part > 0)


def _tensor(array: Floats, device: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _array(tensor: torch.Tensor) -> Floats:
    return tensor.cpu().numpy()
