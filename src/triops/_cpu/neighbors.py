"""The k nearest points of a query, or the k lowest indices in a ball around it, by a tree of bounding boxes.

Points are sorted along a space-filling curve. A node of level 0 holds 16 points in a row, one of level l + 1 the boxes
of 16 nodes of level l in a row. A box is as far from a query as its nearest corner, edge or face, computed by the same
operations as the distance to a point: rounding is monotone, so no point in the box is nearer, not by one bit, and the
answer is that of brute force.

One search serves both: it keeps the k smallest (key, index), and visits a node only where its key is not larger than
the worst of those. The key of a point is its squared distance, that of a box its distance; in a ball it is the index,
and the lowest index among the points of a box.

Queries are served along the curve, too: the next one is near, and its k-th neighbor not further than that of the last
and the step between them. Without this bound a search leaves a large box late, and visits more nodes in larger clouds.
"""

from typing import NamedTuple

import numpy as np

from triops._cpu.jit import inline, jit
from triops._cpu.sort import radix_sort
from triops._cpu.threads import run

LANES = 16
CURVE_BITS = 14  # per axis
GRAIN = 64  # queries worth a thread
MOST_LEVELS = 12


class Tree(NamedTuple):
    """The points of one cloud that are finite.

    points [nodes, 3, 16] and numbers [nodes, 16], their indices, are level 0; boxes [nodes, 6, 16] (lowest x y z,
    highest x y z) and lowest [nodes, 16], the lowest index in a box, the levels above, which begin at starts[level].
    """

    points: np.ndarray
    numbers: np.ndarray
    boxes: np.ndarray
    lowest: np.ndarray
    starts: np.ndarray
    top: int


def build(points, first_index):
    """The tree of points [N, 3], whose indices count from `first_index`."""
    count, real = len(points), points.dtype
    keys, rows = np.empty(count, np.int64), np.empty(count, np.int32)
    finite = _curve_keys(points, keys, rows)
    _, rows = radix_sort(keys, rows[:finite])
    sizes = [max(1, -(-finite // LANES))]
    while len(sizes) < 2 or sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // LANES))
    starts = np.cumsum([0, 0, *sizes[1:]])  # of level 1 on
    tree = Tree(
        np.empty((sizes[0], 3, LANES), real), np.empty((sizes[0], LANES), np.int32),
        np.empty((starts[-1], 6, LANES), real), np.empty((starts[-1], LANES), np.int32), starts, len(sizes) - 1,
    )  # fmt: skip
    _fill(points, rows, first_index, np.array(sizes), tree)
    return tree


def nearest(tree, queries, indices, distances):
    """Fill indices [M, k] int32 and squared distances [M, k] with the nearest of queries [M, 3], -1 and inf behind."""
    zero = queries.dtype.type(0)
    run(_search, len(queries), GRAIN, queries, _order(queries), tree, False, zero, zero, indices, distances)


def in_ball(tree, queries, near, far, indices):
    """Fill indices [M, k] int32 with the lowest whose squared distance d is 0 or `near <= d < far`, -1 behind."""
    none = np.empty((0, 0), queries.dtype)
    run(_search, len(queries), GRAIN, queries, _order(queries), tree, True, near, far, indices, none)


def _order(queries):
    """Rows along the curve; those that are not finite, last."""
    keys, rows = np.empty(len(queries), np.int64), np.arange(len(queries), dtype=np.int32)
    finite = _curve_keys(queries, keys, rows)
    if finite < len(queries):
        rows[finite:] = np.flatnonzero(~np.isfinite(queries).all(1))
    rows[:finite] = radix_sort(keys, rows[:finite])[1]
    return rows


@jit
def _curve_keys(points, keys, rows):
    """Keys along a curve that fills space, and rows, of the points that are finite. -> how many are"""
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    count = 0
    for i in range(points.shape[0]):
        if np.isfinite(points[i, 0]) and np.isfinite(points[i, 1]) and np.isfinite(points[i, 2]):
            rows[count] = i
            count += 1
            for axis in range(3):
                low[axis], high[axis] = min(low[axis], points[i, axis]), max(high[axis], points[i, axis])
    widest = 0.0
    for axis in range(3):
        widest = max(widest, high[axis] * 0.5 - low[axis] * 0.5)  # halves, since the whole may overflow
    scale = ((1 << CURVE_BITS) - 1) / widest if widest > 1e-290 else 0.0
    for j in range(count):
        key = np.int64(0)
        for axis in range(3):
            key |= _spread(np.int64((points[rows[j], axis] * 0.5 - low[axis] * 0.5) * scale)) << axis
        keys[j] = key
    return count


@jit
def _spread(x):
    """The bits of x at every third place."""
    x = (x | (x << 32)) & np.int64(0x1F00000000FFFF)
    x = (x | (x << 16)) & np.int64(0x1F0000FF0000FF)
    x = (x | (x << 8)) & np.int64(0x100F00F00F00F00F)
    x = (x | (x << 4)) & np.int64(0x10C30C30C30C30C3)
    return (x | (x << 2)) & np.int64(0x1249249249249249)


@jit
def _fill(points, rows, first_index, sizes, tree):
    real = points.dtype.type
    for j in range(sizes[0] * LANES):
        node, lane = j // LANES, j % LANES
        for axis in range(3):
            tree.points[node, axis, lane] = points[rows[j], axis] if j < rows.shape[0] else real(np.nan)
        tree.numbers[node, lane] = first_index + rows[j] if j < rows.shape[0] else -1
    for level in range(1, sizes.shape[0]):
        for j in range(sizes[level] * LANES):
            node, lane = tree.starts[level] + j // LANES, j % LANES
            for axis in range(3):
                tree.boxes[node, axis, lane], tree.boxes[node, 3 + axis, lane] = real(np.inf), real(-np.inf)
            lowest = np.int32(2147483647)
            if j < sizes[level - 1]:
                below = tree.starts[level - 1] + j
                for i in range(LANES):
                    index = tree.numbers[j, i] if level == 1 else tree.lowest[below, i]
                    if index < 0:
                        continue
                    lowest = min(lowest, index)
                    for axis in range(3):
                        low = tree.points[j, axis, i] if level == 1 else tree.boxes[below, axis, i]
                        high = tree.points[j, axis, i] if level == 1 else tree.boxes[below, 3 + axis, i]
                        tree.boxes[node, axis, lane] = min(tree.boxes[node, axis, lane], low)
                        tree.boxes[node, 3 + axis, lane] = max(tree.boxes[node, 3 + axis, lane], high)
            tree.lowest[node, lane] = lowest


@jit
def _box_distances(x, y, z, box, apart):
    zero = apart.dtype.type(0)
    for lane in range(LANES):
        dx = _outside(x, box[0, lane], box[3, lane], zero)
        dy = _outside(y, box[1, lane], box[4, lane], zero)
        dz = _outside(z, box[2, lane], box[5, lane], zero)
        apart[lane] = (dx * dx + dy * dy) + dz * dz


@inline
def _outside(value, low, high, zero):
    """How far a value lies outside of an interval."""
    below, above = low - value, value - high
    apart = below if below > above else above
    return apart if apart > zero else zero


@jit
def _point_distances(x, y, z, points, apart):
    for lane in range(LANES):
        dx = x - points[0, lane]
        dy = y - points[1, lane]
        dz = z - points[2, lane]
        apart[lane] = (dx * dx + dy * dy) + dz * dz


@jit
def _search(begin, end, queries, order, tree, ball, near, far, indices, distances):
    real = queries.dtype.type
    zero, k, infinity = real(0), indices.shape[1], np.inf
    waiting = np.empty((MOST_LEVELS, LANES), np.float64)  # keys of the children of a node per level
    nodes = np.empty(MOST_LEVELS, np.int64)
    apart, keys, found = np.empty(LANES, queries.dtype), np.full(k, np.inf), np.empty(k, np.int32)
    before, bound = order[begin] if begin < end else np.int32(0), infinity
    for place in range(begin, end):
        q = order[place]
        if not ball:
            bound, before = _bound(queries[before], queries[q], keys[k - 1]), q
        keys[:], found[:] = infinity, -1
        x, y, z = queries[q, 0], queries[q, 1], queries[q, 2]
        level, nodes[tree.top] = tree.top + 1, 0
        enter = searching = np.isfinite(x) and np.isfinite(y) and np.isfinite(z)
        while searching:
            if enter:
                level -= 1
                node = nodes[level]
                if level > 0:
                    at = tree.starts[level] + node
                    _box_distances(x, y, z, tree.boxes[at], apart)
                    if ball:
                        for lane in range(LANES):
                            inside = apart[lane] < far or apart[lane] == zero
                            waiting[level, lane] = tree.lowest[at, lane] if inside else infinity
                    else:
                        for lane in range(LANES):
                            waiting[level, lane] = apart[lane]
                else:
                    _point_distances(x, y, z, tree.points[node], apart)
                    for lane in range(LANES):
                        d, index = apart[lane], tree.numbers[node, lane]
                        if ball:
                            if d == zero or (d >= near and d < far):
                                _insert(np.float64(index), index, keys, found)
                        elif d < infinity and d <= keys[k - 1] and d <= bound:
                            _insert(np.float64(d), index, keys, found)
                    level = 1
            child, nearest = -1, infinity
            for lane in range(LANES):
                if waiting[level, lane] < nearest:
                    child, nearest = lane, waiting[level, lane]
            enter = child >= 0 and nearest <= keys[k - 1] and nearest <= bound
            if enter:
                waiting[level, child] = infinity
                nodes[level - 1] = nodes[level] * LANES + child
            elif level < tree.top:
                level += 1
            else:
                searching = False
        indices[q] = found
        if not ball:
            for slot in range(k):
                distances[q, slot] = keys[slot]


@jit
def _bound(before, query, furthest):
    """No less than the k-th squared distance of a query, also rounded, where that of the one before is `furthest`."""
    step = 0.0
    for axis in range(3):
        apart = np.float64(query[axis]) - np.float64(before[axis])
        step += apart * apart
    reach = np.sqrt(step) + np.sqrt(furthest)
    return reach * reach * 1.00001 + 1e-30


@inline
def _insert(key, index, keys, found):
    """Into (key, index) in ascending order, of which the last drops out."""
    slot = keys.shape[0] - 1
    if key < keys[slot] or (key == keys[slot] and index < found[slot]):
        while slot > 0 and (key < keys[slot - 1] or (key == keys[slot - 1] and index < found[slot - 1])):
            keys[slot], found[slot] = keys[slot - 1], found[slot - 1]
            slot -= 1
        keys[slot], found[slot] = key, index
