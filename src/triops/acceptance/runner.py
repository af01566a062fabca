"""Every sample through every kernel: run, judge, time. `results.py` holds what comes of it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triops import _sample
from triops._op import OPERATORS, Operator, reference_backend, why_unusable
from triops.acceptance import case_file
from triops.acceptance.baseline import Key, Measured, larger, slower
from triops.acceptance.ceilings import Ceilings
from triops.acceptance.guards import guarded_memory
from triops.acceptance.inputs import reseeded
from triops.acceptance.record import counts_in
from triops.acceptance.results import BadCallResult, Result, show_bytes, show_time
from triops.acceptance.stability import measure_stability
from triops.acceptance.standard import efficiency, judge
from triops.acceptance.timing import Times, measure, yardstick_ratio
from triops.acceptance.workspace import workspace


@dataclass(frozen=True)
class Task:
    """One call to check. `make` gives its arguments, on the CPU."""

    operator: str
    case: str
    scale: str  # network, general or boundary; "recorded" for a case file
    dtype: torch.dtype
    make: Callable[[], tuple[Any, ...]]
    timed: bool = False
    recorded: list[Tensor] | None = None
    network: str = ""  # the folder of a case file
    calls: int = 1  # that a case file stands for
    described: bool = False  # the values of its tensors are drawn


def backend_for(operator: Operator, device: str) -> str:
    """Which kernel a call on this device takes."""
    backend = "cpu" if device == "cpu" else "gpu"
    return backend if backend in operator.backends and not why_unusable(backend) else "reference"


def prepare_backend(backend: str | None, device: str) -> None:
    """GPU kernels on a machine without a GPU run in Triton's interpreter, which is chosen before Triton is imported."""
    if backend == "gpu" and device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
            raise RuntimeError("Triton is already loaded without its interpreter: set TRITON_INTERPRET=1")
        os.environ["TRITON_INTERPRET"] = "1"


def tasks(
    operators: Sequence[str] = (), *, quick: bool = False, samples: Sequence[_sample.Sample] = (), seed: int = 0,
    device: str = "cuda", cases: Path | None = None,
) -> list[Task]:  # fmt: skip
    """What there is to check: quick leaves out the network scales but for the demo's, in their first dtype.

    samples: these alone, in their first dtype, not timed.
    """
    if cases is not None:
        return [t for t in case_tasks(cases) if not operators or t.operator in operators]
    if samples:
        return [Task(s.operator, s.name, s.scale, s.dtypes[0], partial(_make, s, s.dtypes[0], seed)) for s in samples]
    found = []
    for sample in _sample.all_samples():
        if (operators and sample.operator not in operators) or (sample.gpu_only and device == "cpu"):
            continue
        if quick and sample.scale == "network" and not sample.demo:
            continue
        first_only = quick and sample.scale == "network"
        timed = sample.scale == "network" or (sample.scale == "general" and not quick)
        for dtype in sample.dtypes[:1] if first_only else sample.dtypes:
            make = partial(_make, sample, dtype, seed)
            found.append(Task(sample.operator, sample.name, sample.scale, dtype, make, timed))
    return found


def _make(sample: _sample.Sample, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    with reseeded(seed):
        return sample.make(dtype)


def case_tasks(path: Path) -> list[Task]:
    """One case file, or every one in a folder and the folders in it, each of which is a network.

    A case that a program has written down in several processes, data and all, is one task.
    """
    if not path.is_dir():
        return [_case_task(path, "", 1)[0]]
    folders = [path, *sorted(p for p in path.iterdir() if p.is_dir())]
    found: dict[tuple[str, bytes], Task] = {}
    for folder in folders:
        calls = counts_in(folder)
        for file in case_file.files_in(folder):
            task, digest = _case_task(file, folder.resolve().name, calls[file.name] or 1)
            known = found.get((task.network, digest))
            found[task.network, digest] = task if known is None else replace(known, calls=known.calls + task.calls)
    if not found:
        raise case_file.CaseError(f"{path}: no case file (*{case_file.SUFFIX}, *{case_file.SHAPES_SUFFIX}) here")
    return list(found.values())


def _case_task(file: Path, network: str, calls: int) -> tuple[Task, bytes]:
    case = case_file.read(file)
    tensors = _sample.tensors_of(case.args)
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), tensors[0].dtype if tensors else torch.float32)
    task = Task(
        case.operator, file.name, "recorded", dtype, lambda: case_file.read(file).args, bool(network), case.outputs,
        network, calls, case.described,
    )  # fmt: skip
    return task, case_file.digest(case.operator, case.args, case.described)


def check(
    todo: Sequence[Task], device: str, *, backend: str | None = None, ceilings: Ceilings | None = None,
    seconds: float = 0.2, before: dict[Key, Measured] | None = None, save_failures: Path | None = None,
) -> Iterator[Result]:  # fmt: skip
    """Check the tasks one by one; with ceilings the timed ones are timed.

    before: what cases took in an earlier run, of which this one is to be no slower. Not None, even if empty: on a CPU
    times are taken as ratios to the yardstick, too.
    """
    for task in todo:
        operator = OPERATORS[task.operator]
        use = backend or backend_for(operator, device)
        prepare_backend(use, device)
        args = task.make()
        result, outputs = _judged(task, operator, use, device, args)
        if ceilings and task.timed and result.passed and not result.not_run:
            result = _timed(result, task, operator, use, device, args, ceilings, seconds, before)
        if save_failures and not result.passed:
            _save(save_failures, result, args, outputs)
        yield result


def _judged(
    task: Task, operator: Operator, backend: str, device: str, args: tuple[Any, ...]
) -> tuple[Result, list[Tensor] | None]:
    """The verdict on one call, and what the kernel gave."""
    standard, dtype = _sample.standard_of(operator), str(task.dtype).removeprefix("torch.")
    result = Result(task.operator, task.case, task.scale, backend, dtype, [], network=task.network, calls=task.calls)
    try:
        if task.scale == "recorded":  # a stranger's arguments: types, shapes and values pass the whole door first
            with reference_backend():
                operator(*args)
    except (ValueError, TypeError, IndexError) as error:
        words = f"{type(error).__name__}: {error}"
        return (replace(result, not_run=words) if task.described else replace(result, error=words)), None
    except Exception as error:
        return replace(result, error=f"{type(error).__name__}: {error}"), None
    try:
        with guarded_memory() as guards:
            placed = guards.place(_sample.to_device(args, device), names=operator.parameters)
            outputs = _sample.specified(operator, placed, operator.kernel(backend)(*placed))
            damage = guards.damage()
        where = device if task.scale == "network" else "cpu"
        own, wide = references(operator, _sample.to_device(args, where))
        judgements = judge(outputs, own, wide, standard)
        if where != "cpu" and not all(j.passed for j in judgements):
            own, wide = references(operator, args)  # the CPU's word is final: other devices round in other ways
            judgements = judge(outputs, own, wide, standard)
        stability = None
        if backend == device or (backend, device) == ("gpu", "cuda"):  # neither the reference nor the interpreter
            again = _sample.to_device(args, device)
            stability = measure_stability(
                lambda: _sample.specified(operator, again, operator.kernel(backend)(*again)), outputs,
                threads=device == "cpu", exact=standard.floats == "exact",
            )  # fmt: skip
    except Exception as error:  # whatever is thrown is the verdict, and the other cases still run
        return replace(result, error=f"{type(error).__name__}: {error}"), None
    recorded = []
    if task.recorded is not None:
        recorded = [f for j in judge(task.recorded, own, wide, standard) for f in j.failures]
    return replace(result, judgements=judgements, damage=damage, recorded=recorded, stability=stability), outputs


def references(operator: Operator, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The reference at the arguments' own dtype, and in float64."""
    own = _sample.specified(operator, args, operator.reference(*args))
    wider = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    same = all(a.dtype == w.dtype for a, w in zip(_sample.tensors_of(args), _sample.tensors_of(wider), strict=True))
    return own, own if same else _sample.specified(operator, args, operator.reference(*wider))


def _timed(
    result: Result, task: Task, operator: Operator, backend: str, device: str, args: tuple[Any, ...],
    ceilings: Ceilings, budget: float, before: dict[Key, Measured] | None,
) -> Result:  # fmt: skip
    moved = _sample.to_device(args, device)
    used = workspace(operator.kernel(backend), moved, device)
    # Through the dispatcher, as a user calls it, unless another backend is asked for.
    function = operator if backend == backend_for(operator, device) else operator.kernel(backend)
    call = partial(function, *moved)
    with_ratio = device == "cpu" and before is not None

    def timed() -> tuple[Times, Measured]:
        times = measure(call, device, budget, capture=not operator.dynamic_output)
        ratio, noise = yardstick_ratio(call, budget) if with_ratio else (None, 0.0)
        return times, Measured(times.seconds, ratio, noise, used)

    times, now = timed()
    earlier = (before or {}).get(result.key)
    for _ in range(2):  # a machine that was busy for a moment is no regression
        if earlier is None or slower(earlier, now) is None:
            break
        times, now = min((times, now), timed(), key=lambda found: found[1].ratio or found[1].seconds)
    work, standard = _sample.module_of(operator).work(operator.name, args), _sample.standard_of(operator)
    peak = ceilings.peak(standard.arithmetic, task.dtype)
    found = efficiency(
        times.seconds, work.bytes, work.ops, ceilings.bandwidth, peak, ceilings.call, task.scale, standard
    )
    return replace(
        result, seconds=times.seconds, eager_seconds=times.eager, bytes=work.bytes, ops=work.ops, efficiency=found,
        ratio=now.ratio, noise=now.noise, workspace=now.workspace, regressions=_regressions(earlier, now),
    )  # fmt: skip


def _regressions(before: Measured | None, now: Measured) -> list[str]:
    found = []
    if before is not None and (expected := slower(before, now)) is not None:
        found.append(f"slower: {show_time(now.seconds)} instead of {show_time(expected)}")
    if before is not None and larger(before, now):
        found.append(f"more workspace: {show_bytes(now.workspace)} instead of {show_bytes(before.workspace)}")
    return found


def _save(folder: Path, result: Result, args: tuple[Any, ...], outputs: list[Tensor] | None) -> None:
    words = "-".join((result.operator, result.case, result.dtype, result.backend))
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in words)
    about = {"case": result.case, "backend": result.backend, "failures": result.failures}
    case_file.write(folder / f"{name}{case_file.SUFFIX}", case_file.Case(result.operator, args, outputs, about))


def check_bad_calls(operators: Sequence[str] = ()) -> list[BadCallResult]:
    """Every malformed call of the samples: refused, with the right error, in the right words."""
    found = []
    for module in _sample.modules():
        names = [op.name for op in OPERATORS.values() if _sample.module_of(op) is module]
        if operators and not set(names) & set(operators):
            continue
        for bad in module.BAD_CALLS:
            failure = "was accepted"
            try:
                bad.call()
            except Exception as error:  # whatever comes is compared with what should have come
                right = type(error) is bad.error and re.search(bad.match, str(error))
                failure = "" if right else f"raised {type(error).__name__}: {error}"
            found.append(BadCallResult(bad.name, bad.error.__name__, failure))
    return found
