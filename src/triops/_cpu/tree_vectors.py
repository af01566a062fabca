"""What a search of a tree of bounding boxes computes for the 16 boxes or points of a node at once, as vectors.

LLVM makes scalar code of most of it, with a branch per lane or a check which arrays overlap; and a slice of an array,
to pass one node, costs two atomic operations.
"""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from triops._cpu.vectors import LANES, Array, splat

MOST = 2**31 - 1  # a rank that no box has
_INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (16, 32, 64))
_RANKS, _KEYS = ir.VectorType(_INT32, LANES), ir.VectorType(_INT64, LANES)


@intrinsic
def box_distances(typing_context: Any, boxes: Any, node: Any, x: Any, y: Any, z: Any, waiting: Any, level: Any) -> Any:
    """waiting[level, lane] = the bits of the squared distance to a box, as float32: rounded down from float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        boxes, waiting = (Array(context, builder, signature, args, i) for i in (0, 5))
        waiting.store(_bits(builder, _to_boxes(builder, boxes, args[1], args[2:5])), waiting.at(args[6]))
        return context.get_dummy_value()

    real = boxes.dtype
    return types.none(boxes, types.intp, real, real, real, waiting, types.intp), generate


@intrinsic
def lowest_in_ball(
    typing_context: Any, boxes: Any, lowest: Any, node: Any, x: Any, y: Any, z: Any, far: Any, waiting: Any, level: Any
) -> Any:
    """waiting[level, lane] = the bits of lowest[node, lane], as float32, where the squared distance to a box is 0 or
    less than `far`, or MOST."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        boxes, lowest, waiting = (Array(context, builder, signature, args, i) for i in (0, 1, 7))
        apart = _to_boxes(builder, boxes, args[2], args[3:6])
        inside = builder.or_(
            builder.fcmp_ordered("<", apart, splat(builder, args[6])),
            builder.fcmp_ordered("==", apart, _all(apart.type, 0.0)),
        )
        ranks = builder.select(inside, _as_float(builder, lowest.vector(lowest.at(args[2]))), _all(_RANKS, MOST))
        waiting.store(ranks, waiting.at(args[8]))
        return context.get_dummy_value()

    real = boxes.dtype
    return types.none(boxes, lowest, types.intp, real, real, real, real, waiting, types.intp), generate


@intrinsic
def first(typing_context: Any, waiting: Any, level: Any) -> Any:
    """The least of waiting[level], times 16, and the lane where it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        waiting = Array(context, builder, signature, args, 0)
        ranks = waiting.vector(waiting.at(args[1]))
        name = f"llvm.vector.reduce.smin.v{LANES}i32"
        kind = ir.FunctionType(_INT32, [_RANKS])
        least = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [ranks])  # type: ignore[no-untyped-call]
        lane = _lowest_bit(builder, _mask(builder, builder.icmp_signed("==", ranks, splat(builder, least))))
        return builder.add(builder.mul(builder.sext(least, _INT64), _INT64(LANES)), lane)

    return types.int64(waiting, types.intp), generate


@intrinsic
def keys_of_points(typing_context: Any, points: Any, numbers: Any, node: Any, x: Any, y: Any, z: Any, keys: Any) -> Any:
    """keys[lane] = the bits of the squared distance to a point, in float32, << 32 | its number"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        points, numbers, keys = (Array(context, builder, signature, args, i) for i in (0, 1, 6))
        ranks = _bits(builder, _to_points(builder, points, args[2], args[3:6]))
        keys.store(_keys(builder, ranks, numbers.vector(numbers.at(args[2]))), keys.at(_INT64(0)))
        return context.get_dummy_value()

    real = points.dtype
    return types.none(points, numbers, types.intp, real, real, real, keys), generate


@intrinsic
def keys_in_ball(
    typing_context: Any, points: Any, numbers: Any, node: Any, x: Any, y: Any, z: Any, near: Any, far: Any, keys: Any
) -> Any:
    """keys[lane] = the bits of the number of a point, as float32, << 32 | its number, where the squared distance d is 0
    or near <= d < far, or MOST << 32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        points, numbers, keys = (Array(context, builder, signature, args, i) for i in (0, 1, 8))
        apart, numbers = _to_points(builder, points, args[2], args[3:6]), numbers.vector(numbers.at(args[2]))
        between = builder.and_(
            builder.fcmp_ordered(">=", apart, splat(builder, args[6])),
            builder.fcmp_ordered("<", apart, splat(builder, args[7])),
        )
        inside = builder.or_(between, builder.fcmp_ordered("==", apart, _all(apart.type, 0.0)))
        none = _all(_KEYS, MOST << 32)
        keys.store(
            builder.select(inside, _keys(builder, _as_float(builder, numbers), numbers), none), keys.at(_INT64(0))
        )
        return context.get_dummy_value()

    real = points.dtype
    return types.none(points, numbers, types.intp, real, real, real, real, real, keys), generate


@intrinsic
def points_within(
    typing_context: Any, points: Any, node: Any, x: Any, y: Any, z: Any, furthest: Any, apart: Any
) -> Any:
    """apart[lane] = the squared distances to points. -> a bit per lane where it is not more than `furthest`"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        points, apart = (Array(context, builder, signature, args, i) for i in (0, 6))
        distances = _to_points(builder, points, args[1], args[2:5])
        apart.store(distances, apart.at(_INT64(0)))
        return _mask(builder, builder.fcmp_ordered("<=", distances, splat(builder, args[5])))

    real = points.dtype
    return types.int64(points, types.intp, real, real, real, real, apart), generate


@intrinsic
def lowest_bit(typing_context: Any, mask: Any) -> Any:
    """The place of the lowest bit of a mask that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _lowest_bit(builder, args[0])

    return types.int64(types.int64), generate


def _to_points(builder: Any, points: Array, node: Any, query: Any) -> Any:
    """(dx*dx + dy*dy) + dz*dz, of which no two operations are fused"""
    return _squares(builder, [
        builder.fsub(splat(builder, query[axis]), points.vector(points.at(node, _INT64(axis)))) for axis in range(3)
    ])  # fmt: skip


def _to_boxes(builder: Any, boxes: Array, node: Any, query: Any) -> Any:
    """As `_to_points`, of how far the query lies outside of a box along each axis."""
    outside = []
    for axis in range(3):
        value = splat(builder, query[axis])
        low, high = (boxes.vector(boxes.at(node, _INT64(side + axis))) for side in (0, 3))
        below, above = builder.fsub(low, value), builder.fsub(value, high)
        apart = builder.select(builder.fcmp_ordered(">", below, above), below, above)
        zero = _all(apart.type, 0.0)
        outside.append(builder.select(builder.fcmp_ordered(">", apart, zero), apart, zero))
    return _squares(builder, outside)


def _squares(builder: Any, apart: list[Any]) -> Any:
    x, y, z = (builder.fmul(a, a) for a in apart)
    return builder.fadd(builder.fadd(x, y), z)


def _bits(builder: Any, numbers: Any) -> Any:
    """Of numbers from 0 up: integers in the same order, of float64 those of a float32 that is less.

    A float64 that is finite gets no more than the largest float32; those of nodes that do not exist are infinite.
    """
    if numbers.type.element == ir.FloatType():
        return builder.bitcast(numbers, _RANKS)
    kind = ir.VectorType(ir.FloatType(), LANES)
    below = builder.sub(builder.bitcast(builder.fptrunc(numbers, kind), _RANKS), _all(_RANKS, 1))
    zero = _all(_RANKS, 0)
    below = builder.select(builder.icmp_signed(">", below, zero), below, zero)
    finite = builder.fcmp_ordered("<", numbers, _all(numbers.type, math.inf))
    return builder.select(finite, below, _all(_RANKS, MOST))


def _as_float(builder: Any, numbers: Any) -> Any:
    """The bits of integers from 0 up as float32: in the same order, equal where they are close."""
    return builder.bitcast(builder.sitofp(numbers, ir.VectorType(ir.FloatType(), LANES)), _RANKS)


def _keys(builder: Any, ranks: Any, numbers: Any) -> Any:
    high, low = (builder.zext(part, _KEYS) for part in (ranks, numbers))
    return builder.or_(builder.shl(high, _all(_KEYS, 32)), low)


def _mask(builder: Any, lanes: Any) -> Any:
    return builder.zext(builder.bitcast(lanes, _INT16), _INT64)


def _lowest_bit(builder: Any, mask: Any) -> Any:
    return builder.cttz(mask, ir.Constant(ir.IntType(1), 1))


def _all(kind: Any, number: Any) -> Any:
    return ir.Constant(kind, [number] * LANES)
