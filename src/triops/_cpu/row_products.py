"""Products of gathered rows in vector registers, for Numba kernels.

A library's matrix product wants its rows gathered, and its results scattered, in one call for every kernel offset: with
the few channels of a sparse convolution that takes longer than the product. Here rows are read, and sums are written,
where they lie. The vectors are spelled out because LLVM does not find them: to it a store to a sum may be one into the
inputs.
"""

import math

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from triops._cpu.vectors import LANES, Array, splat

TOGETHER = 4  # sums that share each vector loaded: they and it fit 16 registers of AVX2


def by_lanes(matrices):
    """Matrices [..., M, C] as `add_products` reads them: [all of them, groups of LANES lines of M, C, LANES], with
    zeros behind the last line. NumPy copies: torch would wake its threads, which are in the way of the kernel's."""
    *outer, lines, channels = matrices.shape
    found = np.zeros((*outer, -(-lines // LANES), channels, LANES), matrices.dtype)
    for group, first in enumerate(range(0, lines, LANES)):
        some = matrices[..., first : first + LANES, :]
        found[..., group, :, : some.shape[-2]] = some.swapaxes(-1, -2)
    return found.reshape(math.prod(outer), *found.shape[-3:])  # not -1, which NumPy cannot find of an empty array


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
        matrix = matrices.at(k, group)
        for first in range(0, len(places), sums.in_registers):
            together = slice(first, first + sums.in_registers)
            targets = [sums.at(place, lane) for place in places[together]]
            totals = [sums.variable(target) for target in targets]
            inputs = [source.at(row) for row in rows[together]]
            with cgutils.for_range(builder, source.shape[1]) as channel:
                weights = matrices.vector(builder.gep(matrix, [builder.mul(channel.index, sums.lanes)]))
                for total, row in zip(totals, inputs, strict=True):
                    sums.add_product(total, builder.load(builder.gep(row, [channel.index])), weights)
            for total, target in zip(totals, targets, strict=True):
                sums.put(total, target)
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


@intrinsic
def add_dot_products(typing_context, sums, left, at, right, places, count):
    """For every place i: sums[i, lane] += left[at + c] * right[places[i] + c], over the c < count of that lane.

    sums [., LANES]; left, right flat; places: a tuple. count: a multiple of LANES, c belongs to lane c % LANES.
    """

    def generate(context, builder, signature, args):
        sums, left, right = (Array(context, builder, signature, args, i) for i in (0, 1, 3))
        at, places, count = args[2], cgutils.unpack_tuple(builder, args[4]), args[5]
        totals = [sums.variable(sums.at(context.get_constant(types.intp, i))) for i in range(len(places))]
        with cgutils.for_range_slice(builder, count.type(0), count, count.type(LANES), count.type) as (c, _):
            values = left.vector(left.at(builder.add(at, c)))
            for total, place in zip(totals, places, strict=True):
                found = right.vector(right.at(builder.add(place, c)))
                product = builder.fmul(values, found, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        for i, total in enumerate(totals):
            sums.put(total, sums.at(context.get_constant(types.intp, i)))
        return context.get_dummy_value()

    return types.none(sums, left, types.intp, right, places, types.intp), generate


@intrinsic
def spread_products(typing_context, target, rows, weights, start, stop, source, line, lane):
    """For every start <= j < stop: target[rows[j], lanes] += weights[j] * source[line, lanes].

    The LANES lanes from `lane` on. target, source [., a multiple of LANES]; rows, weights flat.
    """

    def generate(context, builder, signature, args):
        target, rows, weights, source = (Array(context, builder, signature, args, i) for i in (0, 1, 2, 5))
        start, stop, line, lane = args[3], args[4], args[6], args[7]
        values = source.vector(source.at(line, lane))
        with cgutils.for_range(builder, stop, start=start) as pair:
            address = target.at(rows.integer(pair.index), lane)
            total = target.variable(address)
            target.add_product(total, builder.load(weights.at(pair.index)), values)
            target.put(total, address)
        return context.get_dummy_value()

    flat = target, rows, weights, types.intp, types.intp
    return types.none(*flat, source, types.intp, types.intp), generate


@intrinsic
def put_average(
    typing_context, sums, line, source, rows, row_weights, row, last_row, columns, column_weights, column, last_column,
    width, count,
):  # fmt: skip
    """sums[line, lanes] = the sum of row_weights[i] * column_weights[j] * source[rows[i] * width + columns[j], lanes],
    row <= i < last_row, column <= j < last_column, divided by `count`.

    sums, source [., LANES]; the others flat.
    """

    def generate(context, builder, signature, args):
        sums, source, rows, row_weights, columns, column_weights = (
            Array(context, builder, signature, args, i) for i in (0, 2, 3, 4, 7, 8)
        )
        line, (row, last_row), (column, last_column), (width, count) = args[1], args[5:7], args[9:11], args[11:]
        total = cgutils.alloca_once_value(builder, splat(builder, count.type(0)))
        with cgutils.for_range(builder, last_row, start=row) as i:
            begin = builder.mul(rows.integer(i.index), width)
            weight = builder.load(row_weights.at(i.index))
            with cgutils.for_range(builder, last_column, start=column) as j:
                values = source.vector(source.at(builder.add(begin, columns.integer(j.index))))
                factor = builder.fmul(weight, builder.load(column_weights.at(j.index)))
                sums.add_product(total, factor, values)
        sums.store(builder.fdiv(builder.load(total), splat(builder, count)), sums.at(line))
        return context.get_dummy_value()

    along_y = rows, row_weights, types.intp, types.intp
    along_x = columns, column_weights, types.intp, types.intp
    return types.none(sums, types.intp, source, *along_y, *along_x, types.intp, sums.dtype), generate
