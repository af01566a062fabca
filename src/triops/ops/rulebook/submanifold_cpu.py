"""Submanifold pairs on CPU: sort the sites' flat indices, then sweep two pointers along the sorted list.

Under one row of kernel offsets (all offsets that differ along the last axis only) the neighbours of
ascending sites ascend too, so one sweep finds them without a hash. The offsets behind the centre mirror
those before it. Sites that come unsorted have their pairs put back into input order by a bitmap of rows.
"""

import numpy as np

from triops._cpu.intrinsics import popcount
from triops._cpu.jit import jit
from triops._cpu.sort import drop_repeated, radix_sort
from triops._cpu.threads import run

SENTINEL = 2**62  # above every key, and no difference to it overflows


def sorted_sites(indices, batch_size, spatial_shape, halo):
    """-> keys int64 [n + 1] ascending with a sentinel behind, rows int32 [n], strides int64 [1 + D].

    A key is the flat index in a grid that is wider by `halo` on every axis, so that a neighbour beyond the
    border falls on a place that holds no site. Sites outside are left out; the lowest row stands for a site.
    """
    strides = np.ones(1 + len(spatial_shape), np.int64)
    for axis in reversed(range(len(spatial_shape))):
        strides[axis] = strides[axis + 1] * (spatial_shape[axis] + halo[axis])
    limit = np.array([batch_size, *spatial_shape], np.int64)
    keys, rows = np.empty(len(indices) + 1, np.int64), np.empty(len(indices), np.int32)
    count, ascending = _keys(indices, limit, strides, keys, rows)
    keys, rows = keys[: count + 1], rows[:count]
    if not ascending:
        keys, rows = radix_sort(keys, rows)
        count = drop_repeated(keys, rows)
        keys[count], rows = SENTINEL, rows[:count]
        keys = keys[: count + 1]
    return keys, rows, strides


@jit
def _keys(indices, limit, strides, keys, rows):
    """-> how many sites are inside, and whether their keys ascend."""
    count, columns = indices.shape
    n, before, ascending = 0, np.int64(-1), True
    for i in range(count):
        key, inside = np.int64(0), True
        for c in range(columns):
            value = np.int64(indices[i, c])
            inside &= (value >= 0) & (value < limit[c])
            key += value * strides[c]
        if inside:
            keys[n], rows[n] = key, i
            ascending &= key > before
            before = key
            n += 1
    keys[n] = SENTINEL
    return n, ascending


class Sweep:
    """The pairs of one call, offset by offset. `count` fills `num`; `write` puts the pairs where it is told, or
    `sweep` those of the offsets before the centre, and `finish` all of them."""

    def __init__(self, indices, batch_size, spatial_shape, kernel_size, dilation):
        halo = [k // 2 * d for k, d in zip(kernel_size, dilation, strict=True)]
        self.keys, self.rows, strides = sorted_sites(indices, batch_size, spatial_shape, halo)
        self.sites = indices.shape[0]
        self.taps, self.gap = kernel_size[-1], dilation[-1]
        self.volume = int(np.prod(kernel_size))
        # Rows of offsets up to the centre one, each with the key of its leftmost neighbour, seen from the site.
        leading = np.indices(kernel_size[:-1]).reshape(len(kernel_size) - 1, -1) if len(kernel_size) > 1 else None
        shift = np.zeros(self.volume // self.taps, np.int64)
        for axis in range(len(kernel_size) - 1):
            shift += (leading[axis] - kernel_size[axis] // 2) * dilation[axis] * strides[1 + axis]
        self.shift = shift[: len(shift) // 2 + 1] - halo[-1]
        self.in_order = bool(_ascending(self.rows))
        self.num = np.zeros(self.volume, np.int32)

    def count(self):
        nothing = np.empty(0, np.int64)
        self._sweep(nothing, nothing, np.empty(0, np.int32), False)
        return self._mirrored_num()

    def write(self, start_in, start_out, flat):
        """Input rows of offset k from flat[start_in[k]], output rows from flat[start_out[k]]. -> num"""
        place = start_in, start_out, flat
        self.sweep(*place)
        self.finish(place, place)
        return self.num

    def sweep(self, start_in, start_out, flat):
        """The offsets before the centre, in the order of the keys. -> num, of all offsets"""
        self._sweep(start_in, start_out, flat, True)
        return self._mirrored_num()

    def finish(self, swept, place):
        """Where `sweep` put its pairs, and where all are to go, which may be the same."""
        centre = self.volume // 2
        grain = max(1, 100_000 // max(self.sites // 16, 1))
        run(_finish, centre + 1, grain, self.num, self.rows, self.in_order, self.sites, *swept, swept is place, *place)

    def _sweep(self, start_in, start_out, flat, store):
        grain = max(1, 40_000 // max(self.sites, 1))
        run(
            _sweep, len(self.shift), grain,
            self.keys, self.rows, self.shift, self.taps, self.gap, start_in, start_out, flat, store, self.num,
        )  # fmt: skip

    def _mirrored_num(self):
        centre = self.volume // 2
        self.num[centre] = len(self.rows)
        self.num[centre + 1 :] = self.num[:centre][::-1]
        return self.num


@jit
def _ascending(rows):
    ascending = True
    for i in range(1, rows.shape[0]):
        ascending &= rows[i] > rows[i - 1]
    return ascending


@jit
def _sweep(begin, end, keys, rows, shift, taps, gap, start_in, start_out, flat, store, num):
    """Pairs of offset rows begin..end, in the order of the keys, for the offsets before the centre."""
    n = np.uint64(rows.shape[0])
    centre_row = shift.shape[0] - 1
    place_in, place_out = np.zeros(taps, np.int64), np.zeros(taps, np.int64)
    found = np.zeros(taps, np.int64)
    for r in range(begin, end):
        here = taps // 2 if r == centre_row else taps  # of the centre row only what lies before the centre
        span = np.int64(here - 1) * gap
        low = shift[r]
        for c in range(here):
            found[c] = 0
            if store:
                place_in[c], place_out[c] = start_in[r * taps + c], start_out[r * taps + c]
        if here == 0:
            continue
        q = np.uint64(0)
        for p in range(n):
            target = keys[p] + low
            while keys[q] < target:
                q += np.uint64(1)
            u = q
            while True:
                apart = keys[u] - target
                if apart > span:
                    break
                c = apart
                if gap != 1:
                    c = apart // gap
                    if c * gap != apart:
                        u += np.uint64(1)
                        continue
                if store:
                    at = found[c]
                    flat[place_in[c] + at] = rows[u]
                    flat[place_out[c] + at] = rows[p]
                found[c] += 1
                u += np.uint64(1)
        for c in range(here):
            num[r * taps + c] = found[c]


@jit
def _finish(begin, end, num, rows, in_order, sites, from_in, from_out, source, in_place, start_in, start_out, flat):
    """Mirror the offsets before the centre to those behind it, and bring both into the order of input rows."""
    centre = num.shape[0] // 2
    partner = np.empty(0 if in_order else sites, np.int32)
    marks = np.zeros(0 if in_order else (sites + 63) // 64, np.uint64)
    for k in range(begin, end):
        n, mirror = num[k], num.shape[0] - 1 - k
        to_in, to_out = flat[start_in[k] : start_in[k] + n], flat[start_out[k] : start_out[k] + n]
        if k == centre:
            if in_order:
                to_in[:] = rows
                to_out[:] = rows
            else:
                _in_order_of(rows, rows, partner, marks, to_in, to_out)
            continue
        swept_in, swept_out = source[from_in[k] : from_in[k] + n], source[from_out[k] : from_out[k] + n]
        back_in, back_out = (
            flat[start_in[mirror] : start_in[mirror] + n],
            flat[start_out[mirror] : start_out[mirror] + n],
        )
        if in_order:
            back_in[:] = swept_out
            back_out[:] = swept_in
            if not in_place:
                to_in[:] = swept_in
                to_out[:] = swept_out
        else:
            _in_order_of(swept_out, swept_in, partner, marks, back_in, back_out)
            _in_order_of(swept_in, swept_out, partner, marks, to_in, to_out)


@jit
def _in_order_of(inputs, outputs, partner, marks, to_inputs, to_outputs):
    """Distinct `inputs` ascending, with their `outputs`. `marks` comes and goes all zero."""
    one = np.uint64(1)
    for j in range(inputs.shape[0]):
        i = inputs[j]
        partner[i] = outputs[j]
        marks[i >> 6] |= one << np.uint64(i & 63)
    n = 0
    for w in range(marks.shape[0]):
        word = marks[w]
        if word == 0:
            continue
        marks[w] = 0
        while word != 0:
            lowest = word & (~word + one)
            i = (w << 6) + popcount(lowest - one)
            to_inputs[n], to_outputs[n] = i, partner[i]
            n += 1
            word ^= lowest
