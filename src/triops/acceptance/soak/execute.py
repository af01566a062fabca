"""Some calls at once: each on a thread of its own, between guard bytes, and what is wrong with what they gave."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triops import _sample
from triops._compare import difference
from triops._op import OPERATORS, reference_backend
from triops.acceptance.guards import Guards, guarded_memory
from triops.acceptance.soak.calls import MUST_ANSWER, Call, Spec, draw

CLEAR = (ValueError, TypeError, IndexError)
# Errors of torch's own that may pass through: an output that no memory can hold or of a size that meta tensors cannot
# tell, and what a public function does to a sparse tensor before its operator sees it.
OF_MEMORY = ("memory", "storage size", "overflow")
OF_TORCH = (*OF_MEMORY, "meta tensors", "sparse tensors", "'sparsecpu'", "'sparsecuda'")
THREADS = (1, 1, 2, 4)  # of torch and of CPU kernels, in one call; references take one
REFERENCES_TWICE = 4  # one of so many calls of a reference is made again, in memory that is not poisoned
HUGE = 1e30  # sums and products of such numbers leave the range of float32
PRODUCTS_OF_TILES = ("sparse_conv", "sparse_conv_fused")
TOO_LARGE = 2**28  # bytes of results that are not compared: the reference would take minutes


@dataclass(frozen=True)
class Verdict:
    """What became of one call."""

    kind: str
    outcome: str  # "answered", "refused" or "not captured"
    seconds: float
    failures: list[str] = field(default_factory=list)
    call: str = ""  # in words, where there are failures


@dataclass
class Outcome:
    """What one run of a call gave."""

    outputs: list[Tensor] | None = None  # on the CPU
    error: BaseException | None = None
    damage: list[str] = field(default_factory=list)
    captured: bool = True

    @property
    def what(self) -> str:
        return "answers" if self.error is None else f"raises {type(self.error).__name__}: {self.error}"[:1000]


def is_clear(error: BaseException) -> bool:
    """Whether a malformed call may end so."""
    if isinstance(error, CLEAR):
        return True
    return _is_of_memory(error) or (isinstance(error, RuntimeError) and _says(error, OF_TORCH))


def _is_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _says(error, OF_MEMORY))


def _says(error: BaseException, words: Sequence[str]) -> bool:
    text = str(error).lower()
    return any(word in text for word in words) and "illegal memory access" not in text


def device_is_lost(verdicts: Sequence[Verdict]) -> bool:
    """Whether no later call of the process can succeed: an error of a GPU stays."""
    return any("CUDA error" in failure for verdict in verdicts for failure in verdict.failures)


def run_round(specs: Sequence[Spec]) -> list[Verdict]:
    """Draw the calls, run them at once, judge them one by one."""
    calls = [draw(spec) for spec in specs]
    kernels = any(spec.backend != "reference" for spec in specs)
    torch.set_num_threads(THREADS[specs[0].seed % len(THREADS)] if kernels else 1)
    seconds = [0.0] * len(calls)
    outcomes: list[list[Outcome]] = [[] for _ in calls]
    barrier = threading.Barrier(len(calls))
    repeats = 2 if kernels and len(calls) > 1 else 1  # calls are short: the second one meets the others more often

    def work(i: int) -> None:
        barrier.wait()
        start = time.perf_counter()
        outcomes[i] = [_run_or_tell(calls[i]) for _ in range(repeats)]
        seconds[i] = (time.perf_counter() - start) / repeats

    if len(calls) == 1:
        work(0)
    else:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.set_num_threads(1)  # small references are slower on several, and on a busy machine take minutes
    return [_verdict(*found) for found in zip(calls, outcomes, seconds, strict=True)]


def _run_or_tell(call: Call) -> Outcome:
    try:
        return _run(call)
    except Exception as error:  # not the call's own: its inputs could not be placed
        return Outcome(error=error, damage=[f"could not be run: {type(error).__name__}: {error}"])


def _run(call: Call) -> Outcome:
    backend = call.spec.backend
    function = _kernel_of(call)
    if call.bad is not None:
        return _guarded(call, function)
    if backend == "reference":
        with reference_backend():
            return _guarded(call, function)
    if backend == "cuda-graph":
        return _captured(call, function)
    if backend == "cuda-stream":
        with torch.cuda.stream(torch.cuda.Stream()):
            return _guarded(call, function)
    return _guarded(call, function)


def _kernel_of(call: Call) -> Callable[..., Any]:
    """What serves the call: the dispatcher does for a device's own kernels, not for Triton's interpreter."""
    if call.spec.backend != "interpreter" or call.operator is None or call.bad is not None:
        return call.function
    operator = OPERATORS[call.operator]

    def checked(*args: Any) -> Any:
        accepted = operator.signature.accepted(args)
        operator._check(accepted)
        if any(isinstance(a, Tensor) and a.device.type != "cpu" for a in accepted):  # the dispatcher knows whose it is
            return operator(*args)
        return operator.kernel("gpu")(*accepted)

    return checked


def _placed(call: Call, guards: Guards) -> tuple[Any, ...]:
    """The arguments on the call's device, tensors between guard bytes where they are plain ones."""
    device = "cuda" if call.spec.backend.startswith("cuda") else "cpu"
    args = tuple(a.to(device) if isinstance(a, Tensor) and a.device.type == "cpu" else a for a in call.args)
    plain = [i for i, a in enumerate(args) if _is_plain(a)]
    names = [call.parameters[i] for i in plain]
    placed = guards.place([args[i] for i in plain], offset=call.offset, names=names)
    by_place = dict(zip(plain, placed, strict=True))
    return tuple(by_place.get(i, a) for i, a in enumerate(args))


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"


def _guarded(call: Call, function: Callable[..., Any]) -> Outcome:
    outcome = Outcome()
    with guarded_memory() as guards:
        args = _placed(call, guards)
        with _caught(outcome):
            outcome.outputs = _outputs(call, args, function(*args))
        _finish(call, guards, outcome)
    return outcome


def _captured(call: Call, function: Callable[..., Any]) -> Outcome:
    """The replay of a CUDA graph of the call, into outputs that hold something else before."""
    outcome = Outcome()
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with guarded_memory() as guards:
        args = _placed(call, guards)
        with _caught(outcome):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                outcome.outputs = _outputs(call, args, function(*args))  # compiles, and says whether it is refused
            torch.cuda.synchronize()
        if outcome.error is None:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    results = function(*args)
            except RuntimeError:  # it waits for the GPU
                torch.cuda.set_stream(current)  # a capture that fails does not put it back
                torch.cuda.synchronize()
                outcome.captured = False
                return outcome
            with _caught(outcome):
                for _ in range(2):
                    for tensor in _sample.tensors_of(results):
                        tensor.fill_(1)
                    graph.replay()
                    torch.cuda.synchronize()
                outcome.outputs = _outputs(call, args, results)
        _finish(call, guards, outcome)
    return outcome


@contextlib.contextmanager
def _caught(outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever comes is judged
        outcome.error, outcome.outputs = error, None


def _finish(call: Call, guards: Guards, outcome: Outcome) -> None:
    """What was written where; on a GPU after everything is done, and an error of the device shows here too."""
    try:
        if call.spec.backend.startswith("cuda"):
            torch.cuda.synchronize()
        outcome.damage = guards.damage()
    except RuntimeError as error:
        outcome.damage = [f"the device is lost: {error}"]


def _outputs(call: Call, args: tuple[Any, ...], results: Any) -> list[Tensor]:
    """What the call specifies of its results, on the CPU."""
    if isinstance(results, list | tuple) and all(isinstance(r, int) for r in results):
        return [torch.tensor(results, dtype=torch.int64)]
    if call.operator is not None and all(_specifiable(t) for t in _sample.tensors_of(results)):
        results = _sample.specified(OPERATORS[call.operator], args, results)
    return [t.cpu() if _specifiable(t) else t for t in _sample.tensors_of(results)]


def _specifiable(tensor: Tensor) -> bool:
    return tensor.device.type != "meta"


# What is wrong


def _verdict(call: Call, outcomes: list[Outcome], seconds: float) -> Verdict:
    failures = list(dict.fromkeys(f for outcome in outcomes for f in outcome.damage))
    if call.bad is not None:
        failures += _bad_call_failures(call.bad, outcomes[-1])
    else:
        expected: Outcome | None = None
        for outcome in outcomes:
            if outcome.error is not None and not is_clear(outcome.error):
                failures.append(outcome.what)
            elif outcome.error is not None and call.kind in MUST_ANSWER and call.operator is not None:
                # a public function may refuse what its operator takes
                failures.append(f"was refused: {outcome.what}")
            elif not _is_of_memory(outcome.error) and _size(outcome) < TOO_LARGE and _is_to_be_compared(call):
                expected = expected or _expected(call)
                failures += _differences(call, outcome, expected)
    last = outcomes[-1]
    word = "refused" if last.error is not None else "answered" if last.captured else "not captured"
    failures = list(dict.fromkeys(failures))
    return Verdict(call.kind, word, seconds, failures, str(call) if failures else "")


def _is_to_be_compared(call: Call) -> bool:
    return call.spec.backend != "reference" or call.spec.seed % REFERENCES_TWICE == 0


def _bad_call_failures(bad: _sample.BadCall, outcome: Outcome) -> list[str]:
    right = type(outcome.error) is bad.error and re.search(bad.match, str(outcome.error))
    return [] if right else [f"{outcome.what} instead of {bad.error.__name__} with {bad.match!r}"]


def _size(outcome: Outcome) -> int:
    return _sample.bytes_of(outcome.outputs or [])


def _expected(call: Call) -> Outcome:
    outcome = Outcome()
    with _caught(outcome), reference_backend():
        outcome.outputs = _outputs(call, call.args, call.function(*call.args))
    return outcome


def _differences(call: Call, got: Outcome, expected: Outcome) -> list[str]:
    if _is_of_memory(expected.error):
        return []
    if (got.error is None) != (expected.error is None):
        # On a GPU an index that is no row is skipped, not refused: nobody waits for a look at it.
        if isinstance(expected.error, IndexError) and call.spec.backend not in ("reference", "cpu"):
            return []
        return [f"{got.what}, the reference {expected.what}"]
    if got.error is not None and expected.error is not None:
        if type(got.error) is not type(expected.error):
            return [f"{got.what}, the reference {expected.what}"]
        return []
    assert got.outputs is not None
    assert expected.outputs is not None
    if any(not _specifiable(t) for t in [*got.outputs, *expected.outputs]) or not _is_specified(call):
        return []
    scale = _sample.standard_of(OPERATORS[call.judged_as]).error_scale
    found = difference(got.outputs, expected.outputs, scale)
    if found and scale == "row":
        exact = _in_float64(call, expected.outputs)
        rounding = _rounding(call, expected.outputs, exact)
        allowed = map(_allowed_sum, got.outputs, expected.outputs, exact, rounding)
        found = difference(got.outputs, [*allowed], scale)
    return [found] if found else []


def _allowed_sum(got: Tensor, expected: Tensor, exact: Tensor, rounding: Tensor) -> Tensor:
    """The value nearest to `got` that a sum may have.

    Of terms that cancel the reference keeps no more digits than a kernel, so an answer may be twice as far from the
    exact one (another order of terms, another draw of roundings) as anything that the reference itself says in its row,
    in its column of a table, where a norm sums over the rows, or in its map where an output has one per element. Which
    of inf and NaN a sum is depends on the order of its terms.
    """
    if not expected.is_floating_point() or expected.dim() == 0 or expected.numel() == 0:
        return exact
    g, e, x = got.to(expected.device).double(), expected.double(), exact.double()
    most = rounding.amax((1, 2, 3) if e.dim() == 4 else -1, keepdim=True)
    if e.dim() == 2:
        most = torch.maximum(most, rounding.amax(0, keepdim=True))
    most = 2 * most
    allowed = torch.where(e.isfinite() & x.isfinite(), g.clamp(x - most, x + most), e)
    return torch.where(g.isfinite() | e.isfinite(), allowed, g).to(expected.dtype)


def _rounding(call: Call, expected: list[Tensor], exact: list[Tensor]) -> list[Tensor]:
    """How far the reference is from exact sums; in float64, from what it says of numbers a few units beside these."""
    if _floats(call) == {torch.float64}:
        g = torch.Generator().manual_seed(call.spec.seed)

        def beside(a: Tensor) -> Tensor:
            return a * (1 + 2.0**-50 * (2 * torch.rand(a.shape, generator=g, dtype=a.dtype) - 1)).to(a.device)

        exact = _reference(call, tuple(beside(a) if _is_float(a) else a for a in call.args))
    return [*map(_distances, expected, exact)]


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """0 where either is not finite."""
    a, b = a.double(), b.double()
    return torch.where(a.isfinite() & b.isfinite(), a - b, 0).abs()


def _in_float64(call: Call, expected: list[Tensor]) -> list[Tensor]:
    """What the reference makes of a call in float32 if it computes in float64, rounded; of other calls `expected`."""
    if _floats(call) != {torch.float32}:
        return expected
    exact = _reference(call, tuple(a.double() if _is_float(a) else a for a in call.args))
    return [x.to(e.dtype) for x, e in zip(exact, expected, strict=True)]


def _floats(call: Call) -> set[torch.dtype]:
    return {a.dtype for a in call.args if _is_float(a)}


def _is_float(value: Any) -> bool:
    return _is_plain(value) and bool(value.is_floating_point())


def _reference(call: Call, args: tuple[Any, ...]) -> list[Tensor]:
    with reference_backend():
        return _outputs(call, args, call.function(*args))


def _is_specified(call: Call) -> bool:
    """False where any answer will do: index tensors of a malformed call no longer belong together, a sum of its numbers
    overflows or not by the order in which they are added, or a weight that is not finite is multiplied on a GPU, by
    whole tiles, with the zeros that stand for the rows it does not meet."""
    if call.judged_as in PRODUCTS_OF_TILES and call.spec.backend not in ("reference", "cpu"):
        weight = call.args[call.parameters.index("weight")]
        if isinstance(weight, Tensor) and not bool(weight.isfinite().all()):
            return False
    if call.kind == "spoilt" and _sample.standard_of(OPERATORS[call.judged_as]).error_scale == "row":
        floats = [a for a in call.args if _is_plain(a) and a.is_floating_point()]
        if any(bool(((f.abs() > HUGE) & f.isfinite()).any()) for f in floats):
            return False
    integers = [a for a in call.args if isinstance(a, Tensor) and not a.is_floating_point()]
    return call.kind != "spoilt" or len(integers) < 2
