"""Vectors of numbers in Numba kernels, written out where LLVM does not find them by itself.

To LLVM a store through one array may change another, so a running sum or maximum goes through memory at every step of a
loop. An intrinsic built on `Array` keeps it in registers.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from triops._cpu.jit import jit

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
        registers = LANES * element.bitwidth // 256
        self.in_registers = (16 - registers - 1) // registers  # sums, beside a vector and a factor, in AVX2's 16

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

    def store(self, vector: Any, address: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(address, self.kind.as_pointer())).align = self.align

    def put(self, variable: Any, address: Any) -> None:
        self.store(self.builder.load(variable), address)

    def variable(self, address: Any) -> Any:
        """A vector that changes, and begins as the one at the address."""
        place = cgutils.alloca_once(self.builder, self.kind)  # type: ignore[no-untyped-call]
        self.builder.store(self.vector(address), place)
        return place

    def add_product(self, variable: Any, factor: Any, vector: Any) -> None:
        """variable += factor * vector, with one rounding where the processor can."""
        product = self.builder.fmul(splat(self.builder, factor), vector, flags=("contract",))
        self.builder.store(self.builder.fadd(self.builder.load(variable), product, flags=("contract",)), variable)


@intrinsic
def copy_vector(typing_context: Any, target: Any, to: Any, source: Any, at: Any) -> Any:
    """target[to : to + LANES] = source[at : at + LANES], flat arrays of one dtype."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source = (Array(context, builder, signature, args, i) for i in (0, 2))
        target.store(source.vector(source.at(args[3])), target.at(args[1]))
        return context.get_dummy_value()

    return types.none(target, types.intp, source, types.intp), generate


def splat(builder: Any, number: Any) -> Any:
    """A vector with the same number in every lane."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, number, _INT32(0))
    return builder.shuffle_vector(first, undefined, _lanes([0] * LANES))


def _lanes(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_INT32, LANES), numbers)


@jit
def transpose(rows: int, columns: int, source: Any, first: int, stride: int, target: Any, to: int, step: int) -> None:
    """target[to + c * step + r] = source[first + r * stride + c] for flat arrays, all r < rows and c < columns."""
    whole_rows, whole_columns = rows // LANES * LANES, columns // LANES * LANES
    for r in range(0, whole_rows, LANES):
        for c in range(0, whole_columns, LANES):
            _transpose_square(source, first + r * stride + c, stride, target, to + c * step + r, step)  # type: ignore[call-arg]
    for c in range(columns):
        for r in range(whole_rows if c < whole_columns else 0, rows):
            target[to + c * step + r] = source[first + r * stride + c]


@intrinsic
def _transpose_square(
    typing_context: Any, source: Any, first: Any, stride: Any, target: Any, to: Any, step: Any
) -> Any:
    """As `transpose`, of LANES rows and columns, in registers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (Array(context, builder, signature, args, i) for i in (0, 3))
        (first, stride), (to, step) = args[1:3], args[4:]
        number = first.type
        rows = [source.vector(source.at(builder.add(first, builder.mul(stride, number(i))))) for i in range(LANES)]
        # Exchange the off-diagonal halves of ever smaller squares.
        half = LANES // 2
        while half:
            left = _lanes([LANES + j - half if j & half else j for j in range(LANES)])
            right = _lanes([LANES + j if j & half else j + half for j in range(LANES)])
            for i in (i for i in range(LANES) if i & half == 0):
                upper, lower = rows[i], rows[i + half]
                rows[i] = builder.shuffle_vector(upper, lower, left)
                rows[i + half] = builder.shuffle_vector(upper, lower, right)
            half //= 2
        for i, row in enumerate(rows):
            target.store(row, target.at(builder.add(to, builder.mul(step, number(i)))))
        return context.get_dummy_value()

    return types.none(source, types.intp, types.intp, target, types.intp, types.intp), generate


@intrinsic
def take_maxima(typing_context: Any, best: Any, places: Any, line: Any, rows: Any, begin: Any, end: Any) -> Any:
    """For every lane: best[line] = rows[r] and places[line] = r, where rows[r] is higher, for begin <= r < end.

    best, rows [., LANES] of floats, places likewise of int32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        best, places, rows = (Array(context, builder, signature, args, i) for i in (0, 1, 3))
        line, begin, end = args[2], args[4], args[5]
        highest, place = best.variable(best.at(line)), places.variable(places.at(line))
        with cgutils.for_range(builder, end, start=begin) as row:
            found, old = rows.vector(rows.at(row.index)), builder.load(highest)
            higher = builder.fcmp_ordered(">", found, old)
            here = splat(builder, builder.trunc(row.index, _INT32))
            builder.store(builder.select(higher, found, old), highest)
            builder.store(builder.select(higher, here, builder.load(place)), place)
        best.put(highest, best.at(line))
        places.put(place, places.at(line))
        return context.get_dummy_value()

    return types.none(best, places, types.intp, rows, types.intp, types.intp), generate
