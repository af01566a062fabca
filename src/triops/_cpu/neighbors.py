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
from triops._cpu.tree_vectors import (
    MOST,
    box_distances,
    first,
    keys_in_ball,
    keys_of_points,
    lowest_bit,
    lowest_in_ball,
    points_within,
)
from triops._cpu.vectors import LANES

LANE_BITS = 4
CURVE_BITS = 14  # per axis
GRAIN = 64  # queries worth a thread
MOST_LEVELS = 12
MOST_IN_ORDER = 16  # neighbors that are kept in order; more are collected and put in order at the end
FEW, CROWD = 16, 48  # keys that insertion sorts, and those that it takes too long for
MOST_FLOAT32 = 3e38
NUMBER = np.int64(0xFFFFFFFF)
LAST = (np.int64(0x7F800000) << 32) - 1  # of the keys that are finite


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
    collect = queries.dtype == np.float32 and indices.shape[1] > MOST_IN_ORDER
    run(_search, len(queries), GRAIN, queries, _order(queries), tree, collect, False, zero, zero, indices, distances)


def in_ball(tree, queries, near, far, indices):
    """Fill indices [M, k] int32 with the lowest whose squared distance d is 0 or `near <= d < far`, -1 behind."""
    none = np.empty((0, 0), queries.dtype)
    run(_search, len(queries), GRAIN, queries, _order(queries), tree, True, True, near, far, indices, none)


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
            tree.points[node, axis, lane] = points[rows[j], axis] if j < rows.shape[0] else real(np.inf)
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
def _search(begin, end, queries, order, tree, collect, ball, near, far, indices, distances):
    real, k, infinity = queries.dtype.type, indices.shape[1], np.inf
    room = (k + max(k, 2 * LANES) if collect else 0) + LANES
    candidates, others = np.empty(room, np.int64), np.empty(room, np.int64)
    places, counts = np.empty(room, np.int32), np.empty(_buckets(k), np.int32)
    waiting = np.empty((MOST_LEVELS, LANES), np.int32)  # ranks of the children of a node per level
    nodes = np.empty(MOST_LEVELS, np.int64)
    apart, keys = np.empty(LANES, queries.dtype), np.empty(LANES, np.int64)
    best, found = np.full(k, infinity), np.empty(k, np.int32)
    before, furthest = order[begin] if begin < end else np.int32(0), infinity
    for place in range(begin, end):
        q = order[place]
        x, y, z = queries[q, 0], queries[q, 1], queries[q, 2]
        bound, limit, count = infinity, LAST, 0
        if not ball:
            step = _step(x, queries[before, 0]) + _step(y, queries[before, 1]) + _step(z, queries[before, 2])
            bound, before = _bound(step, furthest), q
            if bound < MOST_FLOAT32:
                limit = _last_key(bound)
        if not collect:
            for slot in range(k):
                best[slot], found[slot] = infinity, -1
        level, nodes[tree.top] = tree.top + 1, 0
        enter = searching = np.isfinite(x) and np.isfinite(y) and np.isfinite(z)
        while searching:
            if enter:
                level -= 1
                node = nodes[level]
                if level > 0:
                    if ball:
                        lowest_in_ball(
                            tree.boxes, tree.lowest, tree.starts[level] + node, x, y, z, far, waiting, level
                        )  # fmt: skip
                    else:
                        box_distances(tree.boxes, tree.starts[level] + node, x, y, z, waiting, level)
                else:
                    if collect:
                        if ball:
                            keys_in_ball(tree.points, tree.numbers, node, x, y, z, near, far, keys)
                        else:
                            keys_of_points(tree.points, tree.numbers, node, x, y, z, keys)
                        for lane in range(LANES):  # without a branch
                            candidates[count] = keys[lane]
                            count += keys[lane] <= limit
                        if count > room - LANES:
                            count = _select(candidates, others, count, k)
                            limit = candidates[0]
                            for i in range(1, count):
                                limit = max(limit, candidates[i])
                    else:
                        within = points_within(tree.points, node, x, y, z, real(min(best[k - 1], bound)), apart)
                        while within != 0:
                            lane = lowest_bit(within)
                            within &= within - 1
                            _insert(np.float64(apart[lane]), tree.numbers[node, lane], best, found)
                        if best[k - 1] < min(bound, MOST_FLOAT32):
                            limit = _last_key(best[k - 1])
                    level = 1
            nearest = first(waiting, level)
            enter = nearest >> LANE_BITS <= limit >> 32
            if enter:
                child = nearest & (LANES - 1)
                waiting[level, child] = MOST
                nodes[level - 1] = nodes[level] * LANES + child
            elif level < tree.top:
                level += 1
            else:
                searching = False
        if collect:
            _sort(candidates, others, places, counts, count, k)
        for slot in range(k):
            if not collect:
                indices[q, slot] = found[slot]
                distances[q, slot] = best[slot]
            elif slot >= count:
                indices[q, slot] = -1
                if not ball:
                    distances[q, slot] = infinity
            else:
                indices[q, slot] = candidates[slot] & NUMBER
                if not ball:
                    distances[q, slot] = _rank(candidates[slot])
        if not ball:
            furthest = np.float64(distances[q, k - 1])


@inline
def _last_key(distance):
    """Of a point as far away as this or, with the distance in float64, a little further."""
    return ((np.int64(np.float32(distance).view(np.int32)) + 1) << 32) | NUMBER


@inline
def _step(to, since):
    apart = np.float64(to) - np.float64(since)
    return apart * apart


@jit
def _buckets(k):
    buckets = 64
    while buckets < 2 * k:
        buckets *= 2
    return buckets


@jit
def _sort(keys, others, places, counts, n, k):
    """The k smallest of n different keys, in order, in front.

    They go to buckets by their ranks, linearly, and from there in order. Where many fall into one bucket, they are
    sorted by halves instead.
    """
    if n > FEW:
        low, high = keys[0], keys[0]
        for i in range(n):
            low, high = min(low, keys[i]), max(high, keys[i])
        least, most = _rank(low), _rank(high)
        buckets = counts.shape[0]
        scale = np.float32(buckets - 1) / (most - least) if most - least > np.float32(1e-30) else np.float32(0)
        counts[:] = 0
        for i in range(n):
            places[i] = np.int32((_rank(keys[i]) - least) * scale)
        for i in range(n):
            counts[places[i]] += 1
        total, crowd, end = np.int32(0), np.int32(0), n
        for b in range(buckets):
            inside = counts[b]
            counts[b] = total
            if total < k:
                crowd = max(crowd, inside)
                end = total + inside
            total += inside
        if crowd > CROWD:
            _quicksort(keys, others, places, n, k)
            return
        for i in range(n):
            others[counts[places[i]]] = keys[i]
            counts[places[i]] += 1
        for i in range(end):
            keys[i] = others[i]
        n = end
    _insertion_sort(keys, 0, n)


@inline
def _rank(key):
    return np.int32(key >> 32).view(np.float32)


@jit
def _insertion_sort(keys, begin, end):
    for i in range(begin + 1, end):
        key, j = keys[i], i
        while j > begin and keys[j - 1] > key:
            keys[j] = keys[j - 1]
            j -= 1
        keys[j] = key


@jit
def _quicksort(keys, others, places, n, k):
    depth, begin, end = 0, 0, n
    while True:
        while end - begin > FEW:
            cut = _partition(keys, others, begin, end)
            if cut < k:
                places[depth] = end
                depth += 1
            end = cut
        _insertion_sort(keys, begin, end)
        if depth == 0:
            break
        depth -= 1
        begin, end = end, places[depth]


@jit
def _select(keys, others, n, k):
    """The k smallest of n different keys, and few others, in front. -> how many these are"""
    begin, end = 0, n
    while end - begin > FEW and end > k + (k >> 2):
        cut = _partition(keys, others, begin, end)
        if cut >= k:
            end = cut
        else:
            begin = cut
    return end


@jit
def _partition(keys, others, begin, end):
    """Keys below a middle one first, those above behind. -> where these begin: neither part is empty

    Without a branch: which way a key goes is anyone's guess.
    """
    third = (end - begin) // 3
    pivot = _median(
        _median(keys[begin], keys[begin + 1], keys[begin + 2]),
        _median(keys[begin + third], keys[begin + third + 1], keys[begin + third + 2]),
        _median(keys[end - 3], keys[end - 2], keys[end - 1]),
    )
    low, high = begin, 0
    for i in range(begin, end):
        key = keys[i]
        keys[low] = others[high] = key
        below = key < pivot
        low += below
        high += not below
    for i in range(high):
        keys[low + i] = others[i]
    return low


@inline
def _median(a, b, c):
    return max(min(a, b), min(max(a, b), c))


@inline
def _bound(step, furthest):
    """No less than the k-th squared distance of a query, also rounded, where that of the one before is `furthest`.

    step: the squared distance between the two.
    """
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
