"""A stable radix sort of integer keys, for Numba kernels."""

import numpy as np

from triops._cpu.jit import jit

DIGIT = 11  # bits per pass: 2,048 counters stay in the first-level cache


@jit
def radix_sort(keys, rows):
    """Stable, by the first len(rows) keys; one element more than that is left free in the result."""
    n = rows.shape[0]
    highest = np.int64(0)
    for i in range(n):
        highest |= keys[i]
    bits = 0
    while (highest >> bits) > 0:
        bits += 1
    passes = (bits + DIGIT - 1) // DIGIT
    digit = (bits + passes - 1) // passes if passes else 0
    a, p = keys.copy(), rows.copy()
    b, q = np.empty_like(a), np.empty_like(p)
    mask = (np.int64(1) << digit) - 1
    for level in range(passes):
        shift = level * digit
        place = np.zeros((1 << digit) + 1, np.int64)
        for i in range(n):
            place[((a[i] >> shift) & mask) + 1] += 1
        for d in range(1 << digit):
            place[d + 1] += place[d]
        for i in range(n):
            d = (a[i] >> shift) & mask
            to = place[d]
            place[d] = to + 1
            b[to], q[to] = a[i], p[i]
        a, b = b, a
        p, q = q, p
    return a, p


@jit
def drop_repeated(keys, rows):
    """Keep the first of equal keys, in place. -> how many are left"""
    n = 0
    for i in range(rows.shape[0]):
        if n == 0 or keys[i] != keys[n - 1]:
            keys[n], rows[n] = keys[i], rows[i]
            n += 1
    return n
