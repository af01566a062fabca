"""sigmoid_focal_loss on GPU: one pass, one program per block of values whatever the number of classes."""

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.arithmetic import from_bits
from triops._gpu.memory import load_run, store_run

BLOCK = _gpu.block(1024, interpreted=8192)


def sigmoid_focal_loss(input, target, weight, gamma, alpha):
    return _launch(None, input, target, weight, gamma, alpha)


def sigmoid_focal_loss_backward(grad_output, input, target, weight, gamma, alpha):
    return _launch(grad_output, input, target, weight, gamma, alpha)


def _launch(grad, input, target, weight, gamma, alpha):
    input, target = input.contiguous(), target.contiguous()
    out = torch.empty_like(input)
    rows, classes = input.shape
    if out.numel() == 0:
        return out
    # the gradient of a sum is one expanded number: strides of 0 read it without a copy
    strides = (0, 0) if grad is None else grad.stride()
    _focal_loss_kernel[(_gpu.cdiv(rows * classes, BLOCK),)](
        input, target, input if weight is None else weight.contiguous(), input if grad is None else grad, out,
        rows, classes, *strides, _gpu.bits_of(gamma), _gpu.bits_of(alpha),
        WEIGHTED=weight is not None, BACKWARD=grad is not None, CONTIGUOUS=grad is None or grad.is_contiguous(),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@_gpu.kernel
def _focal_loss_kernel(
    input, target, weight, grad, out, rows, classes, row_stride, column_stride, gamma: tl.int64, alpha: tl.int64,
    WEIGHTED: tl.constexpr, BACKWARD: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    real: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    gamma = from_bits(gamma, real)
    alpha = from_bits(alpha, tl.float64)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    flat = begin + tl.arange(0, BLOCK)
    count = rows.to(tl.int64) * classes
    inside, whole = flat < count, begin + BLOCK <= count
    # row and class, with a 64-bit division for the block and 32-bit ones for its values
    first = begin // classes
    local = (begin - first * classes).to(tl.int32) + tl.arange(0, BLOCK)
    down = local // classes
    column = local - down * classes
    row = first + down

    label = tl.load(target + row, mask=inside, other=-1)
    hit = label == column
    x = load_run(input + flat, inside, whole, 0.0).to(real)
    y = tl.where(hit, -x, x)
    scale = tl.where(hit, alpha.to(real), (1.0 - alpha).to(real))
    if WEIGHTED:
        known = inside & (label >= 0) & (label < classes)
        scale *= tl.where(known, tl.load(weight + label, mask=known, other=0).to(real), 1.0)

    tail = tl.exp(-tl.abs(y))
    log_tail = _log1p(tail)
    power = tl.exp(gamma * tl.maximum(tl.minimum(y, 0.0) - log_tail, -1e30))
    if BACKWARD:
        large, small = 1.0 / (1.0 + tail), tail / (1.0 + tail)
        q, other = tl.where(y < 0, small, large), tl.where(y < 0, large, small)
        softplus = tl.minimum(tl.maximum(y, 0.0), 1000.0) + log_tail  # beyond, `other` is 0 and y may be infinite
        slope = power * (gamma * other * softplus + q)
        if CONTIGUOUS:
            upstream = load_run(grad + flat, inside, whole, 0.0)
        else:
            upstream = tl.load(grad + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0)
        result = upstream.to(real) * scale * tl.where(hit, -slope, slope)
    else:
        result = scale * power * (tl.maximum(y, 0.0) + log_tail)
    store_run(out + flat, result.to(out.dtype.element_ty), inside, whole)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1], accurate for small x too."""
    sum = 1.0 + x
    rest = sum - 1.0
    return tl.where(rest == 0, x, tl.log(sum) * (x / tl.where(rest == 0, 1.0, rest)))
