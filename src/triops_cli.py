"""The command line: its commands, options and help.

This module stands beside the package, not inside: to import any part of `triops` is to import torch, which takes
seconds, and `triops --help` needs neither. `triops.cli` runs the commands.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

DESCRIPTION = "Operators for detection on points, voxels and boxes."
NOBODY_READS = 141  # the exit status of a program that a closed pipe has stopped
BEST_DEVICE = "cpu or cuda; the best there is by default"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 1 where a check fails, 2 where a call makes no sense."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads, such as `head`, has seen enough; what is left goes nowhere, also when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    from triops import cli

    return cli.run(options)


def version() -> str:
    """The version of the package that a command would import, without importing it."""
    found = find_spec("triops")
    source = Path(found.origin).read_text(encoding="utf-8") if found and found.origin else ""
    stated = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    return stated[1] if stated else "unknown"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triops", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"triops {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help, allow_abbrev=False)

    command("info", "Versions, devices, which backend serves each operator, and what to do about anything missing.")

    demo = command("demo", "A synthetic LiDAR sweep with a picture, then a tour of operators, timed and checked.")
    demo.add_argument("--out", type=Path, default=Path("triops-demo"), help="folder for the picture and the report")
    demo.add_argument("--device", help=BEST_DEVICE)
    demo.add_argument("--all", action="store_true", help="every operator, not a tour of them")

    check = command("check", "Hold every kernel to the acceptance standard: right, and near what the machine can do.")
    _add_operators(check)
    check.add_argument("--quick", action="store_true", help="small cases, and the demo's at network scale")
    _add_backend(check)
    check.add_argument("--seed", type=int, default=0, help="other random numbers in the samples")
    check.add_argument("--out", type=Path, default=Path("triops-check"), help="folder of report.html and report.json")
    check.add_argument("--cases", type=Path, metavar="DIR", help="case files of this folder, not the samples")
    check.add_argument("--save-failures", type=Path, metavar="DIR", help="write each failing case to a file here")
    check.add_argument(
        "--baseline", type=Path, metavar="FILE", help="fail where this run takes more time or memory than that one"
    )
    check.add_argument("--save-baseline", type=Path, metavar="FILE", help="keep this run's figures as a baseline")
    check.add_argument("--all", action="store_true", help="a row for every case")

    replay = command("replay", "Run a saved call again, on any backend, and judge what it gives now and what it gave.")
    replay.add_argument("file", type=Path, help="a case file, from --save-failures or TRIOPS_RECORD")
    _add_backend(replay)

    bench = command("bench", "Time the network-scale samples against the reference and any installed peer.")
    _add_operators(bench)
    bench.add_argument("--device", help=BEST_DEVICE)
    bench.add_argument("--threads", type=int, default=1, help="CPU threads; 0 leaves torch's own number (default 1)")
    bench.add_argument("--seconds", type=float, default=1.0, help="time for each case (default 1)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")

    warmup = command("warmup", "Compile every kernel now, on all cores, so that no later program waits for it.")
    warmup.add_argument("--device", help="cpu or cuda; every one there is by default")
    warmup.add_argument(
        "--network", metavar="FILE.py:CALLABLE", help="only the GPU kernels that this call needs; or module:callable"
    )

    evaluation = command("eval", "Evaluate predictions against ground truth: a table, and on request JSON and HTML.")
    evaluation.add_argument("protocol", choices=["kitti"], help="KITTI: 2D, bird's eye, 3D and orientation, R40, R11")
    evaluation.add_argument(
        "ground_truth", type=Path, metavar="GT", help="folder of label files, such as label_2, or an info file"
    )
    evaluation.add_argument(
        "predictions",
        type=Path,
        metavar="PRED",
        help="folder of label files with scores, or a pickle of annotation dicts",
    )
    evaluation.add_argument(
        "--classes", nargs="+", metavar="NAME", default=["Car", "Pedestrian", "Cyclist"],
        help="what to evaluate (default Car Pedestrian Cyclist)",
    )  # fmt: skip
    evaluation.add_argument("--split", type=Path, metavar="FILE", help="only the frames named here, such as val.txt")
    evaluation.add_argument("--device", help=BEST_DEVICE)
    evaluation.add_argument("--strict", action="store_true", help="stop at the first frame with anything wrong")
    evaluation.add_argument("--json", type=Path, metavar="FILE", help="write figures and curves here")
    evaluation.add_argument("--html", type=Path, metavar="FILE", help="write tables and plots here, as one file")

    gtdb = command(
        "gtdb", "The ground-truth database of a data set, for mmdetection3d or OpenPCDet; or its frames as Parquet."
    )
    _add_dataset_job(gtdb, ("mmdet3d", "pcdet", "parquet"), "layout of the output (default mmdet3d)")

    label = command("label", "The box and the class of every point of a data set.")
    _add_dataset_job(label, ("label", "parquet"), "format of the labels (default label: SemanticKITTI's)")

    synth = command("synth", "A synthetic data set in KITTI's layout.")
    synth.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    synth.add_argument("--frames", type=int, default=10, help="default 10")
    synth.add_argument("--points", type=int, default=120_000, help="per frame (default 120000)")
    synth.add_argument("--boxes", type=int, default=20, help="objects per frame (default 20)")
    synth.add_argument("--seed", type=int, default=0, help="other random numbers")
    synth.add_argument("--predictions", action="store_true", help="also detections with errors, in predictions/")

    command("activate", "From now on programs find mmcv._ext, spconv and others in triops, where not installed.")
    command("deactivate", "Undo `triops activate`.")
    return parser


def _add_dataset_job(parser: argparse.ArgumentParser, formats: Sequence[str], help: str) -> None:
    parser.add_argument(
        "source", nargs="+", metavar="SOURCE", help="KITTI's folder, mmdetection3d's *_infos_*.pkl, or Parquet frames"
    )
    parser.add_argument("--out", help="folder or URL to write to; the data set's own by default")
    parser.add_argument("--to", choices=formats, default=formats[0], help=help)
    parser.add_argument("--classes", metavar="A,B", help="only these classes")
    parser.add_argument("--split", default="train", help="of KITTI's ImageSets (default train)")
    parser.add_argument("--root", help="folder that the paths of an info file start from; its own by default")
    parser.add_argument("--points", metavar="DIR", help="folder of the points below the root")
    loaded = "none" if "label" in formats else "10 for nuScenes, else none"
    parser.add_argument("--sweeps", type=int, help=f"earlier sweeps per frame; {loaded} by default")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="this machine, or a Ray cluster")
    parser.add_argument("--address", help="of the Ray cluster; none starts one on this machine")
    parser.add_argument("--workers", type=int, default=0, help="frames at a time; as many as cores by default")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="do part I of N of the frames")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad frame")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write what was done as JSON")


def _add_operators(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operators", nargs="*", metavar="OP", help="functions of triops or operators; none: all")


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help=BEST_DEVICE)
    parser.add_argument("--backend", help="reference, cpu or gpu; the device's own by default")


if __name__ == "__main__":
    sys.exit(main())
