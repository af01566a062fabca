"""A stable radix sort of integer keys."""

import numpy as np

from triops._cpu.jit import jit

DIGIT = 11  # bits per pass: 2,048 counters stay in the first-level cache
FEW = 64  # rows that are inserted one after the other, before the counters of a pass are cleared


def radix_sort(keys, rows):
    """-> keys and rows, sorted by the first len(rows) keys, stable. The given arrays are written to.

    There may be more keys than rows: the rest of the result is left unwritten.
    """
    other_keys, other_rows = np.empty_like(keys), np.empty_like(rows)
    in_other = radix_sort_between(keys, rows, other_keys, other_rows)
    return (other_keys, other_rows) if in_other else (keys, rows)


@jit
def radix_sort_between(keys, rows, other_keys, other_rows):
    """Sort from one pair of arrays to the other and back. -> whether the result is in the other pair"""
    n = rows.shape[0]
    if n <= FEW:
        _insert(keys, rows)
        return False
    highest = np.int64(0)
    for i in range(n):
        highest |= keys[i]
    bits = 0
    while (highest >> bits) > 0:
        bits += 1
    passes = (bits + DIGIT - 1) // DIGIT
    digit = (bits + passes - 1) // passes if passes else 0
    mask = (np.int64(1) << digit) - 1
    source, source_rows, target, target_rows = keys, rows, other_keys, other_rows
    for level in range(passes):
        shift = level * digit
        place = np.zeros((1 << digit) + 1, np.int64)
        for i in range(n):
            place[((source[i] >> shift) & mask) + 1] += 1
        for d in range(1 << digit):
            place[d + 1] += place[d]
        for i in range(n):
            d = (source[i] >> shift) & mask
            to = place[d]
            place[d] = to + 1
            target[to], target_rows[to] = source[i], source_rows[i]
        source, target = target, source
        source_rows, target_rows = target_rows, source_rows
    return passes % 2 == 1


@jit
def _insert(keys, rows):
    """Sort a few rows in place, stable."""
    for i in range(1, rows.shape[0]):
        key, row, j = keys[i], rows[i], i
        while j > 0 and keys[j - 1] > key:
            keys[j], rows[j] = keys[j - 1], rows[j - 1]
            j -= 1
        keys[j], rows[j] = key, row


@jit
def drop_repeated(keys, rows):
    """Keep the first of equal keys, in place. -> how many are left"""
    n = 0
    for i in range(rows.shape[0]):
        if n == 0 or keys[i] != keys[n - 1]:
            keys[n], rows[n] = keys[i], rows[i]
            n += 1
    return n
