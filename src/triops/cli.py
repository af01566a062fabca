"""What the commands of `triops_cli` do."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

import triops
from triops import _bench, _compiling, _demo, _info, _warmup, compat, scenes
from triops._arguments import UsageError, choose_device, choose_operators, writable_file, writable_folder
from triops._bench import Row
from triops._op import OPERATORS, why_unusable
from triops._terminal import Progress, styled, table, wrapped
from triops.acceptance import command
from triops.acceptance.report import headline
from triops.acceptance.results import Report, show_time
from triops.data import command as dataset
from triops_cli import main as main

STYLES = {"right": "green", "yes": "green", "WRONG": "red", "WORSE": "red", "NO": "red"}
INTERRUPTED = 130  # the exit status of a program that Ctrl-C has stopped


def run(options: Namespace) -> int:
    """Run the command that was parsed. Returns the exit status."""
    try:
        return COMMANDS[options.command](options)
    except UsageError as error:
        print(f"triops {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads any more, which is no fault of this machine
        raise
    except OSError as error:  # such as a disk that is full before a report is written
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"triops {options.command}: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _progress(what: str, total: int | None = None) -> Iterator[Progress]:
    """A line of progress, above which compilations are told."""
    with Progress(what, total) as progress, _compiling.shown_by(progress.say):
        yield progress


def info(options: Namespace) -> int:
    for name, version in _info.versions().items():
        print(f"{name:8} {version}")
    print(styled("\ndevices", "bold"))
    for line in _info.devices():
        print(wrapped(f"  {line}", "    "))
    print(styled("\nwho serves a call", "bold"))
    groups = _info.serving_together()
    for backends, operators in groups.items():
        which = ", ".join(operators) if len(groups) > 1 else f"all {len(operators)} operators"
        print(wrapped(f"  {backends}:", "    "))
        print(wrapped(f"    {which}", "    "))
    print()
    print(wrapped("CPU threads: plain Python threads over kernels that release the GIL, as many as torch is set to"))
    print(wrapped(f"compiled CPU kernels: {_info.cache_directory()}"))
    print(styled("\nmodules of other libraries", "bold"))
    for line in _info.dropin():
        print(wrapped(f"  {line}", "    "))
    for line in _info.remedies():
        print(wrapped(f"note: {line}"))
    return 0


def activate(options: Namespace) -> int:
    try:
        print(wrapped(f"wrote {compat.activate()}"))
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be written ({error.strerror}). Remedy: activate in a virtual environment of your "
            "own, or write `import triops.compat.mmcv` (or .spconv, .pcdet) at the top of the program"
        ) from None
    return 0


def deactivate(options: Namespace) -> int:
    try:
        print("removed" if compat.deactivate() else "was not active")
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be removed ({error.strerror})") from None
    return 0


def bench(options: Namespace) -> int:
    names, device = choose_operators(options.operators), choose_device(options.device)
    writable_file(options.json, "--json")
    if options.threads:
        torch.set_num_threads(options.threads)
    rows: list[Row] = []
    with _progress("measuring", len(_bench.chosen(names))) as progress:
        for row in _bench.rows(names, device, budget=options.seconds):
            rows.append(row)
            progress.advance(row.operator)
    title = f"{device}, {torch.get_num_threads()} threads: median time; 'x name' is how many times longer name takes"
    _show_rows(rows, title)
    if options.json:
        figures: dict[str, Any] = {
            "versions": _info.versions(),
            "devices": _info.devices(),
            "rows": [asdict(r) for r in rows],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(wrapped(f"wrote {options.json}"))
    return 0 if all(row.right for row in rows) else 1


def _show_rows(rows: list[Row], title: str) -> None:
    """One table: time, rate, and how many times longer the reference and each peer take."""
    others = sorted({name for row in rows for name in row.others}, key=lambda n: (n != "reference", n))
    heads = ("case", "time", "GB/s", *(f"x {name}" for name in others), "right?")
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        dtype = "" if row.dtype == "float32" else f", {row.dtype}"
        gains = [row.speed_up(name) for name in others]
        groups.setdefault(row.operator, []).append((
            row.case + dtype, show_time(row.seconds), _number(row.gigabytes_per_second),
            *("-" if gain is None else _number(gain) for gain in gains), "yes" if row.right else "NO",
        ))  # fmt: skip
    print(wrapped(title))
    print(table(heads, list(groups.items()), numbers=heads[1:-1], optional=("GB/s",), styles=STYLES))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def check(options: Namespace) -> int:
    report = _run_check(
        command.Options(
            tuple(options.operators), options.device, options.backend, options.quick, (), options.seed, options.out,
            options.save_failures, options.baseline, options.save_baseline, options.cases,
        )
    )  # fmt: skip
    _show_check(report, options.all)
    _show_path("report", options.out / "report.html")
    if options.save_baseline:
        _show_path("baseline", options.save_baseline)
    return _status(report)


def replay(options: Namespace) -> int:
    for line in command.describe_case(options.file):
        print(wrapped(line, "  "))
    report = _run_check(command.Options(device=options.device, backend=options.backend, cases=options.file))
    _show_check(report)
    return _status(report)


def _run_check(options: command.Options) -> Report:
    with _progress("checking") as progress:
        return command.check(options, lambda result, total: progress.advance(result.operator, total))


def _show_check(report: Report, every: bool = False) -> None:
    rows = command.table(report, every)
    print(table(command.HEADS, rows, numbers=command.NUMBERS, optional=command.OPTIONAL, styles=STYLES))
    for line in command.remarks(report):
        print(wrapped(line, "  "))
    for line in wrapped(headline(report)).splitlines():
        print(styled(line, "green" if report.passed else "red"))


def _status(report: Report) -> int:
    return INTERRUPTED if report.interrupted_of is not None else 0 if report.passed else 1


def _show_path(what: str, path: Path) -> None:
    print(wrapped(f"{what}: {path.resolve()}"))


def warmup(options: Namespace) -> int:
    if options.network:
        try:
            example = _warmup.load_example(options.network)
        except (ValueError, ImportError) as error:
            raise UsageError(str(error)) from None
        reason = why_unusable("gpu") or ("" if torch.cuda.is_available() else "torch sees no GPU here")
        if reason:
            raise UsageError(f"--network: {reason}")
        print(f"compiled {_warmup.warm_network(example)} GPU kernels, in Triton's cache")
        return 0
    chosen = [choose_device(options.device)] if options.device else _warmup.devices()
    with _progress("compiling", len(chosen) * len(OPERATORS)) as progress:
        for operator, device, _ in _warmup.warm_all(chosen):
            progress.advance(f"{operator} on {device}")
    if "cpu" in chosen:
        print(wrapped(f"compiled CPU kernels: {_info.cache_directory()}"))
    if "cuda" in chosen:
        print("compiled GPU kernels: in Triton's cache")
    return 0


def demo(options: Namespace) -> int:
    device, out = choose_device(options.device), writable_folder(options.out, "--out")
    _draw_picture(device, out / "scene.png")
    every = options.all
    if device == "cpu" and (every or _compiling.count):  # which the picture has told
        _compile_together(every)
    report = _run_check(command.Options(device=device, samples=tuple(_demo.checked_samples(every)), out=out))
    wrong = {r.operator for r in report.failed}
    rows: list[Row] = []
    samples = [] if report.interrupted_of is not None else _demo.timed_samples(every)
    with _progress("timing", len(samples)) as progress:
        for sample in samples:
            progress.advance(sample.operator)
            rows.append(_demo.timed(sample, device, sample.operator not in wrong))
    shown = "every operator" if every else f"{len(rows)} of {len(_demo.timed_samples(True))} operators"
    _show_rows(rows, f"{shown} at the scale of a network, on {device}; 'right?' by a check on a small input")
    for line in command.remarks(report):
        print(wrapped(line, "  "))
    print(wrapped(f"accuracy: {headline(report)}"))
    _show_path("report", out / "report.html")
    program = _called_as()
    for arguments, what in _NEXT[every:]:
        print(wrapped(f"  {program} {arguments:10}  {what}", " " * (len(program) + 15)))
    return _status(report)


def _called_as() -> str:
    """What a shell finds this program by: its path where `make demo` has called it in an environment of its own."""
    called, found = Path(sys.argv[0]), which("triops")
    known = called.stem != "triops" or (found is not None and Path(found).resolve() == called.resolve())
    return "triops" if known else str(called)


# What a reader of the demo may want to run next; the first is what it has run, if it was asked for every operator.
_NEXT = (
    ("demo --all", "times and checks every operator; compiles for about a minute the first time"),
    ("bench", "compares with plain torch and installed peers"),
    ("check", "holds every kernel to the acceptance standard"),
)


def evaluate(options: Namespace) -> int:
    from triops.evaluate import command as evaluation

    return evaluation.run(options, _progress)


def _draw_picture(device: str, path: Path) -> None:
    scene = scenes.lidar_scene()
    with _progress("points_in_boxes"):
        index = triops.points_in_boxes(scene.points[None].to(device), scene.boxes[None].to(device))[0]
    print(f"{len(scene.points):,} points, {len(scene.boxes)} boxes, {int((index >= 0).sum()):,} points inside")
    if not find_spec("matplotlib"):
        print(wrapped("no picture: matplotlib is not installed. Remedy: pip install 'triops[viz]'"))
        return
    with _progress("drawing"):
        _demo.draw_scene(scene.points, scene.boxes, index, path)
    _show_path("picture", path)


def _compile_together(every: bool) -> None:
    """The first time on a machine, compile what the demo runs on all cores."""
    # the last of the tour take longest: no core shall wait for one of them
    operators = list(dict.fromkeys(s.operator for s in reversed(_demo.timed_samples(every))))
    if (os.cpu_count() or 1) < 2:
        return
    with _progress("compiling for this CPU, once", len(operators)) as progress:
        try:
            for operator, _, _ in _warmup.warm_all(["cpu"], operators=operators, demo=True):
                progress.advance(f"compiling for this CPU, once: {operator}")
        except (OSError, BrokenProcessPool):  # no further processes here: kernels are compiled as they are called
            return


COMMANDS = {
    "info": info, "demo": demo, "check": check, "replay": replay, "bench": bench, "warmup": warmup,
    "activate": activate, "deactivate": deactivate, "eval": evaluate, "gtdb": dataset.gtdb, "label": dataset.label,
    "synth": dataset.synth,
}  # fmt: skip
