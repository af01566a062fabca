"""Vectors of numbers in Numba kernels, written out where LLVM does not find them by itself.

To LLVM a store through one array may change another, so a running sum or maximum goes through memory at every step of a
loop. An intrinsic built on `Array` keeps it in registers.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 16  # numbers per vector: one register of AVX-512 in float32, two of AVX2, four of NEON
_INT32 = ir.IntType(32)


class Array:
    """A contiguous array among the arguments of an intrinsic, and vectors of its elements."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, position: int) -> None:
        array = context.make_array(signature.args[position])(context, builder, args[position])
        element = signature.args[position].dtype
        self.builder, self.data = builder, array.data
        self.shape = cgutils.unpack_tuple(builder, array.shape)  # type: ignore[no-untyped-call]
        self.kind, self.align = ir.VectorType(context.get_data_type(element), LANES), element.bitwidth // 8
        self.lanes = context.get_constant(types.intp, LANES)

    def at(self, *index: Any) -> Any:
        """The address of an element; indices that are not given are 0."""
        offset = index[0]
        for axis in range(1, len(self.shape)):
            offset = self.builder.mul(offset, self.shape[axis])
            if axis < len(index):
                offset = self.builder.add(offset, index[axis])
        return self.builder.gep(self.data, [offset])

    def integer(self, index: Any) -> Any:
        return self.builder.sext(self.builder.load(self.at(index)), self.lanes.type)

    def vector(self, address: Any) -> Any:
        found = self.builder.load(self.builder.bitcast(address, self.kind.as_pointer()))
        found.align = self.align
        return found

    def put(self, variable: Any, address: Any) -> None:
        vector = self.builder.load(variable)
        self.builder.store(vector, self.builder.bitcast(address, self.kind.as_pointer())).align = self.align

    def variable(self, address: Any) -> Any:
        """A vector that changes, and begins as the one at the address."""
        place = cgutils.alloca_once(self.builder, self.kind)  # type: ignore[no-untyped-call]
        self.builder.store(self.vector(address), place)
        return place

    def add_product(self, variable: Any, factor: Any, vector: Any) -> None:
        """variable += factor * vector, with one rounding where the processor can."""
        product = self.builder.fmul(splat(self.builder, factor), vector, flags=("contract",))
        self.builder.store(self.builder.fadd(self.builder.load(variable), product, flags=("contract",)), variable)


def splat(builder: Any, number: Any) -> Any:
    """A vector with the same number in every lane."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, number, _INT32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES))
