"""What `triops gtdb`, `triops label` and `triops synth` do."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from triops import _compiling
from triops._arguments import UsageError, writable_file, writable_folder
from triops._terminal import Progress, wrapped
from triops.data import files
from triops.data.engine_local import LocalEngine
from triops.data.engine_ray import RayEngine
from triops.data.frames import FrameError, Source
from triops.data.gtdb import GtDatabase
from triops.data.job import Engine, Job, JobError, Result, Tally, parse_shard, run
from triops.data.label import PointLabels
from triops.data.parquet import ToParquet
from triops.data.sources import open_sources
from triops.data.synthetic import Noise, write_kitti

SHOWN = 50  # bad frames on the terminal; --report has all

Sources = tuple[Source, ...]


def gtdb(options: Namespace) -> int:
    def make(sources: Sources, classes: tuple[str, ...], out: str) -> Job:
        if options.to == "parquet":
            return ToParquet(sources, out)
        return GtDatabase(sources, out, options.to, classes)

    return _run(options, make, options.sweeps, inclusive=options.to == "pcdet")


def label(options: Namespace) -> int:
    def make(sources: Sources, classes: tuple[str, ...], out: str) -> Job:
        named = classes or tuple(dict.fromkeys(name for source in sources for name in source.classes()))
        return PointLabels(sources, out, options.to, named)

    # A label per point of the frame's own file, unless sweeps are asked for.
    return _run(options, make, options.sweeps or 0, inclusive=False)


def synth(options: Namespace) -> int:
    out = writable_folder(options.out, "OUT")
    for name in ("frames", "points", "boxes"):
        if getattr(options, name) < 0:
            raise UsageError(f"--{name} must be at least 0, got {getattr(options, name)}")
    noise = Noise() if options.predictions else None
    write_kitti(out, options.frames, points=options.points, boxes=options.boxes, seed=options.seed, noise=noise)
    print(wrapped(f"{out}: {options.frames:,} frames of {options.points:,} points and {options.boxes} objects"))
    return 0


def _run(
    options: Namespace, make: Callable[[Sources, tuple[str, ...], str], Job], sweeps: int | None, *, inclusive: bool
) -> int:  # fmt: skip
    """Run a job over the sources named on the command line, and report. Returns the exit status."""
    if options.sweeps is not None and options.sweeps < 0:
        raise UsageError(f"--sweeps must be at least 0, got {options.sweeps}")
    writable_file(options.report, "--report")
    try:
        shard, engine = parse_shard(options.shard), _engine(options)
        sources, broken = open_sources(
            options.source, split=options.split, root=options.root, points=options.points, sweeps=sweeps,
            inclusive=inclusive,
        )  # fmt: skip
        if not sources or (broken and options.strict):
            raise FrameError("; ".join(broken.values()))
        out = options.out or getattr(sources[0], "root", None)
        if out is None:
            raise UsageError("--out: Parquet frames have no folder of their own to write to")
        classes = tuple(name for name in (options.classes or "").split(",") if name)
        job = make(sources, classes, out)
        with Progress("looking for what is done") as progress, _compiling.shown_by(progress.say):

            def watch(tally: Tally, total: int) -> None:
                progress.advance(tally.describe(), total)

            result = run(job, engine, shard=shard, strict=options.strict, broken=broken, watch=watch)
    except UsageError:
        raise
    except JobError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"output cannot be written ({files.reason(error)})") from None
    except ValueError as error:
        print(wrapped(f"triops {options.command}: stopped: {error}"), file=sys.stderr)
        return 1
    _show(result)
    if options.report:
        _write_report(options.report, result)
    return 0 if result.good else 1


def _engine(options: Namespace) -> Engine:
    if options.workers < 0:
        raise UsageError(f"--workers must be at least 0, got {options.workers}")
    if options.engine == "ray":
        return RayEngine(options.address, options.workers)
    if options.address:
        raise UsageError("--address is for --engine ray")
    return LocalEngine(options.workers)


def _show(result: Result) -> None:
    if result.before:
        print(f"{result.before:,} of {result.frames:,} frames were done before")
    if result.tally.frames:
        print(wrapped(f"{result.tally.frames:,} frames in {result.tally.seconds:,.1f} s: {result.tally.describe()}"))
    if result.finished:
        print(wrapped(result.finished))
    elif result.missing:
        print(wrapped(f"{result.missing:,} frames are left to other parts; the last of them to end finishes the job"))
    for what, errors in (("source", result.broken), ("frame", result.bad)):
        if errors:
            print(f"{len(errors):,} bad {what}{'s' * (len(errors) > 1)}, left out:")
        for name, reason in [*errors.items()][:SHOWN]:
            print(wrapped(f"  {name}: {reason}", "    "))
        if len(errors) > SHOWN:
            print(f"  and {len(errors) - SHOWN:,} more: --report FILE has all")


def _write_report(path: Path, result: Result) -> None:
    tally = result.tally
    report = {
        "frames": result.frames, "done_before": result.before, "done_now": tally.frames - len(tally.errors),
        "missing": result.missing, "seconds": tally.seconds, "frames_per_second": tally.rate if tally.frames else None,
        "bound_by": tally.bound if tally.frames else None,
        "thread_seconds": {name: getattr(tally, name) for name in ("read", "compute", "write", "waiting")},
        "bad_sources": result.broken, "bad_frames": result.bad, "finished": result.finished,
    }  # fmt: skip
    files.write_whole(str(path), (json.dumps(report, indent=1) + "\n").encode(), str(path.parent))
    print(wrapped(f"report: {path}"))
