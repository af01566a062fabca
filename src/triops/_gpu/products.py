"""Products of matrices on tensor cores: what precision a dtype gets, and true float32 by products of bfloat16."""

from functools import cache

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._gpu.replay import switch

INTERPRETED = tl.constexpr(_gpu.INTERPRETED)  # the interpreter's products of half types are not what a GPU's are


def precision(dtype):
    """Of the products: "native" for half types, "tf32", "split" (float32 by six bfloat16 products), "ieee"."""
    if dtype in (torch.float16, torch.bfloat16):
        return "native"
    if dtype == torch.float64 or torch.version.hip or _gpu.INTERPRETED:  # AMD multiplies float32 as it is
        return "ieee"
    return "tf32" if switch(_tf32_allowed) else "split"


def _tf32_allowed():
    if getattr(torch.version, "xpu", None):
        return False  # the switch is CUDA's, and so is the rounding
    try:
        return torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # the user has set torch's newer switch, which the older one then refuses to reflect
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


@cache
def hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@triton.jit
def round_to_tf32(value):
    """To the nearest: a tensor core cuts off what TF32 does not hold, which errs more than twice as much."""
    if INTERPRETED:
        bits = (value.to(tl.int32, bitcast=True) + 0x1000) & ~0x1FFF
        return tl.where(tl.abs(value) < float("inf"), bits.to(tl.float32, bitcast=True), value)
    return tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def parts_of(value):
    """A float32 as the sum of three bfloat16. The first is cut off, not rounded: it must not become infinite."""
    cut = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = value - cut
    middle = rest.to(tl.bfloat16)
    return cut.to(tl.bfloat16), middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b"""
    if INTERPRETED and PRECISION == "native":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif PRECISION == "native":
        return tl.dot(a, b, total)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def split_product(a, b_high, b_middle, b_low, zero, REPAIR: tl.constexpr):
    """zero + a @ b in float32, b in parts; see `product_of_parts`."""
    a_high, a_middle, a_low = parts_of(a)
    return product_of_parts(a_high, a_middle, a_low, b_high, b_middle, b_low, zero, 3, REPAIR)


@triton.jit
def product_of_parts(a_high, a_middle, a_low, b_high, b_middle, b_low, zero, PARTS: tl.constexpr, REPAIR: tl.constexpr):
    """zero + a @ b in float32, both in parts, smallest products first; three that no float32 would show are left out.

    With two PARTS the low ones are left out as well, which still errs less than TF32: about 2e-5 of a product.
    An infinite value leaves NaN in its lower parts, which REPAIR drops: the product of the high ones is enough then.
    """
    small = zero
    if PARTS == 3:
        small = product(a_low, b_high, small, "native")
        small = product(a_middle, b_middle, small, "native")
        small = product(a_high, b_low, small, "native")
    small = product(a_middle, b_high, small, "native")
    small = product(a_high, b_middle, small, "native")
    if REPAIR:
        small = tl.where(small == small, small, 0.0)
    return product(a_high, b_high, small, "native")


def split(values, parts):
    """A contiguous float32 tensor as bfloat16 [parts, ...], whose sum it is; with two parts nearly so."""
    found = torch.empty((parts, *values.shape), dtype=torch.bfloat16, device=values.device)
    block = _gpu.block(1024, interpreted=65536)
    _split_kernel[(_gpu.cdiv(values.numel(), block),)](
        values, found, values.numel(), PARTS=parts, BLOCK=block, num_warps=4
    )
    return found


@_gpu.kernel
def _split_kernel(values, found, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < size
    high, middle, low = parts_of(tl.load(values + place, mask=exists, other=0.0))
    tl.store(found + place, high, mask=exists)
    tl.store(found + size + place, middle, mask=exists)
    if PARTS == 3:
        tl.store(found + 2 * tl.cast(size, tl.int64) + place, low, mask=exists)
