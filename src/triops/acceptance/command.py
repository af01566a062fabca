"""What `triops check` and `triops replay` do, and the rows and lines that `triops.cli` shows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triops._arguments import UsageError, choose_device, choose_operators, writable_folder
from triops._op import OPERATORS, REQUIREMENTS, describe, why_unusable
from triops.acceptance import report as report_files
from triops.acceptance import runner
from triops.acceptance.case_file import CaseError, read
from triops.acceptance.ceilings import measured
from triops.acceptance.report import MEASURES, show_diff, show_time
from triops.acceptance.results import BaselineError, Report, Result, environment, read_baseline
from triops.acceptance.runner import Task

HEADS = ("case", "backend", "dtype", *MEASURES, "verdict", "time", "effic.", "bound")
OPTIONAL = ("diff2", "diff4", "bound", "backend", "diff1", "diff3")  # left out of a narrow table, in this order
NUMBERS = (*MEASURES, "time", "effic.")

# What a front end does about each result as it comes: advance a progress bar.
OnResult = Callable[[Result, int], Any]


@dataclass(frozen=True)
class Options:
    operators: tuple[str, ...] = ()  # functions or operators; none: all
    device: str | None = None  # None: the best there is
    backend: str | None = None  # None: the device's own
    quick: bool = False
    demo_only: bool = False
    seed: int = 0
    out: Path | None = None  # folder of report.html and report.json; None: none is written
    save_failures: Path | None = None
    baseline: Path | None = None
    cases: Path | None = None  # case files instead of the samples
    seconds: float | None = None  # for timing one case


def check(options: Options, on_result: OnResult = lambda result, total: None) -> Report:
    """Check, time, compare, write the report. An interrupt ends the check; the report tells what was done until then.

    Raises:
        UsageError: before anything runs, where the options make no sense here.
    """
    device = choose_device(options.device)
    operators = choose_operators(options.operators)
    before = _baseline(options, device)
    _check_backend(options.backend, device)
    for folder, option in ((options.out, "--out"), (options.save_failures, "--save-failures")):
        if folder is not None:
            writable_folder(folder, option)
    todo = _todo(options, operators, device)
    timed = any(t.timed for t in todo)
    ceilings = measured(device) if timed else None
    report = Report(device, options.quick, options.seed, environment(), ceilings)
    report.baseline = str(options.baseline or "")
    budget = options.seconds or (0.1 if options.quick or options.demo_only else 0.3)
    try:
        for result in runner.check(
            todo, device, backend=options.backend, ceilings=report.ceilings, seconds=budget, before=before,
            save_failures=options.save_failures,
        ):  # fmt: skip
            report.results.append(result)
            on_result(result, len(todo))
        if options.cases is None and not options.demo_only:
            report.bad_calls = runner.check_bad_calls(operators)
    except KeyboardInterrupt:
        report.interrupted_of = len(todo)
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


def _baseline(options: Options, device: str) -> dict[tuple[str, ...], float]:
    try:
        return read_baseline(options.baseline, device) if options.baseline else {}
    except BaselineError as error:
        raise UsageError(str(error)) from None


def _todo(options: Options, operators: list[str], device: str) -> list[Task]:
    try:
        return runner.tasks(
            operators, quick=options.quick, demo_only=options.demo_only, seed=options.seed, device=device,
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
            if every or not r.passed or r.regression or r.scale in ("network", "recorded"):
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
    if any(r.regression for r in results):
        verdict = "SLOWER"
    e = first.efficiency if len(results) == 1 else None
    share = f"{e.best * 100:.0f} %{'' if e.reached else ' <'}" if e else ""
    time = show_time(first.seconds) if len(results) == 1 else ""
    return (case, first.backend, first.dtype, *diffs, verdict, time, share, e.bound if e else "")


def remarks(report: Report) -> list[str]:
    """What a reader of the table must still be told, one line each."""
    lines = [f"{r.operator}, {r.case}, {r.dtype}: {f}" for r in report.failed for f in r.failures]
    lines += [f"{b.name}: {b.failure}" for b in report.not_refused]
    lines += [
        f"{r.operator}, {r.case}, {r.dtype}: {show_time(r.before_seconds)} before, {show_time(r.seconds)} now"
        for r in report.regressions
    ]
    lines += [f"{r.operator}, {r.case}: what was recorded is wrong: {f}" for r in report.results for f in r.recorded]
    if report.slow:
        lines.append(f"'<' marks the {len(report.slow)} timed cases below their efficiency target; the report says why")
    if report.bad_calls and not report.not_refused:
        lines.append(f"all {len(report.bad_calls)} malformed calls are refused")
    return lines
