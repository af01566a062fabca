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
    found = _gpu.Kernel(lambda tensor, count, size, BLOCK: None)
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
        (torch.zeros(64), 1, 9, 64),  # Triton makes a constant of 1
        (torch.zeros(64), 32, 9, 64),  # a multiple of 16
        (torch.zeros(64), 2**31, 9, 64),  # no longer 32 bits
        (torch.zeros(64), 5, 9, 128),
    ],
    ids=["alignment", "dtype", "one", "multiple of 16", "64 bits", "constant"],
)
def test_what_triton_compiles_anew_is_compiled_anew(kernel: _gpu.Kernel, other: tuple[Any, ...]) -> None:
    for tensor, count, size, block in ((torch.zeros(64), 5, 9, 64), other):
        kernel[(7,)](tensor, count, size, BLOCK=block)
    assert len(kernel.jit.compiled) == 2
    assert not kernel.jit.launched
