"""nms, nms_rotated, nms_quadri and soft_nms on CPU: one pass a kept box over all that follow it, in vector code."""

import math

import numpy as np
import torch

from triops._cpu.half import as_bits, widen
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._cpu.sort import radix_sort_between
from triops._geometry.polygon.cpu import make_polygons
from triops._geometry.polygon.cpu import overlap as polygon_overlap
from triops._geometry.rectangle.cpu import AREA, X1, X2, Y1, Y2, overlap, split, split_rows
from triops._geometry.rotated.cpu import IOU, TILE, find_near, make_frames, overlaps, pack, polygon_overlaps
from triops.ops.nms.reference import EXP_TERMS, METHODS, by_score

_EXP_TERMS = np.array(EXP_TERMS)


def nms(boxes, scores, labels, iou_threshold, offset):
    total = boxes.shape[0]
    real = np.float64 if boxes.dtype == torch.float64 else np.float32
    fields, kept = np.empty((7, total), real), np.empty(total, np.int64)
    order = _by_score(scores)
    places, bounds = order, None
    if labels is not None:
        # each label's boxes side by side, still in order of the scores: no box meets one of another label
        labels, at = labels[torch.from_numpy(order)].sort(stable=True)
        counts = labels.unique_consecutive(return_counts=True)[1]
        bounds = np.concatenate([np.zeros(1, np.int64), as_numpy(counts.cumsum(0))])
        places = order[as_numpy(at)]
    count = _suppress(as_bits(boxes), places, bounds, real(offset), real(iou_threshold), fields, kept)
    if labels is None:
        return torch.from_numpy(kept[:count].copy())
    keep = np.zeros(total, np.bool_)
    keep[kept[:count]] = True
    return torch.from_numpy(order[keep[order]])


def _by_score(scores):
    """As `by_score`, as an array."""
    if scores.dtype == torch.float64:
        return as_numpy(by_score(scores))
    order = np.empty(scores.shape[0], np.int64)
    _sort_scores(as_bits(scores), order)
    return order


def nms_rotated(boxes, scores, labels, iou_threshold, clockwise, margin):
    order = by_score(scores)
    frame = make_frames(boxes[order], clockwise, margin)
    groups = np.zeros(0, np.int64) if labels is None else as_numpy(labels.long()[order])
    keep = torch.empty(len(order), dtype=torch.bool)
    _suppress_rotated(frame, groups, margin, frame.dtype.type(iou_threshold), keep.numpy())
    return order[keep]


def nms_quadri(boxes, scores, labels, iou_threshold):
    order = by_score(scores)
    polygons = make_polygons(boxes[order])
    groups = np.zeros(0, np.int64) if labels is None else as_numpy(labels.long()[order])
    keep = torch.empty(len(order), dtype=torch.bool)
    _suppress_polygons(polygons, groups, polygons.dtype.type(iou_threshold), keep.numpy())
    return order[keep]


def soft_nms(boxes, scores, iou_threshold, sigma, min_score, method, offset):
    fields = _fields(boxes, offset)
    real = fields.dtype.type
    current = as_numpy(scores.to(torch.float64 if real is np.float64 else torch.float32).clone())
    chosen = torch.empty(len(current), dtype=torch.int64)
    lowered = np.empty_like(current)
    count = _soften(
        fields, current, real(offset), real(iou_threshold), -float(sigma), real(min_score), METHODS.index(method),
        chosen.numpy(), lowered,
    )  # fmt: skip
    return chosen[:count].clone(), torch.from_numpy(lowered[:count]).to(scores.dtype).clone()


def _fields(boxes, offset):
    """x1, y1, x2, y2, width, height, area [7, N]: float64 for float64, else float32."""
    real = np.float64 if boxes.dtype == torch.float64 else np.float32
    fields = np.empty((7, boxes.shape[0]), real)
    split(as_bits(boxes), 0, boxes.shape[0], real(offset), fields)
    return fields


@jit
def _sort_scores(scores, order):
    """Indices from the highest to the lowest score, equal ones as they come and NaN first, as torch sorts."""
    keys = np.empty(len(order), np.int64)
    for i in range(len(order)):
        score = widen(scores[i]) + np.float32(0)  # -0 becomes 0
        bits = np.int64(np.float32(score).view(np.int32))
        ascending = bits if bits >= 0 else np.int64(-(2**31)) - bits  # of a sign and a magnitude
        keys[i] = np.int64(2**31 - 1) - ascending if score == score else 0
        order[i] = i
    rows = order.copy()
    if radix_sort_between(keys, rows, np.empty_like(keys), order):
        return
    order[:] = rows


@jit
def _mark(fields, i, stop, offset, threshold, dropped):
    """Which boxes behind box i it drops -> the number of those that are dropped by now."""
    x1, y1, x2, y2, area = fields[X1, i], fields[Y1, i], fields[X2, i], fields[Y2, i], fields[AREA, i]
    first = i + 1
    a, b, c = fields[X1, first:stop], fields[Y1, first:stop], fields[X2, first:stop]
    d, e = fields[Y2, first:stop], fields[AREA, first:stop]
    for j in range(np.uint64(len(a))):
        iou = overlap(x1, y1, x2, y2, area, a[j], b[j], c[j], d[j], e[j], False, offset)
        dropped[j] |= iou > threshold
    count = np.uint32(0)
    for j in range(np.uint64(len(a))):
        count += np.uint32(dropped[j])
    return np.int64(count)


@jit
def _close_up(fields, places, first, stop, dropped):
    """Move the boxes from `first` on that are not dropped to the front -> where they end."""
    to = first
    for j in range(first, stop):
        if dropped[j] == 0:
            for field in (X1, Y1, X2, Y2, AREA):
                fields[field, to] = fields[field, j]
            places[to] = places[j]
            to += 1
    dropped[first:to] = 0
    return to


@jit
def _suppress(boxes, order, bounds, offset, threshold, fields, kept):
    """Indices of the boxes that stay, of groups from one of `bounds` to the next, each in order of the scores.

    -> their number
    """
    total, count = len(order), np.int64(0)
    places, dropped = order.copy(), np.zeros(total, np.uint8)
    split_rows(boxes, places, offset, fields)
    groups = 1 if bounds is None else len(bounds) - 1
    for group in range(groups):
        i, stop = (np.int64(0), total) if bounds is None else (bounds[group], bounds[group + 1])
        while i < stop:
            if dropped[i] == 0:
                kept[count] = places[i]
                count += 1
                gone = _mark(fields, i, stop, offset, threshold, dropped[i + 1 : stop])
                if 2 * gone > stop - i:
                    stop = _close_up(fields, places, i + 1, stop, dropped)
            i += 1
    return count


@jit
def _suppress_rotated(frame, groups, margin, threshold, keep):
    count = len(keep)
    dropped = np.zeros(count, np.uint8)
    flags = np.zeros(TILE, np.uint8)
    words = flags.view(np.uint64)
    found = np.empty(TILE + 1, np.uint64)
    packed = np.empty((9, TILE), frame.dtype)
    values = np.empty(TILE, frame.dtype)
    for i in range(count):
        keep[i] = dropped[i] == 0
        if not keep[i]:
            continue
        for start in range(i + 1, count, TILE):
            stop = min(start + TILE, count)
            find_near(frame, i, frame, start, stop, flags)
            for j in range(np.uint64(stop - start)):
                flags[j] &= dropped[np.uint64(start) + j] ^ np.uint8(1)
            if len(groups) > 0:
                for j in range(np.uint64(stop - start)):
                    flags[j] &= groups[np.uint64(start) + j] == groups[i]
            near = pack(flags, words, stop - start, frame, start, found, packed)
            if margin == 0:
                overlaps(frame, i, packed, near, IOU, values)
            else:
                polygon_overlaps(frame, i, packed, near, IOU, margin, values)
            for k in range(near):
                dropped[np.uint64(start) + found[k]] = values[k] > threshold


@jit
def _suppress_polygons(polygons, groups, threshold, keep):
    keep[:] = True
    for i in range(len(keep)):
        if keep[i]:
            for j in range(i + 1, len(keep)):
                if keep[j] and (len(groups) == 0 or groups[i] == groups[j]):
                    keep[j] = not polygon_overlap(polygons[i], polygons[j], True) > threshold


@jit
def _exp(x):
    x = x if x > -700.0 else -700.0
    n = np.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10
    result = _EXP_TERMS[0]
    for k in range(1, len(_EXP_TERMS)):
        result = result * r + _EXP_TERMS[k]
    return math.ldexp(result, np.int32(n))


@jit
def _overlaps_of(fields, place, count, offset, out):
    """Overlaps of the box at `place` with the first `count` boxes."""
    x1, y1, x2, y2 = fields[X1, place], fields[Y1, place], fields[X2, place], fields[Y2, place]
    area = fields[AREA, place]
    a, b, c, d, e = fields[X1], fields[Y1], fields[X2], fields[Y2], fields[AREA]
    for j in range(np.uint64(count)):
        out[j] = overlap(x1, y1, x2, y2, area, a[j], b[j], c[j], d[j], e[j], False, offset)


@jit
def _soften(fields, current, offset, threshold, negative_sigma, least, method, chosen, lowered):
    """Boxes that wait stand together at the front, in their order, so of equal scores the first is found first."""
    real = fields.dtype.type
    zero, one, lowest = real(0), real(1), real(-np.inf)
    x1, y1, x2, y2, area = fields[X1], fields[Y1], fields[X2], fields[Y2], fields[AREA]
    index = np.arange(len(current))
    ious = np.zeros(len(current), fields.dtype)
    waiting, best, count = len(current), len(current), 0
    starting = True
    while waiting > 0:
        left, next_best, best_score = 0, 0, lowest
        for k in range(waiting):
            iou, score = ious[k], current[k]
            if method == 2:
                if iou > zero:  # without an overlap the weight is 1
                    score *= real(_exp((float(iou) * float(iou)) / negative_sigma))
            elif (iou >= threshold) & (not starting):
                score *= one - iou if method == 1 else zero
            if (k != best) & (score > lowest if starting else score >= least):
                current[left], index[left] = score, index[k]
                x1[left], y1[left], x2[left], y2[left], area[left] = x1[k], y1[k], x2[k], y2[k], area[k]
                if score > best_score:
                    next_best, best_score = left, score
                left += 1
        waiting, best, starting = left, next_best, False
        if waiting > 0:
            chosen[count], lowered[count] = index[best], current[best]
            count += 1
            _overlaps_of(fields, best, waiting, offset, ious)
    return count
