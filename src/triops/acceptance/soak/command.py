"""`python -m triops.acceptance.soak`: random calls of everything until the time is up; exit status 1 on any failure."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import triops  # noqa: F401
from triops._arguments import UsageError, writable_file
from triops.acceptance.soak.calls import BACKENDS, Spec, draw
from triops.acceptance.soak.execute import run_round
from triops.acceptance.soak.summary import Summary
from triops.acceptance.soak.workers import Settings, Soak, prepare_environment

MINUTES = 5.0


def default_backends() -> tuple[str, ...]:
    """Every one that this machine has, but Triton's interpreter, which is slow."""
    found = ["reference", *(["cpu"] if find_spec("numba") else [])]
    if torch.cuda.is_available() and find_spec("triton"):
        found += ["cuda", "cuda-stream", "cuda-graph"]
    return tuple(found)


class Progress:
    """One line that is written over on a terminal, and now and then a line elsewhere."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.shown = 0  # failures

    def __call__(self, summary: Summary, target: str) -> None:
        for failure in summary.failures[self.shown :]:
            print(f"\nFAILED {failure.call or failure.target}\n  {failure.what}\n  repeat: {failure.repeat}")
        self.shown = len(summary.failures)
        terminal = sys.stdout.isatty()
        if time.monotonic() - self.last > (0.5 if terminal else 20):
            self.last = time.monotonic()
            line = summary.progress(target)
            print(f"\r{line:<78.78}" if terminal else line, end="" if terminal else "\n", flush=True)


def repeat(texts: list[str]) -> int:
    """The named calls, at once, in this process."""
    faulthandler.enable()
    specs = [Spec.parse(text) for text in texts]
    for spec in specs:
        print(draw(spec), flush=True)
    failed = False
    for spec, verdict in zip(specs, run_round(specs), strict=True):
        failed |= bool(verdict.failures)
        print(f"{spec}: {verdict.outcome}, {'; '.join(verdict.failures) or 'right'}")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m triops.acceptance.soak", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="operators and triops.FUNCTIONs; all if none")
    parser.add_argument("--minutes", type=float, help=f"time to draw calls for; {MINUTES:g} if no --calls is given")
    parser.add_argument("--calls", type=int, help="calls to make")
    parser.add_argument("--seed", type=int, help="which calls; new ones if not given")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="again for more; all there are but the "
                        "interpreter if none")  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, help="worker processes")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a call hangs")
    parser.add_argument("--most-failures", type=int, default=20, help="failures after which the soak stops")
    parser.add_argument("--failures-per-target", type=int, default=3, help="after which a target is left out")
    parser.add_argument("--save-failures", type=Path, default=Path("triops-soak"), metavar="DIR",
                        help="folder of the case files that `triops replay` reads")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the summary here")
    parser.add_argument("--import", action="append", default=[], dest="modules", metavar="MODULE",
                        help="imported first: operators of your own")  # fmt: skip
    parser.add_argument("--repeat", nargs="+", metavar="TARGET:BACKEND:SEED", help="these calls at once, here, no more")
    options = parser.parse_args(arguments)
    try:
        writable_file(options.json, "--json")  # seen now, and not after hours
    except UsageError as error:
        parser.error(str(error))

    backends = tuple(options.backend or default_backends())
    if options.repeat:
        backends = tuple(Spec.parse(text).backend for text in options.repeat)
    if any(b.startswith("cuda") for b in backends) and not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    if "interpreter" in backends and any(b.startswith("cuda") for b in backends):
        parser.error("Triton's interpreter and the GPU cannot serve one process")
    prepare_environment(backends)
    for module in options.modules:
        importlib.import_module(module)
    if options.repeat:
        return repeat(options.repeat)

    minutes = options.minutes if options.minutes or options.calls else MINUTES
    seed = options.seed if options.seed is not None else int(time.time()) % 10**6
    settings = Settings(
        seed, backends, tuple(options.targets), options.calls, minutes and minutes * 60, options.processes,
        options.timeout, options.most_failures, options.failures_per_target, options.save_failures,
        tuple(options.modules),
    )  # fmt: skip
    try:
        soak = Soak(settings, Progress())
    except ValueError as error:
        parser.error(str(error))
    without = "" if find_spec("numba") else " (no numba here: CPU calls would run the reference)"
    print(f"seed {seed}, backends {', '.join(backends)}{without}, {len(soak.summary.targets)} targets", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # a soak in the background ends with its summary, too
        signal.signal(number, signal.default_int_handler)
    summary = soak.run()
    print(f"\n{summary.table()}\n")
    for failure in summary.failures:
        print(f"FAILED {failure.call or failure.target}: {failure.what.splitlines()[0]}\n  repeat: {failure.repeat}")
        if failure.case:
            print(f"  case: {failure.case}")
    print(summary.headline())
    if options.json:
        from triops.acceptance.results import environment

        options.json.write_text(json.dumps(summary.as_json(environment()), indent=1) + "\n")
    return 1 if summary.failures else 130 if summary.interrupted else 0
