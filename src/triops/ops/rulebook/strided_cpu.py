"""Sparse and transposed pairs on CPU: per-axis tables of kernel taps, and a byte for every output site.

The taps of a coordinate follow from it alone, so they are tabulated once and a site is three look-ups
and no division. Marked output bytes are ranked eight at a time. Where the grid is out of proportion to the
sites, the flat indices of all candidates are sorted instead.
"""

import math

import numpy as np

from triops._cpu.jit import inline, jit
from triops._cpu.sort import radix_sort
from triops._cpu.threads import run
from triops.ops.rulebook.submanifold_cpu import sorted_sites

AXES = 4  # fewer are filled up in front with axes of one place
CHUNK = 8192  # sites that share one row of counters
SCAN = 1 << 16  # groups of eight output places a task of the scan
PLACES_PER_PAIR = 64  # a grid with more output places than this for a candidate is sorted, not marked
MAX_INT32 = 2**31 - 1
# Of an axis, in a row of `Candidates.axes`: its column in indices (-1: taps are tabulated by site, 0: no such axis),
# the sizes of output and kernel, where its taps begin, and what leads from one tap to the next in offsets and outputs.
COLUMN, SIZE, KERNEL, BASE, STEP_K, STEP_O = range(6)
EIGHT_ONES = np.uint64(0x0101010101010101)


class Candidates:
    """The pairs of one call. After `count`, `num` is known; `write` puts the pairs where it is told."""

    def __init__(
        self, indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_shape, transpose
    ):
        self.indices, self.sites = indices, indices.shape[0]
        front = [1] * (AXES - len(spatial_shape))
        self.first_column = 1 + len(front)  # of the axes that exist, among batch and AXES axes
        self.out_shape = np.array([batch_size, *front, *out_shape], np.int64)
        self.axes = np.zeros((AXES, 6), np.int64)
        self.axes[:, SIZE], self.axes[:, KERNEL] = self.out_shape[1:], [*front, *kernel_size]
        self.volume = math.prod(kernel_size)
        self.active = _find_active(indices, batch_size, spatial_shape)

        by_row = sum(spatial_shape) > 4 * self.sites + 65_536
        length = len(front) + (self.sites * len(spatial_shape) if by_row else sum(spatial_shape))
        self.taps = np.zeros((length, 3), np.int32)  # first offset, first output place, how many
        at, self.most_rows = 0, 1  # rows: combinations of taps along all axes but the last
        for axis in range(AXES):
            self.axes[axis, BASE] = at
            column = axis - len(front)
            if column < 0:
                self.taps[at] = (0, 0, 1)
                at += 1
                continue
            k, s, p, d = kernel_size[column], stride[column], padding[column], dilation[column]
            common = math.gcd(s, d)
            self.axes[axis, STEP_K : STEP_O + 1] = (1, d) if transpose else (s // common, -(d // common))
            self.axes[axis, COLUMN] = -1 if by_row else 1 + column
            places = self.sites if by_row else spatial_shape[column]
            coordinates = indices[:, 1 + column].astype(np.int64) if by_row else np.arange(places)
            taps = self.taps[at : at + places]
            _tabulate(coordinates, k, s, p, d, out_shape[column], transpose, taps)
            if axis < AXES - 1:
                self.most_rows *= int(taps[:, 2].max(initial=0))
            at += places

    def count(self):
        """-> num [K], and marks the outputs where there is a byte for each."""
        chunks = -(-self.sites // CHUNK)
        self.counts = np.zeros((chunks, self.volume), np.int64)
        places = math.prod(self.out_shape.tolist())
        likely = self.sites * min(self.volume, 27)
        self.dense = places <= PLACES_PER_PAIR * likely + (1 << 20)
        self.marks = np.zeros(-(-places // 8) * 8, np.uint8) if self.dense else None
        self._run(_count, self.counts, self.marks)
        return self.counts.sum(0)

    def write(self, start_in, start_out, flat):
        """Input rows of offset k from flat[start_in[k]], output rows from flat[start_out[k]]. -> out_indices"""
        before = np.cumsum(self.counts, 0) - self.counts  # pairs of the offset in the chunks before
        if self.dense:
            out_indices, base = self._rank()
            words = self.marks.view(np.uint64)
            self._run(_write, start_in + before, flat, start_out - start_in, flat, words, base)
            return out_indices
        num = self.counts.sum(0)
        first = np.cumsum(num) - num
        keys = np.empty(int(num.sum()) + 1, np.int64)
        self._run(_write, start_in + before, flat, first - start_in, keys, None, None)
        order = np.arange(len(keys) - 1, dtype=np.int32 if len(keys) <= MAX_INT32 else np.int64)
        ascending, order = radix_sort(keys, order)
        out_indices = self._out_indices(_distinct(ascending, len(order)))
        _rank_sorted(ascending, order, num, first, start_out, flat, self.out_shape, self.first_column, out_indices)
        return out_indices

    def _run(self, kernel, *arrays):
        """One of the kernels that go through all pairs."""
        run(kernel, len(self.counts), 4, self.indices, self.active, self.axes, self.taps, self.most_rows, *arrays)

    def _rank(self):
        """-> out_indices, and for every eight places the number of outputs before them."""
        words = self.marks.view(np.uint64)
        tasks = -(-len(words) // SCAN)
        totals = np.zeros(tasks + 1, np.int64)
        run(_total, tasks, 2, words, totals)
        totals = np.cumsum(totals)
        base = np.empty(len(words), np.int32)
        out_indices = self._out_indices(int(totals[-1]))
        run(_rank, tasks, 2, words, totals, self.out_shape, self.first_column, base, out_indices)
        return out_indices, base

    def _out_indices(self, count):
        if count > MAX_INT32:
            raise ValueError(
                f"get_indice_pairs: output sites must be at most 2**31 - 1, since rows are int32, got {count}"
            )
        return np.empty((count, self.indices.shape[1]), self.indices.dtype)


def _find_active(indices, batch_size, spatial_shape):
    """uint8 [L]: the row is inside the grid and the lowest of its site."""
    active = np.zeros(indices.shape[0], np.uint8)
    volume = batch_size * math.prod(spatial_shape)
    if volume <= 128 * indices.shape[0] + (1 << 23):
        limit = np.array([batch_size, *spatial_shape], np.int64)
        _mark_active(indices, limit, np.zeros(-(-volume // 64), np.uint64), active)
    else:
        active[sorted_sites(indices, batch_size, spatial_shape, [0] * len(spatial_shape))[1]] = 1
    return active


@jit
def _mark_active(indices, limit, seen, active):
    """Rows come in ascending order, so the first to reach a site is its lowest."""
    for i in range(indices.shape[0]):
        key, inside = np.int64(0), True
        for c in range(indices.shape[1]):
            value = np.int64(indices[i, c])
            inside &= (value >= 0) & (value < limit[c])
            key = key * limit[c] + value
        if inside:
            bit = np.uint64(1) << np.uint64(key & 63)
            active[i] = (seen[key >> 6] & bit) == 0
            seen[key >> 6] |= bit


@jit
def _tabulate(coordinates, kernel, stride, padding, dilation, size, transpose, taps):
    """The offsets that lead from a coordinate to an output place: a first one, and others at equal steps."""
    for v in range(coordinates.shape[0]):
        count = 0
        for k in range(kernel):
            if transpose:
                place, valid = coordinates[v] * stride - padding + k * dilation, True
            else:
                scaled = coordinates[v] + padding - k * dilation
                place = scaled // stride
                valid = place * stride == scaled
            if valid and 0 <= place < size:
                if count == 0:
                    taps[v, 0], taps[v, 1] = k, place
                count += 1
        taps[v, 2] = count


@inline
def _tap_index(i, axis, indices, axes):
    """Where in the table of taps those of site i along an axis stand."""
    column = axes[axis, COLUMN]
    if column > 0:
        return np.uint64(axes[axis, BASE] + np.int64(indices[i, column]))
    return np.uint64(axes[axis, BASE] + (i if column < 0 else 0))


@inline
def _rows_of(i, before, rows, indices, axes, taps, row_k, row_o):
    """Offsets and output places of site i under all combinations of taps along all axes but the last. -> how many

    Those of the site before are kept where both lie in one row.
    """
    same = before >= 0
    for column in range(indices.shape[1] - 1):
        same &= before < 0 or indices[i, column] == indices[before, column]
    if same:
        return rows
    t, z, y = _tap_index(i, 0, indices, axes), _tap_index(i, 1, indices, axes), _tap_index(i, 2, indices, axes)
    rows = 0
    kt, ot = np.int64(taps[t, 0]), np.int64(indices[i, 0]) * axes[0, SIZE] + taps[t, 1]
    for _ in range(taps[t, 2]):
        kz, oz = kt * axes[1, KERNEL] + taps[z, 0], ot * axes[1, SIZE] + taps[z, 1]
        for _ in range(taps[z, 2]):
            ky, oy = kz * axes[2, KERNEL] + taps[y, 0], oz * axes[2, SIZE] + taps[y, 1]
            for _ in range(taps[y, 2]):
                row_k[rows], row_o[rows] = ky * axes[3, KERNEL], oy * axes[3, SIZE]
                rows += 1
                ky += axes[2, STEP_K]
                oy += axes[2, STEP_O]
            kz += axes[1, STEP_K]
            oz += axes[1, STEP_O]
        kt += axes[0, STEP_K]
        ot += axes[0, STEP_O]
    return rows


@jit
def _rank_at(place, words, base):
    """How many outputs come before a place: those before its eight places, and the marked bytes below its own."""
    word, one = place >> np.uint64(3), np.uint64(1)
    below = (one << (np.uint64(8) * (place & np.uint64(7)))) - one
    return base[word] + np.int32(((words[word] & below) * EIGHT_ONES) >> np.uint64(56))


# Two kernels go through the pairs of site i, offset k and output place o, sites ascending. A site's pairs are all
# combinations of its taps along the last axis with those along the other axes.


@jit
def _count(begin, end, indices, active, axes, taps, most_rows, counts, marks):
    """counts[chunk, k] += 1, and marks[o] = 1 unless marks is None."""
    step_k, step_o = axes[3, STEP_K], axes[3, STEP_O]
    row_k, row_o = np.empty(most_rows, np.int64), np.empty(most_rows, np.int64)
    for chunk in range(begin, end):
        count, before, rows = counts[chunk], np.int64(-1), 0
        for i in range(chunk * CHUNK, min(indices.shape[0], (chunk + 1) * CHUNK)):
            if not active[i]:
                continue
            rows = _rows_of(i, before, rows, indices, axes, taps, row_k, row_o)
            before = i
            x = _tap_index(i, 3, indices, axes)
            kx, ox = np.int64(taps[x, 0]), np.int64(taps[x, 1])
            for _ in range(taps[x, 2]):
                for r in range(rows):
                    count[np.uint64(row_k[r] + kx)] += 1
                    if marks is not None:
                        marks[np.uint64(row_o[r] + ox)] = 1
                kx += step_k
                ox += step_o


@jit
def _write(begin, end, indices, active, axes, taps, most_rows, places, flat, apart, target, words, base):
    """i to flat[places[chunk, k]] and the rank of o to target, `apart[k]` places behind; then on to the next place.

    Where words is None, o itself instead of its rank.
    """
    step_k, step_o = axes[3, STEP_K], axes[3, STEP_O]
    row_k, row_o = np.empty(most_rows, np.int64), np.empty(most_rows, np.int64)
    for chunk in range(begin, end):
        place, before, rows = places[chunk], np.int64(-1), 0
        for i in range(chunk * CHUNK, min(indices.shape[0], (chunk + 1) * CHUNK)):
            if not active[i]:
                continue
            rows = _rows_of(i, before, rows, indices, axes, taps, row_k, row_o)
            before = i
            x = _tap_index(i, 3, indices, axes)
            kx, ox = np.int64(taps[x, 0]), np.int64(taps[x, 1])
            for _ in range(taps[x, 2]):
                for r in range(rows):
                    k, o = np.uint64(row_k[r] + kx), np.uint64(row_o[r] + ox)
                    at = place[k]
                    place[k] = at + 1
                    flat[at] = i
                    if words is None:
                        target[at + apart[k]] = o
                    else:
                        target[at + apart[k]] = _rank_at(o, words, base)
                kx += step_k
                ox += step_o


@jit
def _total(begin, end, words, totals):
    for task in range(begin, end):
        count = np.uint64(0)
        for w in range(task * SCAN, min(words.shape[0], (task + 1) * SCAN)):
            count += (words[w] * EIGHT_ONES) >> np.uint64(56)
        totals[task + 1] = count


@jit
def _rank(begin, end, words, totals, out_shape, first_column, base, out_indices):
    site = np.zeros(out_shape.shape[0], np.int64)
    for task in range(begin, end):
        n = totals[task]
        start = np.int64(task) * SCAN * 8
        _place_of(start, out_shape, site)
        reached = start  # `site` is the position of this place
        for w in range(task * SCAN, min(words.shape[0], (task + 1) * SCAN)):
            base[w] = n
            word, place = words[w], np.int64(w) * 8
            while word != 0:
                if word & np.uint64(1):
                    _advance(site, place - reached, out_shape)
                    reached = place
                    _put(site, first_column, out_indices[n])
                    n += 1
                word >>= np.uint64(8)
                place += 1


@jit
def _place_of(place, out_shape, site):
    for axis in range(out_shape.shape[0] - 1, 0, -1):
        site[axis] = place % out_shape[axis]
        place //= out_shape[axis]
    site[0] = place


@jit
def _advance(site, by, out_shape):
    """Carry instead of divide: the next output is mostly in the same row."""
    last = out_shape.shape[0] - 1
    site[last] += by
    if site[last] >= out_shape[last]:
        carry = site[last] // out_shape[last]
        site[last] -= carry * out_shape[last]
        for axis in range(last - 1, 0, -1):
            site[axis] += carry
            carry = 0
            if site[axis] >= out_shape[axis]:
                carry = site[axis] // out_shape[axis]
                site[axis] -= carry * out_shape[axis]
        site[0] += carry


@jit
def _put(site, first_column, row):
    row[0] = site[0]
    for column in range(first_column, site.shape[0]):
        row[column - first_column + 1] = site[column]


@jit
def _distinct(keys, count):
    n = 0
    for i in range(count):
        n += i == 0 or keys[i] != keys[i - 1]
    return n


@jit
def _rank_sorted(keys, order, num, first, start_out, flat, out_shape, first_column, out_indices):
    """Ranks of the sorted candidates, to the places where their pairs stand."""
    offset_of = np.empty(order.shape[0], np.int32)
    for k in range(num.shape[0]):
        offset_of[first[k] : first[k] + num[k]] = k
    site = np.zeros(out_shape.shape[0], np.int64)
    n = -1
    for i in range(order.shape[0]):
        if i == 0 or keys[i] != keys[i - 1]:
            n += 1
            _place_of(keys[i], out_shape, site)
            _put(site, first_column, out_indices[n])
        pair = order[i]
        k = offset_of[pair]
        flat[start_out[k] + pair - first[k]] = n
