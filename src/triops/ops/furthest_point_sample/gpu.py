"""furthest_point_sample on GPU: several programs per cloud, which agree on every sample through memory.

A program keeps the coordinates of its points, and their distances to the nearest sample, in registers; what does not
fit is streamed. For every sample it writes its own furthest point into a slot, and reads the slots of the others until
all of them are of this step. A slot is one 64-bit word that holds distance, index and step, so nothing has to be
ordered in memory. Two slots per program, used in turn, are enough: nobody is more than one step ahead.

Programs that wait for each other must run at once. A cooperative launch guarantees it, whatever else is on the GPU, or
fails; there are never more of them than multiprocessors, each of which holds at least one.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from triops import _gpu
from triops._dtypes import compute_dtype

MOST_PROGRAMS = 32  # per cloud: one warp reads all slots, and no others have to agree on what it saw
BLOCK, WARPS = _gpu.block(2048, interpreted=512), 4  # 8 warps take half as long again on an H200
SMALL_BLOCK, SMALL_WARPS = _gpu.block(1024, interpreted=512), 4
LEAST_POINTS = 512  # of a program
MULTIPROCESSORS = 132  # where no GPU is there to ask: kernels are compiled only

_NO_INDEX = tl.constexpr(2**30 - 1)
_MOST_PROGRAMS = tl.constexpr(MOST_PROGRAMS)


def furthest_point_sample(points, offsets, sample_offsets, count, longest, within):
    clouds, (total, width) = offsets.shape[0] - 1, points.shape
    out = torch.zeros(count, dtype=torch.int32, device=points.device)
    if count == 0 or clouds == 0:
        return out
    real = compute_dtype(points.dtype)
    kind = 0 if width == 3 and real == torch.float32 else 1
    points = points.contiguous() if kind == 0 else points.t().contiguous()
    _launch(points, offsets, sample_offsets, out, total, total, count, width, within, clouds, longest, kind, real)
    return out


def furthest_point_sample_with_dist(distances, count):
    clouds, length, _ = distances.shape
    out = torch.zeros((clouds, count), dtype=torch.int32, device=distances.device)
    if out.numel() == 0 or length == 0:
        return out
    offsets, samples = (torch.arange(clouds + 1, device=distances.device) * n for n in (length, count))
    real = compute_dtype(distances.dtype)
    _launch(distances.contiguous(), offsets, samples, out, clouds * length, length, clouds * count, 1, True, clouds,
            length, 2, real)  # fmt: skip
    return out


def _launch(values, offsets, sample_offsets, out, total, stride, count, width, within, clouds, longest, kind, real):
    """kind 0: values [total, 3], in registers. 1: values [width, total]. 2: distances [total, stride]."""
    device = values.device
    nearest = torch.empty(total, dtype=real, device=device)
    slots = torch.zeros((clouds, 2, MOST_PROGRAMS), dtype=torch.int64, device=device)
    offsets, sample_offsets = offsets.contiguous(), sample_offsets.contiguous()
    args = (values, offsets, sample_offsets, slots, nearest, out, total, stride, count, width, int(within))
    programs = 1 if real == torch.float64 else _programs(device, clouds, longest)

    def alone():
        _sample_kernel[(clouds,)](
            *args, 1, BLOCK=SMALL_BLOCK, KIND=kind, TOGETHER=False, num_warps=SMALL_WARPS, enable_fp_fusion=False
        )

    def together():
        _sample_kernel[(clouds * max(programs, 2),)](
            *args, max(programs, 2), BLOCK=BLOCK, KIND=kind, TOGETHER=True, num_warps=WARPS, enable_fp_fusion=False,
            launch_cooperative_grid=True,
        )  # fmt: skip

    if real == torch.float32:
        keys = (values.dtype, offsets.dtype, sample_offsets.dtype, kind)
        _gpu.compile_once(("furthest_point_sample", *keys), lambda: (alone(), together()))
    (alone if programs == 1 else together)()


def _programs(device, clouds, longest):
    """How many share a cloud."""
    if _gpu.INTERPRETED or device.type == "xpu":  # programs run one after the other, or nobody has tried
        return 1
    return max(1, min(MOST_PROGRAMS, _multiprocessors(device) // clouds, longest // LEAST_POINTS))


@lru_cache
def _multiprocessors(device):
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@_gpu.kernel
def _sample_kernel(
    values, offsets, sample_offsets, slots, nearest, out, total, stride, count, width, within, programs,
    BLOCK: tl.constexpr, KIND: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    cloud = tl.program_id(0) // programs
    program = tl.program_id(0) - cloud * programs
    begin, end = _range(offsets, cloud, total)
    first, last = _range(sample_offsets, cloud, count)
    length = end - begin
    slots += cloud.to(tl.int64) * (2 * _MOST_PROGRAMS)
    if length == 0:
        for k in range(first, last):
            tl.store(out + k, within - 1)
    else:
        lane = tl.arange(0, BLOCK)
        sample = tl.cast(0, tl.int32)
        # what this program keeps in registers
        x, y, z, kept = _load_points(values, begin, program * BLOCK + lane, length, BLOCK, KIND)
        for k in range(first, last):
            most = tl.cast(float("-inf"), nearest.dtype.element_ty)
            index = tl.cast(_NO_INDEX, tl.int32)
            if KIND == 0:
                if k > first:
                    center = values + (begin + sample).to(tl.int64) * 3
                    dx = x - tl.load(center).to(tl.float32)
                    dy = y - tl.load(center + 1).to(tl.float32)
                    dz = z - tl.load(center + 2).to(tl.float32)
                    distance = (dx * dx + dy * dy) + dz * dz
                    kept = tl.where(distance < kept, distance, kept)
                most, index = _furthest(kept, program * BLOCK + lane, length)
            start = program + programs if KIND == 0 else program
            for part in range(start * BLOCK, length, programs * BLOCK):
                i = part + lane
                inside = i < length
                at = (begin + i).to(tl.int64)
                if k == first:
                    valid = inside
                    if KIND == 2:
                        own = tl.load(values + at * stride + i, mask=inside, other=0.0).to(nearest.dtype.element_ty)
                        valid = valid & (own - own == 0)
                    else:
                        for d in range(width):
                            column = _value(values, at, d, total, inside, nearest, KIND)
                            valid = valid & (column - column == 0)
                    far = tl.where(valid, float("inf"), float("-inf")).to(nearest.dtype.element_ty)
                else:
                    far = tl.load(nearest + at, mask=inside, other=0.0)
                    if KIND == 2:
                        row = values + (begin + sample).to(tl.int64) * stride
                        distance = tl.load(row + i, mask=inside, other=0.0).to(nearest.dtype.element_ty)
                    else:
                        distance = tl.zeros([BLOCK], nearest.dtype.element_ty)
                        for d in range(width):
                            center = _value(values, (begin + sample).to(tl.int64), d, total, True, nearest, KIND)
                            difference = _value(values, at, d, total, inside, nearest, KIND) - center
                            distance = distance + difference * difference
                    far = tl.where(distance < far, distance, far)
                tl.store(nearest + at, far, mask=inside)
                part_most, part_index = _furthest(far, i, length)
                better = (part_most > most) | (index == _NO_INDEX)  # parts ascend: of equal ones the first stays
                most = tl.where(better, part_most, most)
                index = tl.where(better, part_index, index)
            if TOGETHER:
                index = _agree(slots, most, index, k - first + 1, program, programs)
            sample = index
            if program == 0:
                tl.store(out + k, sample + tl.where(within != 0, 0, begin))


@triton.jit
def _range(offsets, cloud, total):
    """Where a cloud begins and ends, whatever the offsets hold."""
    begin = tl.minimum(tl.maximum(tl.load(offsets + cloud).to(tl.int64), 0), total)
    end = tl.minimum(tl.maximum(tl.load(offsets + cloud + 1).to(tl.int64), begin), total)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def _load_points(values, begin, i, length, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """-> x, y, z of points i, and their distance to no sample: infinite, or -infinite for a point that is not valid"""
    x = tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK], tl.float32)
    z = tl.zeros([BLOCK], tl.float32)
    kept = tl.zeros([BLOCK], tl.float32)
    if KIND == 0:
        inside = i < length
        at = values + (begin + i).to(tl.int64) * 3
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(at + 2, mask=inside, other=0.0).to(tl.float32)
        finite = inside & (x - x == 0) & (y - y == 0) & (z - z == 0)
        kept = tl.where(finite, float("inf"), float("-inf"))
    return x, y, z, kept


@triton.jit
def _value(values, at, d, total, inside, nearest, KIND: tl.constexpr):
    """Column d of points `at`."""
    if KIND == 0:
        found = tl.load(values + at * 3 + d, mask=inside, other=0.0)
    else:
        found = tl.load(values + tl.cast(d, tl.int64) * total + at, mask=inside, other=0.0)
    return found.to(nearest.dtype.element_ty)


@triton.jit
def _furthest(distance, i, length):
    """The largest distance, and the lowest of the indices i that have it. _NO_INDEX where none is below `length`."""
    distance = tl.where(i < length, distance, float("-inf"))
    most = tl.max(distance, 0)
    return most, tl.min(tl.where((distance == most) & (i < length), i, _NO_INDEX), 0)


@triton.jit
def _agree(slots, most, index, step, program, programs):
    """The furthest point of all programs of a cloud. Every program gets the same one. Steps count from 1."""
    bits = tl.where(most == 0, 0.0, most).to(tl.int32, bitcast=True)  # 0 and -0 are equal
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ordered as the distances are
    tag = step & 3  # the slot last held step - 2, and 0 before the first two
    # a lower index gives a higher key
    key = (ascending.to(tl.int64) << 32) | ((index ^ _NO_INDEX).to(tl.int64) << 2) | tag
    slots += (step & 1) * _MOST_PROGRAMS
    tl.atomic_xchg(slots + program, key, sem="relaxed")
    lane = tl.arange(0, _MOST_PROGRAMS)
    mine = lane < programs
    keys = tl.load(slots + lane, mask=mine, other=-1, volatile=True)
    while tl.max((mine & ((keys & 3) != tag)).to(tl.int32), 0) > 0:
        keys = tl.load(slots + lane, mask=mine, other=-1, volatile=True)
    best = tl.max(tl.where(mine, keys, -(2**63)), 0)
    return ((best >> 2) & _NO_INDEX).to(tl.int32) ^ _NO_INDEX
