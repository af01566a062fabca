"""Products of gathered rows in vector registers, for Numba kernels.

A library's matrix product wants its rows gathered, and its results scattered, in one call for every kernel offset: with
the few channels of a sparse convolution that takes longer than the product. Here rows are read, and sums are written,
where they lie. The vectors are spelled out because LLVM does not find them: to it a store to a sum may be one into the
inputs.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # of a vector: one register of AVX-512, two of AVX2, four of NEON
TOGETHER = 4  # sums that share each vector loaded: they and it fit 16 registers of AVX2


@intrinsic
def add_products(typing_context, sums, places, source, rows, matrices, k, group):
    """For every place and its row: sums[place, lanes] += source[row] @ matrices[k, group], the group's lanes.

    places, rows: tuples of one length. sums [., groups * LANES], source [., C], matrices [K, groups, C, LANES].
    """

    def generate(context, builder, signature, args):
        sums, source, matrices = (Array(context, builder, signature, args, i) for i in (0, 2, 4))
        places, rows = (cgutils.unpack_tuple(builder, args[i]) for i in (1, 3))
        k, group = args[5:]
        lane = builder.mul(group, sums.lanes)
        totals = [sums.variable(sums.at(place, lane)) for place in places]
        inputs = [source.at(row) for row in rows]
        matrix = matrices.at(k, group)
        with cgutils.for_range(builder, source.shape[1]) as channel:
            weights = matrices.vector(builder.gep(matrix, [builder.mul(channel.index, sums.lanes)]))
            for total, row in zip(totals, inputs, strict=True):
                sums.add_product(total, builder.load(builder.gep(row, [channel.index])), weights)
        for total, place in zip(totals, places, strict=True):
            sums.put(total, sums.at(place, lane))
        return context.get_dummy_value()

    return types.none(sums, places, source, rows, matrices, types.intp, types.intp), generate


@intrinsic
def add_outer_products(typing_context, sums, lines, lane, left, left_rows, right, right_rows, start, stop):
    """For every line: sums[line, lanes] += left[left_rows[j], line] * right[right_rows[j], lanes], start <= j < stop,
    the LANES lanes from `lane` on.

    lines: a tuple. sums, right [., a multiple of LANES], left [., C].
    """

    def generate(context, builder, signature, args):
        sums, left, left_rows, right, right_rows = (
            Array(context, builder, signature, args, i) for i in (0, 3, 4, 5, 6)
        )
        lines, lane, (start, stop) = cgutils.unpack_tuple(builder, args[1]), args[2], args[7:]
        totals = [sums.variable(sums.at(line, lane)) for line in lines]
        with cgutils.for_range(builder, stop, start=start) as pair:
            values = right.vector(right.at(right_rows.integer(pair.index), lane))
            row = left_rows.integer(pair.index)
            for total, line in zip(totals, lines, strict=True):
                sums.add_product(total, builder.load(left.at(row, line)), values)
        for total, line in zip(totals, lines, strict=True):
            sums.put(total, sums.at(line, lane))
        return context.get_dummy_value()

    of_rows = left_rows, right, right_rows
    return types.none(sums, lines, types.intp, left, *of_rows, types.intp, types.intp), generate


class Array:
    """An array among the arguments of an intrinsic, and vectors of its elements."""

    def __init__(self, context, builder, signature, args, position):
        array = context.make_array(signature.args[position])(context, builder, args[position])
        element = signature.args[position].dtype
        self.builder, self.data = builder, array.data
        self.shape = cgutils.unpack_tuple(builder, array.shape)
        self.kind, self.align = ir.VectorType(context.get_data_type(element), LANES), element.bitwidth // 8
        self.lanes = context.get_constant(types.intp, LANES)

    def at(self, *index):
        """The address of an element; 0 for the indices that are not given."""
        offset = index[0]
        for axis in range(1, len(self.shape)):
            offset = self.builder.mul(offset, self.shape[axis])
            if axis < len(index):
                offset = self.builder.add(offset, index[axis])
        return self.builder.gep(self.data, [offset])

    def integer(self, index):
        return self.builder.sext(self.builder.load(self.at(index)), self.lanes.type)

    def vector(self, address):
        found = self.builder.load(self.builder.bitcast(address, self.kind.as_pointer()))
        found.align = self.align
        return found

    def put(self, variable, address):
        vector = self.builder.load(variable)
        self.builder.store(vector, self.builder.bitcast(address, self.kind.as_pointer())).align = self.align

    def variable(self, address):
        """A vector that changes, and begins as the one at the address."""
        place = cgutils.alloca_once(self.builder, self.kind)
        self.builder.store(self.vector(address), place)
        return place

    def add_product(self, variable, factor, vector):
        """variable += factor * vector, with one rounding where the processor can."""
        nothing, number = ir.Constant(self.kind, ir.Undefined), ir.IntType(32)
        factors = self.builder.insert_element(nothing, factor, number(0))
        everywhere = ir.Constant(ir.VectorType(number, LANES), [0] * LANES)
        factors = self.builder.shuffle_vector(factors, nothing, everywhere)
        product = self.builder.fmul(factors, vector, flags=("contract",))
        self.builder.store(self.builder.fadd(self.builder.load(variable), product, flags=("contract",)), variable)
