"""The fast launch path of `_gpu.Kernel`, without a GPU: what is compiled anew, and what a kernel is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triops import _gpu  # noqa: E402


class Jit:
    """In place of Triton's compiler: counts what it compiles, and keeps what its kernels are launched with."""

    arg_names = ("tensor", "count", "size", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **options: Any) -> Any:
            self.compiled.append((args, options))
            run = lambda *given: self.launched.append(given)  # noqa: E731
            return SimpleNamespace(function="function", packed_metadata="metadata", run=run)

        return compile


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _gpu.Kernel:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: "stream")
    monkeypatch.setattr(_gpu.launch, "fast_launches", True)
    monkeypatch.setattr(_gpu.launch, "driver", SimpleNamespace(active=active))
    found = _gpu.Kernel(lambda tensor, count, size, BLOCK: None, specialize=("size",))
    found.jit = Jit()
    return found


def test_a_second_launch_gets_addresses_numbers_and_constants_in_order(kernel: _gpu.Kernel) -> None:
    tensor = torch.zeros(64)
    for _ in range(2):
        kernel[(7,)](tensor, 5, 9, BLOCK=64, num_warps=2)
    assert kernel.jit.compiled == [((tensor, 5, 9), {"BLOCK": 64, "num_warps": 2})]
    assert kernel.jit.launched == [
        (7, 1, 1, "stream", "function", "metadata", None, None, None, tensor.data_ptr(), 5, 9, 64)
    ]


def test_a_bound_kernel_is_launched_like_any_other(kernel: _gpu.Kernel) -> None:
    tensor = torch.zeros(64)
    bound = kernel.bind(9, BLOCK=64, num_warps=2)
    for count in (5, 6):
        bound((7, 3), tensor, count)
    assert kernel.jit.compiled == [((tensor, 5, 9), {"BLOCK": 64, "num_warps": 2})]
    assert kernel.jit.launched == [
        (7, 3, 1, "stream", "function", "metadata", None, None, None, tensor.data_ptr(), 6, 9, 64)
    ]


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(65)[1:], 5, 9, 64),  # not aligned to 16 bytes
        (torch.zeros(64, dtype=torch.float64), 5, 9, 64),
        (torch.zeros(64), 5, 1, 64),  # Triton makes a constant of 1
        (torch.zeros(64), 5, 32, 64),  # a multiple of 16
        (torch.zeros(64), 5, 2**31, 64),  # no longer 32 bits
        (torch.zeros(64), 2**31, 9, 64),
        (torch.zeros(64), 5, 9, 128),
    ],
    ids=["alignment", "dtype", "one", "multiple of 16", "64 bits", "64 bits of a count", "constant"],
)
def test_what_triton_compiles_anew_is_compiled_anew(kernel: _gpu.Kernel, other: tuple[Any, ...]) -> None:
    for tensor, count, size, block in ((torch.zeros(64), 5, 9, 64), other):
        kernel[(7,)](tensor, count, size, BLOCK=block)
    assert len(kernel.jit.compiled) == 2
    assert not kernel.jit.launched


@pytest.mark.parametrize("count", [1, 32, 2**31 - 1, -(2**31)])
def test_counts_do_not_specialise(kernel: _gpu.Kernel, count: int) -> None:
    for number in (5, count):
        kernel[(7,)](torch.zeros(64), number, 9, BLOCK=64)
    assert len(kernel.jit.compiled) == len(kernel.jit.launched) == 1


def test_of_the_integers_triton_specialises_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(triton, "jit", lambda function, **options: made.append(options) or Jit())
    found = _gpu.Kernel(lambda tensor, count, size, BLOCK: None, specialize=("size",))
    found.jit_for((torch.zeros(3), 5, 9))
    found.jit_for((torch.zeros(3), 6, 9))
    assert made == [{"do_not_specialize": ["count"]}]


def test_a_parameter_to_specialise_on_must_exist() -> None:
    with pytest.raises(ValueError, match="has no parameter sizes"):
        _gpu.Kernel(lambda tensor, count, size, BLOCK: None, specialize=("sizes",))


def test_inside_of_compiling_nothing_is_launched(kernel: _gpu.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[tuple[Any, ...]] = []
    kernel.jit.warmup = lambda *args, grid, **options: warmed.append(args)
    with _gpu.compiling():
        kernel[(7,)](torch.zeros(64), 5, 9, BLOCK=64)
        kernel.bind(9, BLOCK=64)((7,), torch.zeros(64), 5)
    assert len(warmed) == 2
    assert not kernel.jit.compiled
    assert not kernel.jit.launched


def test_compile_once_compiles_once_for_each_key_and_device(
    kernel: _gpu.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gpu.launch, "INTERPRETED", False)
    monkeypatch.setattr(_gpu.launch, "_ready", set())
    seen: list[int] = []
    for device, key in ((0, "a"), (0, "a"), (0, "b"), (1, "a")):
        monkeypatch.setattr(_gpu.launch.driver.active, "get_current_device", lambda device=device: device)
        _gpu.compile_once(key, lambda: seen.append(_gpu.launch._state.compiling))
    assert seen == [True, True, True]
    assert not _gpu.launch._state.compiling
