"""float16 and bfloat16 in Numba kernels, which know neither type.

An array of 16-bit floats reaches a kernel as its bits: float16 as uint16, bfloat16 as int16 (`as_bits`).
So the element type tells which float it is, and one kernel handles every dtype:

    total += widen(source[i])            # float32 for a half type, else the value itself
    target[i] = narrow(total, target)    # rounded once, to nearest even, to the element type of `target`

Both compile to straight-line code that LLVM vectorises.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from triops._cpu.memory import as_numpy

_BITS = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}
_FLOAT16, _BFLOAT16 = types.uint16, types.int16
_I16, _I32 = ir.IntType(16), ir.IntType(32)


def as_bits(tensor: torch.Tensor) -> Any:
    """A CPU tensor's memory as a NumPy array that `widen` and `narrow` understand; copied only if not contiguous."""
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        return as_numpy(tensor)
    return as_numpy(tensor.detach().contiguous().view(bits))


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """The float32 of a half's bits; a float32 or float64 as it is."""
    if value == _FLOAT16:
        return types.float32(value), _from_float16
    if value == _BFLOAT16:
        return types.float32(value), _from_bfloat16
    if isinstance(value, types.Float):
        return value(value), _same
    raise TypingError(f"widen takes an element of a float array or of half bits, not {value}")


@intrinsic
def narrow(typing_context: Any, value: Any, target: Any) -> Any:
    """`value` as an element of the array `target`, rounded to nearest even. NaN stays NaN."""
    element = target.dtype
    if element == _FLOAT16:
        return element(types.float32, target), _to_float16
    if element == _BFLOAT16:
        return element(types.float32, target), _to_bfloat16
    if isinstance(element, types.Float):
        return element(element, target), _same
    raise TypingError(f"narrow takes an array of floats or of half bits, not {target}")


def _same(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return args[0]


def _from_float16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())


def _to_float16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), _I16)


def _from_bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), ir.FloatType())


def _to_bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    # In integers: the machine's own conversion would flush subnormals to zero.
    bits = builder.bitcast(args[0], _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), odd), _I32(16))
    is_nan = builder.fcmp_unordered("uno", args[0], args[0])
    return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)
