"""The fast launch path of `_gpu.Kernel`, without a GPU: what is compiled anew, and what a kernel is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_op import python

triton = pytest.importorskip("triton")

from triops import _gpu  # noqa: E402


class Compiled:
    """In place of a kernel that Triton has compiled: keeps what it is launched with."""

    def __init__(self) -> None:
        self.function, self.packed_metadata = 77, ("metadata",)
        self.launched: list[tuple[Any, ...]] = []
        self._run: Any = None

    @property
    def run(self) -> Any:
        if self._run is None:  # handles are made at the first launch
            self._run = lambda *args: self.launched.append(args)
        return self._run

    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        """How Triton calls it, once it has analysed the arguments."""
        hooks = SimpleNamespace(name="launch metadata"), SimpleNamespace(calls=[]), SimpleNamespace(calls=[])
        self.run(*grid, 5, self.function, self.packed_metadata, *hooks, *args, *constants)


class Jit:
    """In place of Triton's compiler: counts what it compiles, and what takes its own path."""

    def __init__(self, protocol: type[Compiled] = Compiled) -> None:
        self.protocol = protocol
        self.kernels: dict[Any, Compiled] = {}
        self.compiled: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.own: list[tuple[Any, ...]] = []

    @property
    def launched(self) -> list[tuple[Any, ...]]:
        return [call for kernel in self.kernels.values() for call in kernel.launched]

    @property
    def fast(self) -> list[tuple[Any, ...]]:
        """Launches past Triton's own path: those pass addresses."""
        return [call for call in self.launched if not any(isinstance(a, torch.Tensor) for a in call)]

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        described = [
            (a.dtype, a.data_ptr() % 16) if isinstance(a, torch.Tensor) else a.bit_length() // 32 for a in args
        ]
        key = (*described, args[2] == 1, args[2] % 16, *options.values())
        if key not in self.kernels:
            self.kernels[key] = self.protocol()
            self.compiled.append((args, options))
        return self.kernels[key]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.own.append(args)
            kernel = self.warmup(*args, grid=grid, **options)
            kernel.call((*grid, 1, 1)[:3], args, (options["BLOCK"],))
            return kernel

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _gpu.Kernel:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
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
    assert kernel.jit.own == [(tensor, 5, 9)]
    assert kernel.jit.fast == [(7, 1, 1, 5, 77, ("metadata",), None, None, None, tensor.data_ptr(), 5, 9, 64)]


def test_a_bound_kernel_is_launched_like_any_other(kernel: _gpu.Kernel) -> None:
    tensor = torch.zeros(64)
    bound = kernel.bind(9, BLOCK=64, num_warps=2)
    for count in (5, 6):
        bound((7, 3), tensor, count)
    assert kernel.jit.compiled == [((tensor, 5, 9), {"BLOCK": 64, "num_warps": 2})]
    assert kernel.jit.fast == [(7, 3, 1, 5, 77, ("metadata",), None, None, None, tensor.data_ptr(), 6, 9, 64)]


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
    assert len(kernel.jit.compiled) == len(kernel.jit.own) == 2
    assert not kernel.jit.fast


@pytest.mark.parametrize("count", [1, 32, 2**31 - 1, -(2**31)])
def test_counts_do_not_specialise(kernel: _gpu.Kernel, count: int) -> None:
    for number in (5, count):
        kernel[(7,)](torch.zeros(64), number, 9, BLOCK=64)
    assert len(kernel.jit.compiled) == len(kernel.jit.own) == len(kernel.jit.fast) == 1


class OnlyArguments(Compiled):
    """Constants are not passed, as in Triton 3.2."""

    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        super().call(grid, args, ())


class PlainRun(Compiled):
    """`run` is no property."""

    run = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        del self._run
        self.run = lambda *args: self.launched.append(args)


class MoreInFront(Compiled):
    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.run("cluster", *grid, 5, self.function, self.packed_metadata, None, None, None, *args, *constants)


class InOneTuple(Compiled):
    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.run(*grid, 5, self.function, self.packed_metadata, None, None, None, (*args, *constants))


class ByKeyword(Compiled):
    @property
    def run(self) -> Any:
        self._run = self._run or (lambda *args, stream: self.launched.append((*args, stream)))
        return self._run

    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.run(*grid, self.function, self.packed_metadata, None, None, None, *args, *constants, stream=5)


class OtherStream(Compiled):
    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.run(*grid, 6, self.function, self.packed_metadata, None, None, None, *args, *constants)


class ConstantsInFront(Compiled):
    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        super().call(grid, constants, args)


class WithAHook(Compiled):
    """A profiler asked Triton to be called at every launch."""

    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.run(*grid, 5, self.function, self.packed_metadata, None, print, None, *args, *constants)


class NoMetadata(Compiled):
    def __init__(self) -> None:
        super().__init__()
        del self.packed_metadata

    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.run(*grid, 5, self.function, *args)


class NotReplaceable(Compiled):
    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_run" and value is not None:
            raise AttributeError(name)
        super().__setattr__(name, value)

    @property
    def run(self) -> Any:
        return lambda *args: self.launched.append(args)


class LaunchedElsewhere(Compiled):
    def call(self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.launched.append((*grid, *args))


@pytest.mark.parametrize("protocol", [OnlyArguments, PlainRun])
def test_a_protocol_that_is_almost_ours_is_learnt(kernel: _gpu.Kernel, protocol: type[Compiled]) -> None:
    kernel.jit = Jit(protocol)
    tensor = torch.zeros(64)
    for count in (5, 6, 7):
        kernel[(7,)](tensor, count, 9, BLOCK=64)
    constants = () if protocol is OnlyArguments else (64,)
    head = 7, 1, 1, 5, 77, ("metadata",), None, None, None, tensor.data_ptr()
    assert kernel.jit.fast == [(*head, 6, 9, *constants), (*head, 7, 9, *constants)]


@pytest.mark.parametrize(
    "protocol",
    [MoreInFront, InOneTuple, ByKeyword, OtherStream, ConstantsInFront, WithAHook, NoMetadata, NotReplaceable,
     LaunchedElsewhere],
)  # fmt: skip
def test_an_unknown_protocol_takes_tritons_own_path(kernel: _gpu.Kernel, protocol: type[Compiled]) -> None:
    kernel.jit = Jit(protocol)
    tensor = torch.zeros(64)
    bound = kernel.bind(9, BLOCK=64)
    for count in (5, 6, 7):
        kernel[(7,)](tensor, count, 9, BLOCK=64)
        bound((7,), tensor, count)
    assert [args[1] for args in kernel.jit.own] == [5, 5, 6, 6, 7, 7]
    assert len(kernel.jit.launched) == 6
    assert len(kernel.jit.compiled) == 1


def test_an_error_of_tritons_own_launch_is_the_users(kernel: _gpu.Kernel) -> None:
    class TooLarge(Compiled):
        @property
        def run(self) -> Any:
            raise MemoryError("out of shared memory")

    kernel.jit = Jit(TooLarge)
    for _ in range(2):
        with pytest.raises(MemoryError, match="out of shared memory"):
            kernel[(7,)](torch.zeros(64), 5, 9, BLOCK=64)


def test_what_was_watched_is_left_as_it_was(kernel: _gpu.Kernel) -> None:
    for _ in range(2):
        kernel[(7,)](torch.zeros(64), 5, 9, BLOCK=64)
    (compiled,) = kernel.jit.kernels.values()
    assert compiled.run.__qualname__.startswith("Compiled.run")


def test_of_the_integers_triton_specialises_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(triton, "jit", lambda function, **options: made.append(options) or Jit())
    found = _gpu.Kernel(lambda tensor, count, size, BLOCK: None, specialize=("size",))
    found.jit_for((torch.zeros(3), 5, 9))
    found.jit_for((torch.zeros(3), 6, 9))
    assert made == [{"do_not_specialize": ["count"]}]


def test_the_alignment_of_a_tensor_that_may_begin_anywhere_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
    monkeypatch.setattr(_gpu.launch, "fast_launches", True)
    monkeypatch.setattr(_gpu.launch, "driver", SimpleNamespace(active=active))
    found = _gpu.Kernel(lambda tensor, row, count, BLOCK: None, unaligned=("row",))
    found.jit = Jit()
    tensor, rows = torch.zeros(64), torch.zeros(64)
    for first in range(3):
        found[(7,)](tensor, rows[first:], 5, BLOCK=64)
    assert len(found.jit.own) == 1
    assert [call[10] for call in found.jit.fast] == [rows[1:].data_ptr(), rows[2:].data_ptr()]


def test_a_parameter_to_specialise_on_must_exist() -> None:
    with pytest.raises(ValueError, match="has no parameter sizes"):
        _gpu.Kernel(lambda tensor, count, size, BLOCK: None, specialize=("sizes",))


def test_inside_of_compiling_nothing_is_launched(kernel: _gpu.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    with _gpu.compiling():
        kernel[(7,)](torch.zeros(64), 5, 9, BLOCK=64)
        kernel.bind(9, BLOCK=64)((7,), torch.zeros(64), 5)
    assert len(kernel.jit.compiled) == 1
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


def test_the_installed_triton_launches_as_expected() -> None:
    """Without a GPU: its own compiler and its own launches, with a launcher that notes what it is given."""
    done = python("""
        from types import SimpleNamespace
        import torch
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver
        from triops._gpu import launch
        from triops.ops.sigmoid_focal_loss import gpu

        calls = []
        driver.set_active(SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
            get_current_stream=lambda device: 5, launcher_cls=lambda *about: lambda *args: calls.append(args),
            utils=SimpleNamespace(
                get_device_properties=lambda device: {"max_shared_mem": 10**6},
                load_binary=lambda *about: (1, 2, 3, 4, 1024),
            ),
        ))
        scores, targets = torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64)
        outputs = []
        for fast, rows in ((True, 5), (True, 6), (False, 6)):
            launch.fast_launches = fast
            outputs.append(gpu.sigmoid_focal_loss(scores[:rows], targets[:rows], None, 2.0, 0.25))
        print([any(isinstance(a, torch.Tensor) for a in args) for args in calls])
        places = {t.data_ptr(): i for i, t in enumerate((scores, targets, outputs[1]))}
        own = {t.data_ptr(): i for i, t in enumerate((scores, targets, outputs[2]))}
        repeated = [places.get(a, a) for a in calls[1]]
        triton_s = [own[a.data_ptr()] if isinstance(a, torch.Tensor) else a for a in calls[2]]
        hooks = range(6, 9)  # metadata of the launch and hooks: None is as good
        print([i for i, (a, b) in enumerate(zip(repeated, triton_s, strict=True)) if a != b and i not in hooks])
    """)
    assert done.stdout.split("\n")[:2] == ["[True, False, True]", "[]"], done.stdout + done.stderr
