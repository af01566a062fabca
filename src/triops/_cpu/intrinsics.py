"""Small functions that Numba lacks or compiles badly: minimum, maximum, popcount, prefetch."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from triops._cpu.jit import jit


@jit
def minimum(a: Any, b: Any) -> Any:
    return a if a < b else b


@jit
def maximum(a: Any, b: Any) -> Any:
    return a if a > b else b


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Start loading array[index] of a flat array, where the machine's own prefetching cannot follow.

    The index may lie anywhere: a prefetch never faults.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        name = "llvm.prefetch.p0i8"
        function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        builder.call(function, [address, i32(0), i32(3), i32(1)])  # to read, into all caches, as data
        return context.get_dummy_value()

    return types.none(array, types.uint64), generate


@jit
def popcount(x: Any) -> Any:
    """Bits of a uint64; LLVM knows the pattern and makes one instruction of it."""
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))
