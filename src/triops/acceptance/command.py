"""What `triops check` and `triops replay` do, and the rows and lines that `triops.cli` shows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triops._arguments import UsageError, choose_device, choose_operators, writable_file, writable_folder
from triops._op import OPERATORS, REQUIREMENTS, describe, why_unusable
from triops._sample import Sample
from triops.acceptance import baseline, runner
from triops.acceptance import report as report_files
from triops.acceptance.case_file import CaseError, read
from triops.acceptance.ceilings import measured
from triops.acceptance.report import MEASURES, show_diff
from triops.acceptance.results import Report, Result, environment, show_time
from triops.acceptance.runner import Task

HEADS = ("case", "backend", "dtype", *MEASURES, "change", "verdict", "time", "effic.", "bound")
# what a narrow table leaves out, in this order
OPTIONAL = ("diff2", "diff4", "bound", "backend", "change", "diff1", "diff3")
NUMBERS = (*MEASURES, "change", "time", "effic.")
NOISY = 0.1  # a noise of the ratio to the yardstick above which the gate says little

# What a front end does about each result as it comes: advance a progress bar.
OnResult = Callable[[Result, int], Any]


@dataclass(frozen=True)
class Options:
    operators: tuple[str, ...] = ()  # functions or operators; none: all
    device: str | None = None  # None: the best there is
    backend: str | None = None  # None: the device's own
    quick: bool = False
    samples: tuple[Sample, ...] = ()  # these alone, in their first dtype, not timed
    seed: int = 0
    out: Path | None = None  # folder of report.html and report.json; None: none is written
    save_failures: Path | None = None
    baseline: Path | None = None  # of an earlier run, than which this one is to be no slower
    save_baseline: Path | None = None  # where this run is kept as one
    cases: Path | None = None  # case files instead of the samples
    seconds: float | None = None  # for timing one case


def check(options: Options, on_result: OnResult = lambda result, total: None) -> Report:
    """Check, time, compare, write the report. An interrupt ends the check; the report tells what was done until then.

    Raises:
        UsageError: before anything runs, where the options make no sense here.
    """
    device = choose_device(options.device)
    operators = choose_operators(options.operators)
    machine = environment()
    before = _before(options, device, machine)
    _check_backend(options.backend, device)
    for folder, option in ((options.out, "--out"), (options.save_failures, "--save-failures")):
        if folder is not None:
            writable_folder(folder, option)
    todo = _todo(options, operators, device)
    timed = any(t.timed for t in todo)
    ceilings = measured(device) if timed else None
    report = Report(device, options.quick, options.seed, machine, ceilings)
    report.baseline = str(options.baseline or "")
    budget = options.seconds or (0.1 if options.quick else 0.3)
    try:
        for result in runner.check(
            todo, device, backend=options.backend, ceilings=report.ceilings, seconds=budget, before=before,
            save_failures=options.save_failures,
        ):  # fmt: skip
            report.results.append(result)
            on_result(result, len(todo))
        if options.cases is None and not options.samples:
            report.bad_calls = runner.check_bad_calls(operators)
    except KeyboardInterrupt:
        report.interrupted_of = len(todo)
    if options.save_baseline:
        measured_cases = {r.key: r.measured for r in report.results if r.passed and r.measured}
        baseline.save(options.save_baseline, device, machine, measured_cases)
    if options.out:
        report_files.write(report, options.out)
    return report


def describe_case(path: Path) -> list[str]:
    """What a case file holds, in a few lines."""
    try:
        case = read(path)
    except CaseError as error:
        raise UsageError(str(error)) from None
    args = describe(OPERATORS[case.operator].parameters, case.args)
    back = "its outputs are kept" if case.outputs is not None else "the call never came back"
    if case.described:
        back = "values are drawn from the ranges that were recorded"
    return [f"{case.operator}({args})", *(f"{k}: {v}" for k, v in case.about.items() if k != "call"), back]


def _check_backend(backend: str | None, device: str) -> None:
    if backend not in (None, "reference", *REQUIREMENTS):
        raise UsageError(f"--backend must be reference, cpu or gpu, got {backend}")
    if backend == "cpu" and device != "cpu":
        raise UsageError("--backend cpu needs --device cpu")
    try:
        runner.prepare_backend(backend, device)
    except RuntimeError as error:
        raise UsageError(str(error)) from None
    if backend in REQUIREMENTS and (reason := why_unusable(backend)):
        raise UsageError(f"--backend {backend}: {reason}")


def _before(options: Options, device: str, machine: dict[str, str]) -> dict[baseline.Key, baseline.Measured] | None:
    """What the baseline holds; None where there is neither one to read nor one to write."""
    try:
        if options.save_baseline:
            writable_file(options.save_baseline, "--save-baseline")
            if options.save_baseline.exists():
                baseline.read(options.save_baseline, device, machine)
        if options.baseline:
            return baseline.read(options.baseline, device, machine)
    except baseline.BaselineError as error:
        raise UsageError(str(error)) from None
    return {} if options.save_baseline else None


def _todo(options: Options, operators: list[str], device: str) -> list[Task]:
    try:
        return runner.tasks(
            operators, quick=options.quick, samples=options.samples, seed=options.seed, device=device,
            cases=options.cases,
        )  # fmt: skip
    except CaseError as error:
        raise UsageError(str(error)) from None


def table(report: Report, every: bool = False) -> list[tuple[str, list[tuple[str, ...]]]]:
    """For each operator its rows under HEADS: each timed and each failing case, the others of a dtype together."""
    found = []
    for name in dict.fromkeys(r.operator for r in report.results):
        rows, together = [], dict[tuple[str, str], list[Result]]()
        for r in (r for r in report.results if r.operator == name):
            if every or not r.passed or r.regressions or r.scale in ("network", "recorded"):
                rows.append(_row(r.case, [r]))
            else:
                together.setdefault((r.backend, r.dtype), []).append(r)
        rows += [_row(f"{len(rs)} small cases", rs) for rs in together.values()]
        found.append((name, rows))
    return found


def _row(case: str, results: list[Result]) -> tuple[str, ...]:
    first = results[0]
    diffs = []
    for m in MEASURES:
        values = [v for r in results if (v := r.worst(m)) is not None]
        diffs.append("" if m == "diff4" and len(results) > 1 else show_diff(max(values, default=None)))
    verdict = "right" if all(r.passed for r in results) else "WRONG"
    if all(r.not_run for r in results):
        verdict = "not run"
    if any(r.regressions for r in results):
        verdict = "WORSE"
    changes = [r.stability.worst for r in results if r.stability]
    e = first.efficiency if len(results) == 1 else None
    share = f"{e.best * 100:.0f} %{'' if e.reached else ' <'}" if e else ""
    time = show_time(first.seconds) if len(results) == 1 else ""
    change = show_diff(max(changes)) if changes else ""
    return (case, first.backend, first.dtype, *diffs, change, verdict, time, share, e.bound if e else "")


def remarks(report: Report) -> list[str]:
    """What a reader of the table must still be told, one line each."""
    lines = [f"{r.operator}, {r.case}, {r.dtype}: {f}" for r in report.failed for f in r.failures]
    lines += [f"{b.name}: {b.failure}" for b in report.not_refused]
    lines += [f"{r.operator}, {r.case}, {r.dtype}: {w}" for r in report.regressions for w in r.regressions]
    lines += [f"{r.operator}, {r.case}: what was recorded is wrong: {f}" for r in report.results for f in r.recorded]
    lines += [f"{r.operator}, {r.case}: not made up from shapes: {r.not_run}" for r in report.results if r.not_run]
    lines += [
        f"{n.name}: {n.operators} operators, {len(n.results)} cases in {n.calls:,} calls, {show_time(n.seconds)} in all"
        for n in report.networks
    ]
    if report.slow:
        lines.append("'<' marks timed cases below their efficiency target; the report says why")
    if report.baseline and (noisy := [r for r in report.results if r.noise > NOISY]):
        words = f"this machine was busy: {len(noisy)} timed cases were compared more loosely than by {NOISY:.0%}"
        lines.append(f"{words}, the worst by {max(r.noise for r in noisy):.0%}")
    if report.bad_calls and not report.not_refused:
        lines.append(f"all {len(report.bad_calls)} malformed calls are refused")
    return lines
