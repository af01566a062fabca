"""site_neighbors on CPU: sort sites and centers by their flat index, then sweep along both for one row of offsets.

In a grid that is wide enough for every offset, an offset is one number to add to a flat index, and ascending centers
have ascending neighbors: one sweep finds those under offsets close to each other, such as those along the last axis.
Sites too far apart for flat indices of 64 bits go into a hash, where coordinates are compared.
"""

import numpy as np

from triops._cpu.jit import inline, jit
from triops._cpu.memory import as_numpy, minus_ones
from triops._cpu.sort import drop_repeated, radix_sort
from triops._cpu.threads import run

SENTINEL = 2**62  # above every key, and no difference to it overflows
LEAST, GREATEST = -(2**63), 2**63 - 1  # int64
BLOCK = 4096  # centers of one sweep
GAP = 8  # flat indices between two offsets of one sweep
GRAIN = 40_000  # centers times sweeps, worth a thread
HASHED_GRAIN = 10_000  # centers times offsets
STEPS = 8  # from site to site, before a sweep begins to jump


def site_neighbors(indices, centers, offsets):
    table = minus_ones(offsets.shape[0], centers.shape[0])
    if table.numel() == 0:
        return table
    same = centers is indices or _signature(centers) == _signature(indices)
    sites, steps = as_numpy(indices), as_numpy(offsets)
    around = sites if same else as_numpy(centers)
    low, high = np.empty(sites.shape[1], np.int64), np.empty(sites.shape[1], np.int64)
    if not _bounds(sites, low, high):
        return table
    grid = _grid(low.tolist(), high.tolist(), steps)
    if grid is None:
        _look_up(sites, around, steps, table.numpy())
    else:
        _sweep_all(sites, around, same, steps, grid, table.numpy())
    return table


def _signature(tensor):
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@jit
def _bounds(sites, low, high):
    """The lowest and highest coordinates of rows with a batch. -> whether there are any"""
    count, columns = sites.shape
    found = False
    for i in range(count):
        if sites[i, 0] >= 0:
            for c in range(columns):
                value = np.int64(sites[i, c])
                low[c] = min(low[c], value) if found else value
                high[c] = max(high[c], value) if found else value
            found = True
    return found


def _grid(low, high, steps):
    """-> int64 arrays: the origin of a grid in which no offset leads from one line to another, its strides, and the
    least and greatest centers that can meet a site; None where they or flat indices would not fit."""
    least, most = np.minimum(steps.min(0), 0).tolist(), np.maximum(steps.max(0), 0).tolist()
    reach = [0, *(b - a for a, b in zip(least, most, strict=True))]
    strides = [1]
    for a, b, r in reversed(list(zip(low, high, reach, strict=True))):
        strides.insert(0, strides[0] * (b - a + 1 + 2 * r))
    origin = [a - r for a, r in zip(low, reach, strict=True)]
    if strides[0] >= SENTINEL or min(origin) < LEAST:
        return None
    first = [a - b for a, b in zip(low, [0, *most], strict=True)]
    last = [min(a - b, GREATEST) for a, b in zip(high, [0, *least], strict=True)]
    return tuple(np.array(numbers, np.int64) for numbers in (origin, strides[1:], first, last))


def _sweep_all(sites, around, same, steps, grid, table):
    strides = grid[1]
    center_keys, center_rows = _sorted(around, *grid)
    if same:
        keys, rows = center_keys.copy(), center_rows.copy()
    else:
        keys, rows = _sorted(sites, *grid)
    count = drop_repeated(keys, rows)
    keys[count] = SENTINEL

    shifts = steps.astype(np.int64) @ strides[1:]
    order = shifts.argsort(kind="stable")
    shifts = shifts[order]
    begins = np.flatnonzero(np.diff(shifts, prepend=shifts[0] - GAP - 1, append=shifts[-1] + GAP + 1) > GAP)
    sweeps, blocks = len(begins) - 1, -(-len(center_rows) // BLOCK)
    grain = max(1, GRAIN // max(min(len(center_rows), BLOCK), 1))
    run(
        _sweep, sweeps * blocks, grain,
        keys[: count + 1], rows, center_keys, center_rows, shifts, order, begins, table,
    )  # fmt: skip


def _sorted(sites, origin, strides, first, last):
    """-> keys int64 [n + 1] ascending, with room for a sentinel, and rows int32 [n] of the sites within the bounds."""
    keys, rows = np.empty(len(sites) + 1, np.int64), np.empty(len(sites), np.int32)
    count, ascending = _keys(sites, origin, strides, first, last, keys, rows)
    keys, rows = keys[: count + 1], rows[:count]
    return (keys, rows) if ascending else radix_sort(keys, rows)


@jit
def _keys(sites, origin, strides, first, last, keys, rows):
    """-> how many sites are within the bounds, and whether their keys ascend."""
    count, columns = sites.shape
    n, before, ascending = 0, np.int64(0), True
    for i in range(count):
        key, inside = np.int64(0), sites[i, 0] >= 0
        for c in range(columns):
            value = np.int64(sites[i, c])
            inside &= (value >= first[c]) & (value <= last[c])
            key += (value - origin[c]) * strides[c]
        if inside:
            keys[n], rows[n] = key, i
            ascending &= key >= before
            before = key
            n += 1
    return n, ascending


@jit
def _sweep(begin, end, keys, rows, center_keys, center_rows, shifts, order, begins, table):
    """Sweeps [begin, end): of a block of centers, those of all groups of offsets, then of the next."""
    sweeps = begins.shape[0] - 1
    for i in range(begin, end):
        block, group = i // sweeps, i % sweeps
        lowest, behind = begins[group], begins[group + 1]
        shift, span = shifts[lowest], shifts[behind - 1] - shifts[lowest]
        q = np.uint64(0)
        for p in range(np.uint64(block * BLOCK), np.uint64(min((block + 1) * BLOCK, center_rows.shape[0]))):
            target = center_keys[p] + shift
            q = _advance(keys, q, target)
            u, k = q, np.uint64(lowest)
            while keys[u] - target <= span:
                apart = keys[u] - target + shift
                while shifts[k] < apart:
                    k += np.uint64(1)
                while k < behind and shifts[k] == apart:
                    table[order[k], center_rows[p]] = rows[u]
                    k += np.uint64(1)
                if k == behind:
                    break
                u += np.uint64(1)


@jit
def _advance(keys, q, target):
    """-> the first of the keys from q on that is not below the target; the last key is not."""
    for _ in range(STEPS):
        if keys[q] >= target:
            return q
        q += np.uint64(1)
    step, last = np.uint64(1), np.uint64(keys.shape[0] - 1)
    while q + step < last and keys[q + step] < target:
        q += step
        step += step
    low, high = q, min(q + step, last)
    while low < high:
        middle = (low + high) >> np.uint64(1)
        if keys[middle] < target:
            low = middle + np.uint64(1)
        else:
            high = middle
    return low


def _look_up(sites, around, steps, table):
    slots = np.zeros(2 << len(sites).bit_length(), np.int64)  # the row + 1, above it 32 bits of the hash
    _insert(sites, slots)
    grain = max(1, HASHED_GRAIN // len(around))
    run(_find, len(steps), grain, sites, slots, around, steps, table)


@jit
def _mixed(hashed, value):
    hashed = (hashed ^ np.uint64(value)) * np.uint64(0x9E3779B97F4A7C15)
    return hashed ^ (hashed >> np.uint64(32))


@inline
def _slot_of(hashed, wanted, sites, slots):
    """-> the slot of a site, given by its coordinates and their hash, or the free one where it would go"""
    mask, mark = np.uint64(slots.shape[0] - 1), np.int64(hashed >> np.uint64(33))
    at = hashed & mask
    while slots[at] != 0:
        if slots[at] >> 32 == mark:
            row, same = (slots[at] & 0xFFFFFFFF) - 1, True
            for c in range(sites.shape[1]):
                same &= sites[row, c] == wanted[c]
            if same:
                break
        at = (at + np.uint64(1)) & mask
    return at


@jit
def _insert(sites, slots):
    """The row of every site; of equal ones the first."""
    wanted = np.empty(sites.shape[1], np.int64)
    for i in range(sites.shape[0]):
        if sites[i, 0] >= 0:
            hashed = np.uint64(0)
            for c in range(sites.shape[1]):
                wanted[c] = sites[i, c]
                hashed = _mixed(hashed, wanted[c])
            at = _slot_of(hashed, wanted, sites, slots)
            if slots[at] == 0:
                slots[at] = (np.int64(hashed >> np.uint64(33)) << 32) | (i + 1)


@jit
def _find(begin, end, sites, slots, around, steps, table):
    """Rows of offsets [begin, end)."""
    columns = sites.shape[1]
    wanted = np.empty(columns, np.int64)
    for k in range(begin, end):
        for a in range(around.shape[0]):
            exists = around[a, 0] >= 0
            wanted[0] = around[a, 0]
            hashed = _mixed(np.uint64(0), wanted[0])
            for c in range(1, columns):
                center, step = np.int64(around[a, c]), np.int64(steps[k, c - 1])
                wanted[c] = np.int64(np.uint64(center) + np.uint64(step))  # signed sums must not overflow in LLVM
                exists &= (wanted[c] < center) == (step < 0)  # nothing lies beyond int64
                hashed = _mixed(hashed, wanted[c])
            if exists:
                table[k, a] = (slots[_slot_of(hashed, wanted, sites, slots)] & 0xFFFFFFFF) - 1
