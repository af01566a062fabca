"""What `triops check` and `triops replay` do; `cli.py` shows it with colours, `__main__.py` without."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triops._op import OPERATORS, REQUIREMENTS, describe, why_unusable
from triops.acceptance import report as report_files
from triops.acceptance import runner
from triops.acceptance.case_file import CaseError as CaseError
from triops.acceptance.case_file import read
from triops.acceptance.ceilings import measured
from triops.acceptance.report import MEASURES, show_diff, show_time
from triops.acceptance.report import headline as headline
from triops.acceptance.results import BaselineError, Report, Result, environment, read_baseline
from triops.acceptance.runner import Task

HEADS = ("case", "backend", "dtype", *MEASURES, "verdict", "time", "effic.", "bound")
ALSO_NARROW = ("case", "dtype", "diff1", "diff3", "verdict", "time", "effic.")  # what 80 columns have room for
NUMBERS = (*MEASURES, "time", "effic.")

# What a front end does about each result as it comes: advance a progress bar.
OnResult = Callable[[Result, int], Any]


class UsageError(ValueError):
    """A call of the command line that makes no sense."""


@dataclass(frozen=True)
class Options:
    operators: tuple[str, ...] = ()
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
    """Check, time, compare, write the report."""
    device = choose_device(options.device)
    unknown = [n for n in options.operators if n not in OPERATORS]
    if unknown:
        raise UsageError(f"no operator {', '.join(unknown)}; there are {', '.join(OPERATORS)}")
    before = _baseline(options, device)
    _check_backend(options.backend, device)
    todo = _todo(options, device)
    timed = any(t.timed for t in todo)
    ceilings = measured(device) if timed else None
    report = Report(device, options.quick, options.seed, environment(), ceilings)
    report.baseline = str(options.baseline or "")
    budget = options.seconds or (0.1 if options.quick or options.demo_only else 0.3)
    for result in runner.check(
        todo, device, backend=options.backend, ceilings=report.ceilings, seconds=budget, before=before,
        save_failures=options.save_failures,
    ):  # fmt: skip
        report.results.append(result)
        on_result(result, len(todo))
    if options.cases is None and not options.demo_only:
        report.bad_calls = runner.check_bad_calls(options.operators)
    if options.out:
        report_files.write(report, options.out)
    return report


def describe_case(path: Path) -> list[str]:
    """What a case file holds, in a few lines."""
    case = read(path)
    args = describe(OPERATORS[case.operator].parameters, case.args)
    back = "its outputs are kept" if case.outputs is not None else "the call never came back"
    return [f"{case.operator}({args})", *(f"{k}: {v}" for k, v in case.about.items() if k != "call"), back]


def choose_device(device: str | None) -> str:
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


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


def _todo(options: Options, device: str) -> list[Task]:
    try:
        return runner.tasks(
            options.operators, quick=options.quick, demo_only=options.demo_only, seed=options.seed, device=device,
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
        lines.append(f"{len(report.slow)} timed cases lie below their efficiency ('<'); the report says why")
    if report.bad_calls and not report.not_refused:
        lines.append(f"all {len(report.bad_calls)} malformed calls are refused")
    return lines


def plain_table(rows: list[tuple[str, list[tuple[str, ...]]]]) -> str:
    """The table in plain text."""
    lines = [HEADS, *(row for _, operator_rows in rows for row in operator_rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS))]

    def show(line: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()

    text = [show(HEADS)]
    for name, operator_rows in rows:
        text += [name, *(show(row) for row in operator_rows)]
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> int:
    """`python -m triops.acceptance`: as `triops check`, for machines without typer and rich."""
    parser = argparse.ArgumentParser(prog="python -m triops.acceptance", description=main.__doc__)
    parser.add_argument("operators", nargs="*", metavar="OP", help="operators; all of them if none")
    parser.add_argument("--device", help="cpu or cuda; the best there is by default")
    parser.add_argument("--backend", help="reference, cpu or gpu; the device's own by default")
    parser.add_argument("--quick", action="store_true", help="small cases, and the demo's at network scale")
    parser.add_argument("--seed", type=int, default=0, help="other random numbers in the samples")
    parser.add_argument("--out", type=Path, default=Path("triops-check"), help="folder of the report")
    parser.add_argument("--save-failures", type=Path, metavar="DIR", help="write each failing case to a file here")
    parser.add_argument("--baseline", type=Path, metavar="REPORT.JSON", help="fail where this run is slower")
    parser.add_argument("--cases", type=Path, metavar="DIR", help="case files instead of the samples")
    parser.add_argument("--all", action="store_true", help="a row for every case")
    found = vars(parser.parse_args(arguments))
    every = found.pop("all")
    options = Options(**{**found, "operators": tuple(found["operators"])})
    count = 0

    def tell(result: Result, total: int) -> None:
        nonlocal count
        count += 1
        if not result.passed or count % 100 == 0 or count == total:
            print(f"{count}/{total} {result.operator}, {result.case}{'' if result.passed else ': WRONG'}", flush=True)

    try:
        report = check(options, tell)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    print(plain_table(table(report, every)), *remarks(report), headline(report), sep="\n")
    print(f"report: {(options.out / 'report.html').resolve()}" if options.out else "")
    return 0 if report.passed else 1
