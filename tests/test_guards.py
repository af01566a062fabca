"""Guarded memory catches what it should: faults are planted in kernels of every kind."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support import run_guarded

from triops._cpu.jit import jit
from triops._op import OPERATORS
from triops.acceptance import runner
from triops.acceptance.guards import guarded_memory

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def write_beside(tensor: torch.Tensor, elements: int, byte: int = 1) -> None:
    """Write elements after a tensor, or before it where negative, as a kernel with a wrong index would."""
    size = tensor.element_size()
    begin = tensor.numel() * size if elements > 0 else elements * size
    ctypes.memset(tensor.data_ptr() + begin, byte, abs(elements) * size)


ALLOCATIONS = {
    "torch.empty": lambda t: torch.empty(3, 5, dtype=t.dtype),
    "torch.empty_like": lambda t: torch.empty_like(t),
    "torch.empty_strided": lambda t: torch.empty_strided((5, 3), (1, 5), dtype=t.dtype),
    "torch.zeros": lambda t: torch.zeros((3, 5), dtype=t.dtype),
    "torch.full": lambda t: torch.full((3,), 1, dtype=t.dtype),
    "Tensor.new_empty": lambda t: t.new_empty(4),
    "Tensor.new_zeros": lambda t: t.new_zeros((2, 1)),
    "np.empty": lambda t: torch.from_numpy(np.empty((3, 5), np.float32)),
    "np.empty_like": lambda t: torch.from_numpy(np.empty_like(t.float().numpy())),
    "np.zeros": lambda t: torch.from_numpy(np.zeros(3, np.int64)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("side", [1, -1])
def test_one_element_written_beside_a_buffer_is_seen(name: str, dtype: torch.dtype, side: int) -> None:
    source = torch.ones(2, 3, dtype=dtype)
    with guarded_memory() as guards:
        buffer = ALLOCATIONS[name](source)
        buffer.fill_(1)
        assert guards.damage() == []
        write_beside(buffer, side)
        (found,) = guards.damage()
    assert f"bytes written {'after' if side > 0 else 'before'} " in found
    assert name in found


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_written_beside_a_buffer_is_seen(dtype: torch.dtype) -> None:
    with guarded_memory() as guards:
        buffer = torch.zeros(3, dtype=dtype)
        buffer.as_strided((1,), (1,), buffer.storage_offset() + 3).fill_(float("nan"))
        assert guards.damage()


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_inputs_keep_values_strides_and_identity_and_get_the_address_asked_for(offset: int) -> None:
    values = (
        torch.arange(6.0).view(2, 3).t(), torch.ones(1).expand(4), torch.zeros(0, 3), torch.tensor(5),
        torch.rand(2, 4, 3, 5).contiguous(memory_format=torch.channels_last), 7, "max", None, [1, 2],
    )  # fmt: skip
    values = (*values, values[0])
    with guarded_memory() as guards:
        placed = guards.place(values, offset=offset)
        assert guards.damage() == []
    assert placed[0] is placed[-1]
    assert placed[5:9] == values[5:9]
    for got, value in zip(placed, values, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(got, value)
            assert (got.dtype, got.stride()) == (value.dtype, value.stride())
            assert got.data_ptr() % 64 == (offset * value.element_size()) % 64 or value.numel() == 0


def test_a_changed_input_is_named() -> None:
    with guarded_memory() as guards:
        (points,) = guards.place((torch.rand(3, 4),), names=("points",))
        points[1, 2] = 5
        assert guards.damage() == ["input points was changed"]


def test_what_empty_returns_is_nonsense_and_what_zeros_returns_is_zero() -> None:
    with guarded_memory():
        assert torch.empty(3).isnan().all()
        assert np.isnan(np.empty(3)).all()
        assert (np.empty(3, np.int32) > 10**8).all()
        assert (torch.empty(3, dtype=torch.int64) > 10**8).all()
        assert not torch.zeros(3).any()
        assert not np.zeros(3).any()


def test_other_threads_allocate_as_ever_and_everything_is_put_back() -> None:
    before = torch.empty, np.empty, torch.Tensor.new_empty
    with guarded_memory():
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.empty(3).storage_offset()))
        thread.start()
        thread.join()
        assert seen == [0]
        assert torch.empty(3).storage_offset() > 0
    assert (torch.empty, np.empty, torch.Tensor.new_empty) == before


# Faults of kernels, as launchers would launch them


@jit
def _write(values, out, past):
    for i in range(values.shape[0] + past):
        out[i] = values[0]


@jit
def _sum_into_unwritten_scratch(values):
    scratch = np.empty(4096, np.int64)
    for i in range(values.shape[0]):
        scratch[i] += 1
    return scratch[0]


def test_a_numba_kernel_that_writes_one_element_too_many_is_caught() -> None:
    for past in (0, 1, 2):
        with guarded_memory() as guards:
            values, out = torch.ones(100).numpy(), np.empty(100, np.float32)
            _write(values, out, past)
            assert bool(guards.damage()) == (past > 0)


def test_scratch_memory_that_a_numba_kernel_reads_before_it_writes_is_nonsense() -> None:
    import platform

    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc fills what malloc returns")
    with guarded_memory():
        assert _sum_into_unwritten_scratch(np.ones(4096)) > 10**9


def test_a_triton_kernel_without_a_mask_is_caught() -> None:
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def _double_kernel(x, out, count, MASKED: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        if MASKED:
            tl.store(out + i, 2 * tl.load(x + i, mask=i < count), mask=i < count)
        else:
            tl.store(out + i, 2 * tl.load(x + i))

    for masked in (True, False):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with guarded_memory() as guards:
            x, out = torch.ones(13, device=device), torch.empty(13, device=device)
            _double_kernel[(1,)](x, out, 13, masked, 16)
            assert bool(guards.damage()) == (not masked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only Triton's interpreter shows what a kernel reads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int8])
def test_a_triton_kernel_that_reads_what_nobody_wrote_is_caught(dtype: torch.dtype) -> None:
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def _copy_kernel(scratch, out, written, read, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(scratch + i, i.to(out.dtype.element_ty), mask=i < written)
        tl.debug_barrier()
        value = tl.load(scratch + i, mask=i < read, other=0)
        tl.store(out + i, tl.where(i < written, value, 0))

    for written, read in ((13, 13), (13, 5), (13, 16)):
        with guarded_memory() as guards:
            scratch, out = (torch.empty(16, dtype=dtype) for _ in range(2))
            _copy_kernel[(1,)](scratch, out, written, read, 16)
            name = f"{str(dtype).removeprefix('torch.')}[16] of torch.empty"
            expected = [f"{read - written} elements of {name} read before they were written"] if read > written else []
            assert guards.damage() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="only Triton's interpreter shows what a kernel reads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int8])
def test_a_triton_kernel_that_reads_beside_a_buffer_is_caught(dtype: torch.dtype) -> None:
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def _move_kernel(x, out, begin, end, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + begin + i, mask=begin + i < end, other=0))

    for begin, end in ((0, 13), (0, 0), (-2, 13), (5, 16), (13, 14), (-1, 14)):
        with guarded_memory() as guards:
            (x,) = guards.place((torch.ones(13).to(dtype),), names=("x",))
            _move_kernel[(1,)](x, torch.empty(16, dtype=dtype), begin, end, 16)
            beside = max(end - 13, 0) + max(-begin, 0)
            assert guards.damage() == ([f"{beside} elements read beside input x"] if beside else [])


def test_the_check_of_an_operator_fails_where_its_kernel_writes_beside_a_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = OPERATORS["points_in_boxes"]
    right = op.kernel("cpu")

    def writes_beside(*args: Any) -> torch.Tensor:
        out: torch.Tensor = right(*args)
        write_beside(torch.zeros(8), 2)
        return out

    def changes_its_input(points: torch.Tensor, *args: Any) -> torch.Tensor:
        out: torch.Tensor = right(points, *args)
        points.view(-1)[-1] += 1
        return out

    task = next(t for t in runner.tasks(["points_in_boxes"], quick=True) if t.scale == "general")
    for kernel, words in (
        (writes_beside, "8 bytes written after float32[8] of torch.zeros, 1 to 8 from its edge"),
        (changes_its_input, "input points was changed"),
    ):
        monkeypatch.setitem(op._kernels, "cpu", kernel)
        (result,) = runner.check([task], "cpu")
        assert result.failures == [words]
        with pytest.raises(AssertionError, match="points_in_boxes on cpu: "):
            run_guarded("cpu", "points_in_boxes", task.make())
