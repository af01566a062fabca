"""sigmoid_focal_loss on CPU: blocks of values in vector code, with exp and log1p of its own for float32.

A call of the C library per value would cost more than everything else; these compile to vector instructions. float64,
which is for checks, is left to torch, whose functions are vectorised already.
"""

import numpy as np
import torch

from triops._cpu.half import as_bits, narrow, widen
from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy
from triops._cpu.threads import run
from triops.ops.sigmoid_focal_loss import reference

BLOCK = 1024  # values whose intermediate results stay in the L1 cache
GRAIN = 32

# float32 constants: a Python float would make the arithmetic float64
ZERO, ONE, TWO, LEAST = np.float32(0), np.float32(1), np.float32(2), np.float32(-87.0)
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
E2, E3, E4, E5, E6, E7 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720, 5040))
L3, L5, L7, L9, L11, L13, L15 = (np.float32(1 / n) for n in (3, 5, 7, 9, 11, 13, 15))
BOUND = np.float32(1000)


def sigmoid_focal_loss(input, target, weight, gamma, alpha):
    if input.dtype == torch.float64:
        return reference.sigmoid_focal_loss(input, target, weight, gamma, alpha)
    return _run(None, input, target, weight, gamma, alpha)


def sigmoid_focal_loss_backward(grad_output, input, target, weight, gamma, alpha):
    if input.dtype == torch.float64:
        return reference.sigmoid_focal_loss_backward(grad_output, input, target, weight, gamma, alpha)
    return _run(grad_output, input, target, weight, gamma, alpha)


def _run(grad, input, target, weight, gamma, alpha):
    out = torch.empty(input.shape, dtype=input.dtype)
    if input.numel() == 0:
        return out
    classes = input.shape[1]
    weights = torch.empty(0) if weight is None else weight.float()
    # y falls where the score of the target's class rises
    parameters = np.array([gamma, alpha if grad is None else -alpha, 1 - alpha], np.float32)
    shared = as_bits(input).reshape(-1), as_numpy(target), classes, as_numpy(weights), parameters
    blocks = -(-input.numel() // BLOCK)
    if grad is None:
        run(_forward, blocks, GRAIN, *shared, as_bits(out).reshape(-1))
    else:
        run(_backward, blocks, GRAIN, *shared, as_bits(grad).reshape(-1), as_bits(out).reshape(-1))
    return out


@jit
def _exp(x):
    """e^x for x <= 0: 2^n times a polynomial in the rest. Below -87, where the result is subnormal, 0."""
    bounded = x if x > LEAST else LEAST
    n = np.float32(np.int32(bounded * LOG2_E - np.float32(0.5)))
    rest = bounded - n * LN2_HIGH - n * LN2_LOW
    value = (((((E7 * rest + E6) * rest + E5) * rest + E4) * rest + E3) * rest + E2) * rest * rest + rest + ONE
    power = widen(np.int16((np.int32(n) + np.int32(127)) << np.int32(7)))  # the bits of 2^n as a bfloat16
    value = value * power if x >= LEAST else ZERO
    return value if x == x else x


@jit
def _log1p(x):
    """log(1 + x) for x in [0, 1]: the series of the area tangent, good for small x too."""
    s = x / (TWO + x)
    t = s * s
    series = ((((((L15 * t + L13) * t + L11) * t + L9) * t + L7) * t + L5) * t + L3) * t + ONE
    return TWO * s * series


@jit
def _fill(begin, end, values, target, classes, weights, parameters, y, scale):
    """y of values `begin` to `end`, and what multiplies their loss."""
    row = begin // classes
    column = begin - row * classes
    for i in range(end - begin):
        label = target[row]
        hit = label == column
        x = widen(values[begin + i])
        factor = parameters[1] if hit else parameters[2]
        if weights.shape[0] > 0 and label >= 0 and label < classes:
            factor *= weights[label]
        y[i] = -x if hit else x
        scale[i] = factor
        column += 1
        if column == classes:
            column = 0
            row += 1


@jit
def _forward(begin, end, values, target, classes, weights, parameters, out):
    gamma = parameters[0]
    y, scale = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for block in range(begin, end):
        first, last = block * BLOCK, min((block + 1) * BLOCK, values.shape[0])
        _fill(first, last, values, target, classes, weights, parameters, y, scale)
        part = out[first:last]
        for i in range(np.uint32(last - first)):
            log_tail = _log1p(_exp(-abs(y[i])))
            positive, negative = (y[i], ZERO) if y[i] >= ZERO else (ZERO, y[i])
            power = _power(gamma, negative - log_tail)
            part[i] = narrow(scale[i] * power * (positive + log_tail), part)


@jit
def _backward(begin, end, values, target, classes, weights, parameters, grad, out):
    gamma = parameters[0]
    y, scale = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for block in range(begin, end):
        first, last = block * BLOCK, min((block + 1) * BLOCK, values.shape[0])
        _fill(first, last, values, target, classes, weights, parameters, y, scale)
        part, upstream = out[first:last], grad[first:last]
        for i in range(np.uint32(last - first)):
            tail = _exp(-abs(y[i]))
            log_tail = _log1p(tail)
            positive, negative = (y[i], ZERO) if y[i] >= ZERO else (ZERO, y[i])
            large, small = ONE / (ONE + tail), tail / (ONE + tail)
            q, other = (large, small) if y[i] >= ZERO else (small, large)
            bounded = positive if positive < BOUND else BOUND  # beyond, `other` is 0 and y may be infinite
            slope = _power(gamma, negative - log_tail) * (gamma * other * (bounded + log_tail) + q)
            part[i] = narrow(widen(upstream[i]) * scale[i] * slope, part)


@jit
def _power(gamma, log_q):
    """e^(gamma log q), where 0^0 is 1."""
    exponent = gamma * log_q
    return _exp(exponent if gamma > ZERO else ZERO)
