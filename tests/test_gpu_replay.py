"""Calls of one key that come often: what their launcher did is repeated, for the same kind of call and for no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import GPU, assert_same, run, small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triops import _gpu, _op, _sample
from triops._gpu import launch, replay
from triops._op import OPERATORS

SAMPLES = [s for s in small(_sample.all_samples()) if "gpu" in OPERATORS[s.operator].backends]
KEPT = torch.ones(4, 4)
no_gpu = pytest.mark.skipif(GPU == "cuda", reason="stand-ins of compiled kernels would be launched by other tests")
on_gpu = pytest.mark.skipif(GPU != "cuda", reason="needs a GPU")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What kernels are launched with, on CPU tensors and without a compiler."""
    seen: list[tuple[Any, ...]] = []

    def of_launch(jit: Any, grid: Any, args: Any, last: tuple[int, ...], options: dict[str, Any]) -> launch.Repeat:
        return launch.Repeat(lambda *given: seen.append(given), lambda device: 5, tuple(options.items()), None, last)

    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "fast_launches", True)
    monkeypatch.setattr(launch.Kernel, "jit_for", lambda self, args: None)
    monkeypatch.setattr(launch.Kernel, "run", lambda self, grid, args, options: None)
    monkeypatch.setattr(launch.Repeat, "of_launch", staticmethod(of_launch))
    monkeypatch.setattr(replay, "OFTEN", 2)
    return seen


@contextmanager
def as_on_a_gpu(op: _op.Operator) -> Iterator[None]:
    """Calls of this operator take its GPU launcher; others, which samples may need, do not."""
    before = op._runs["cpu"]
    op._runs["cpu"] = op._runs["cuda"]
    op._passed.clear()
    try:
        yield
    finally:
        op._runs["cpu"] = before
        op._passed.clear()


def described(launches: list[tuple[Any, ...]], args: tuple[Any, ...]) -> list[list[Any]]:
    """Launches with addresses by what they are: those of inputs, and others."""
    inputs = {t.data_ptr(): i for i, t in enumerate(_sample.tensors_of(args)) if t.numel()}
    return [
        [f"input {inputs[a]}" if a in inputs else "memory" if type(a) is int and a > 2**40 else a for a in call]
        for call in launches
    ]


@no_gpu
@pytest.mark.parametrize("operator", sorted({s.operator for s in SAMPLES if not OPERATORS[s.operator].dynamic_output}))
def test_a_repeated_call_launches_and_returns_what_the_launcher_does(
    operator: str, launches: list[tuple[Any, ...]]
) -> None:
    op = OPERATORS[operator]
    for sample in (s for s in SAMPLES if s.operator == operator):
        args = sample.make(sample.dtypes[0])
        with as_on_a_gpu(op):
            op(*args)
            op(*args)
            launches.clear()
            expected = _sample.tensors_of(op._runs["cuda"](*args))
            by_launcher = described(launches, args)
            launches.clear()
            made = _sample.tensors_of(op(*args))
        assert described(launches, args) == by_launcher, sample
        assert [(t.shape, t.stride(), t.dtype) for t in made] == [(t.shape, t.stride(), t.dtype) for t in expected]


@on_gpu
@pytest.mark.parametrize("sample", SAMPLES if GPU == "cuda" else SAMPLES[:1], ids=str)
def test_repeated_calls_equal_the_reference(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "OFTEN", 2)
    op = OPERATORS[sample.operator]
    op._passed.clear()
    args = sample.make(sample.dtypes[0])
    expected = run("reference", sample.operator, args)
    for _ in range(4):  # by the launcher, recorded, repeated twice
        moved = _sample.to_device(args, GPU)
        made = _sample.specified(op, moved, op(*moved))
        assert_same(tuple(made), tuple(_sample.tensors_of(expected)), str(sample), operator=sample.operator)


class Seen(TorchDispatchMode):
    """The functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.functions: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(str(function))
        return function(*args, **(kwargs or {}))


class Launcher:
    """Doubles its input, and counts how often it is asked to."""

    def __init__(self, work: Callable[..., Any] | None = None) -> None:
        self.calls, self.ordinary = 0, True
        self.work = work or (lambda x, *_: torch.zeros_like(x).add_(x, alpha=2))
        self.call = replay.replayed(self, lambda: self.ordinary)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.work(*args)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "fast_launches", True)
    monkeypatch.setattr(replay, "OFTEN", 2)


def recorded(work: Callable[..., Any] | None = None, *args: Any) -> Launcher:
    made = Launcher(work)
    for _ in range(2):
        made.call(*(args or (torch.ones(4, 4),)))
    assert made.calls == 2
    return made


@pytest.mark.usefixtures("often")
def test_a_launcher_is_not_asked_again_once_its_call_has_come_often() -> None:
    double = recorded()
    first, second = double.call(torch.full((4, 4), 3.0)), double.call(torch.full((4, 4), 4.0))
    assert double.calls == 2
    assert torch.equal(first, torch.full((4, 4), 6.0))
    assert torch.equal(second, torch.full((4, 4), 8.0))


def test_a_call_that_has_not_come_often_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "fast_launches", True)
    double = Launcher()
    for _ in range(replay.OFTEN):
        double.call(torch.ones(2))
    assert double.calls == replay.OFTEN
    double.call(torch.ones(2))
    assert double.calls == replay.OFTEN


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    "other", [torch.arange(16.0).view(4, 4).t(), torch.arange(17.0)[1:].view(4, 4)], ids=["strides", "address"]
)
def test_other_strides_and_odd_addresses_are_left_to_the_launcher(other: Tensor) -> None:
    double = recorded()
    assert torch.equal(double.call(other), other * 2)
    assert double.calls == 3


@pytest.mark.usefixtures("often")
def test_a_call_with_a_switch_turned_is_left_to_the_launcher() -> None:
    double = recorded()
    torch.use_deterministic_algorithms(True)
    try:
        double.call(torch.ones(4, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert double.calls == 3
    double.ordinary = False
    double.call(torch.ones(4, 4))
    assert double.calls == 4
    double.ordinary = True
    with _gpu.compiling():
        double.call(torch.ones(4, 4))
    assert double.calls == 5
    double.call(torch.ones(4, 4))
    assert double.calls == 5


@pytest.mark.usefixtures("often")
def test_a_switch_that_a_launcher_names_is_looked_at_every_time() -> None:
    state = {"factor": 2.0}
    scale = recorded(lambda x: torch.empty_like(x).fill_(replay.switch(lambda: state["factor"])))
    assert scale.call(torch.ones(4, 4))[0, 0] == 2
    assert scale.calls == 2
    state["factor"] = 3.0
    assert scale.call(torch.ones(4, 4))[0, 0] == 3
    assert scale.calls == 3


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.zeros_like(x).fill_(x.sum().item()),
        lambda x: x.new_zeros(len(x.nonzero())),
        lambda x: torch.rand_like(x),
        lambda x: torch.empty_like(x).copy_(KEPT),
        lambda x: x,
        lambda x: x.detach(),
        lambda x: torch.cat([x, x]),
    ],
    ids=["number", "size", "chance", "memory of its own", "input", "alias of an input", "list of tensors"],
)
def test_what_cannot_be_repeated_is_not(work: Callable[[Tensor], Tensor]) -> None:
    launcher = recorded(work)
    launcher.call(torch.full((4, 4), 2.0))
    assert launcher.calls == 3


@pytest.mark.usefixtures("often")
def test_one_tensor_in_two_places_is_not_recorded() -> None:
    x = torch.ones(4)
    add = recorded(lambda a, b: torch.empty_like(a).copy_(b), x, x)
    assert torch.equal(add.call(torch.zeros(4), torch.ones(4)), torch.ones(4))
    assert add.calls == 3


@pytest.mark.usefixtures("often")
def test_views_and_other_calls_of_torch_are_repeated() -> None:
    top = recorded(lambda x: torch.empty(4, 4).copy_(x.t()).sort(dim=1)[0].unsqueeze(0))
    x = torch.randn(4, 4)
    assert torch.equal(top.call(x), x.t().sort(dim=1)[0][None])
    assert top.calls == 2


@no_gpu
def test_views_that_kernels_alone_are_given_are_not_made_again(launches: list[tuple[Any, ...]]) -> None:
    @_gpu.kernel
    def kernel(a, b, out, n):  # type: ignore[no-untyped-def]
        pass

    def work(x: Tensor) -> Tensor:
        scratch = torch.empty(8)
        out = torch.empty(3, 4)
        kernel[(1,)](x.view(-1).view(2, 8)[1], scratch[4:], out.view(-1), 16)
        return out[1:].unsqueeze(0)

    launcher = recorded(work)
    launches.clear()
    x = torch.ones(4, 4)
    with Seen() as seen:
        made = launcher.call(x)
    assert launcher.calls == 2
    (call,) = launches
    assert call[9] == x.data_ptr() + 32
    assert call[11] == made.data_ptr() - 16
    assert made.shape == (1, 2, 4)
    names = seen.functions
    assert names.count("aten.empty_strided.default") == 2
    assert [n for n in names if "empty" not in n] == ["aten.slice.Tensor", "aten.unsqueeze.default"]


@pytest.mark.usefixtures("often")
def test_a_function_that_gives_no_tensor_or_several_is_repeated() -> None:
    def work(x: Tensor) -> Tensor:
        assert x[:, :0].unbind(1) == ()
        left, right = x.split(2, dim=1)
        return torch.empty_like(left).copy_(left).add_(right)

    halves = recorded(work)
    x = torch.arange(16.0).view(4, 4)
    assert torch.equal(halves.call(x), x[:, :2] + x[:, 2:])
    assert halves.calls == 2


@pytest.mark.usefixtures("often")
def test_a_call_that_is_not_ordinary_is_not_recorded_and_the_next_one_is() -> None:
    double = Launcher()
    for ordinary in (True, False, False, True):
        double.ordinary = ordinary
        double.call(torch.ones(4, 4))
    assert double.calls == 4
    assert torch.equal(double.call(torch.full((4, 4), 3.0)), torch.full((4, 4), 6.0))
    assert double.calls == 4


@pytest.mark.usefixtures("often")
def test_a_call_that_fails_while_it_is_recorded_leaves_no_trace() -> None:
    state = {"fails": True}

    def work(x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        if state["fails"]:
            raise MemoryError
        return made.add_(x, alpha=2)

    double = Launcher(work)
    for _ in range(2):
        with pytest.raises(MemoryError):
            double.call(torch.ones(4, 4))
    assert launch.watcher() is None
    state["fails"] = False
    for _ in range(3):
        assert torch.equal(double.call(torch.ones(4, 4)), torch.full((4, 4), 2.0))
    assert double.calls == 5


@pytest.mark.usefixtures("often")
def test_threads_that_record_the_same_call_at_once_agree() -> None:
    together = threading.Barrier(4)

    def work(x: Tensor) -> Tensor:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        return torch.zeros_like(x).add_(x, alpha=2)

    double = Launcher(work)

    def calls(value: float) -> list[Tensor]:
        return [double.call(torch.full((4, 4), value)) for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(calls, float(i)) for i in range(4)]
        wait(futures, timeout=20)
    for i, future in enumerate(futures):
        assert all(torch.equal(made, torch.full((4, 4), 2.0 * i)) for made in future.result())


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", ["parameter", "inference", "no grad"])
def test_a_repeated_call_gives_tensors_of_the_mode_that_it_runs_in(kind: str) -> None:
    double = recorded()
    x: Tensor = torch.nn.Parameter(torch.ones(4, 4)) if kind == "parameter" else torch.ones(4, 4)
    with torch.inference_mode(kind == "inference"), torch.no_grad():
        made = double.call(x)
    assert double.calls == 2
    assert made.is_inference() == (kind == "inference")
    assert not made.requires_grad


@pytest.mark.usefixtures("often")
def test_results_are_memory_of_their_own() -> None:
    double = recorded()
    first, second = double.call(torch.ones(4, 4)), double.call(torch.ones(4, 4))
    assert first.data_ptr() != second.data_ptr()
