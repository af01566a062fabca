"""The command line: `triops info | demo | check | replay | bench | warmup | activate | deactivate`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:  # pragma: no cover
    sys.exit(
        "The command line needs two more packages. Remedy: pip install 'triops[cli]'. "
        "Without them `python -m triops.acceptance` does what `triops check` does."
    )

if TYPE_CHECKING:
    from triops._bench import Row
    from triops.acceptance.command import Options
    from triops.acceptance.results import Report

app = typer.Typer(
    help="Operators for detection on points, voxels and boxes.", no_args_is_help=True, add_completion=False
)
console = Console()


def main() -> None:
    app()


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_operators(names: list[str] | None) -> list[str]:
    import triops  # noqa: F401
    from triops._op import OPERATORS

    unknown = [n for n in names or [] if n not in OPERATORS]
    if unknown:
        raise typer.BadParameter(f"no operator {', '.join(unknown)}; there are {', '.join(OPERATORS)}")
    return names or []


def check_device(device: str | None) -> str:
    import torch

    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"--device must be cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch sees no GPU here")
    return device or best_device()


def show_time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:.0f} {unit}"
    return f"{seconds * 1e6:.2g} us"


def show_rows(rows: list[Row], title: str) -> None:
    """One table: time, rate, and how many times longer the reference and each peer take."""
    others = sorted({name for row in rows for name in row.others}, key=lambda n: (n != "reference", n))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("case", min_width=24, overflow="fold")
    for heading in ("time", "GB/s", *(f"x {name}" for name in others)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("right?", no_wrap=True)
    operator = ""
    for row in rows:
        if row.operator != operator:
            operator = row.operator
            table.add_section()
            table.add_row(f"[bold]{operator}[/]")
        dtype = "" if row.dtype == "float32" else f", {row.dtype}"
        gains = [row.speed_up(name) for name in others]
        table.add_row(
            f"  {row.case}{dtype}", show_time(row.seconds), show_number(row.gigabytes_per_second),
            *("-" if gain is None else show_number(gain) for gain in gains),
            "[green]yes[/]" if row.right else "[red]NO[/]",
        )  # fmt: skip
    console.print(table)


def show_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@app.command()
def info() -> None:
    """Versions, devices, which backend serves each operator, and what to do about anything missing."""
    import triops  # noqa: F401
    from triops import _info

    for name, version in _info.versions().items():
        console.print(f"{name:8} {version}", highlight=False)
    console.print("\ndevices", style="bold")
    for line in _info.devices():
        console.print(f"  {line}", highlight=False)
    table = Table("operator", "on CPU", "on GPU", title="\nwho serves a call", title_justify="left")
    for operator, backends in _info.serving().items():
        table.add_row(operator, backends["cpu"], backends["gpu"])
    console.print(table)
    console.print("CPU threads: plain Python threads over kernels that release the GIL, as many as torch is set to")
    console.print(f"compiled CPU kernels: {_info.cache_directory()}", highlight=False, soft_wrap=True)
    console.print("\nmodules of other libraries", style="bold")
    for line in _info.dropin():
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    for line in _info.remedies():
        console.print(f"note: {line}", highlight=False)


@app.command()
def activate() -> None:
    """From now on programs find spconv and the compiled modules of mmcv and OpenPCDet in triops, if not installed."""
    from triops import compat

    console.print(f"wrote {compat.activate()}", highlight=False, soft_wrap=True)


@app.command()
def deactivate() -> None:
    """Undo `triops activate`."""
    from triops import compat

    console.print("removed" if compat.deactivate() else "was not active")


@app.command()
def bench(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="operators; all of them if none")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the best there is by default")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's own number")] = 1,
    seconds: Annotated[float, typer.Option(help="time for each case")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the figures here")] = None,
) -> None:
    """Time the network-scale samples against the reference and any installed peer, interleaved."""
    import torch

    from triops import _bench, _info

    names, where = check_operators(operators), check_device(device)
    if threads:
        torch.set_num_threads(threads)
    rows: list[Row] = []
    with _progress() as progress:
        task = progress.add_task("measuring", total=len(_bench.chosen(names)))
        for row in _bench.rows(names, where, budget=seconds):
            rows.append(row)
            progress.update(task, advance=1, description=row.operator)
    show_rows(
        rows, f"{where}, {torch.get_num_threads()} threads: median time; 'x name' is how many times longer name takes"
    )
    if json_file:
        figures: dict[str, Any] = {
            "versions": _info.versions(),
            "devices": _info.devices(),
            "rows": [asdict(r) for r in rows],
        }
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"wrote {json_file}")
    if not all(row.right for row in rows):
        raise typer.Exit(1)


def run_check(options: Options) -> Report:
    """The check with a progress bar; what makes no sense is said as typer says it."""
    import triops  # noqa: F401
    from triops.acceptance import command

    with _progress() as progress:
        task = progress.add_task("checking", total=None)
        try:
            return command.check(
                options, lambda r, total: progress.update(task, advance=1, total=total, description=r.operator)
            )
        except command.UsageError as error:
            raise typer.BadParameter(str(error)) from None


def show_check(report: Report, every: bool = False) -> None:
    from triops.acceptance import command

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    kept = [i for i, h in enumerate(command.HEADS) if console.width >= 120 or h in command.ALSO_NARROW]
    table.add_column("case", min_width=27, overflow="fold")
    for heading in (command.HEADS[i] for i in kept[1:]):
        table.add_column(heading, no_wrap=True, justify="right" if heading in command.NUMBERS else "left")
    colours = {"right": "green", "WRONG": "red", "SLOWER": "red"}
    for operator, rows in command.table(report, every):
        table.add_section()
        table.add_row(f"[bold]{operator}[/]")
        for row in rows:
            coloured = (f"[{colours[row[i]]}]{row[i]}[/]" if row[i] in colours else row[i] for i in kept[1:])
            table.add_row("  " + escape(row[0]), *coloured)
    console.print(table)
    for line in command.remarks(report):
        console.print(line, highlight=False, markup=False)
    console.print(f"[{'green' if report.passed else 'red'}]{command.headline(report)}[/]", highlight=False)


@app.command()
def check(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="operators; all of them if none")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the best there is by default")] = None,
    backend: Annotated[str | None, typer.Option(help="reference, cpu or gpu; the device's own by default")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="small cases, and the demo's at network scale")] = False,
    seed: Annotated[int, typer.Option(help="other random numbers in the samples")] = 0,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("triops-check"),
    save_failures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write each failing case to a file here")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="REPORT.JSON", help="fail where this run is slower than that one")
    ] = None,
    cases: Annotated[Path | None, typer.Option(metavar="DIR", help="case files instead of the samples")] = None,
    every: Annotated[bool, typer.Option("--all", help="a row for every case")] = False,
) -> None:
    """Hold every kernel to the acceptance standard: right, and near what the machine can do. Writes a report."""
    from triops.acceptance.command import Options

    report = run_check(
        Options(tuple(operators or ()), device, backend, quick, False, seed, out, save_failures, baseline, cases)
    )
    show_check(report, every)
    console.print(f"report: {(out / 'report.html').resolve()}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="a case file, from --save-failures or TRIOPS_RECORD")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the best there is by default")] = None,
    backend: Annotated[str | None, typer.Option(help="reference, cpu or gpu; the device's own by default")] = None,
) -> None:
    """Run a saved call again, on any backend, and judge what it gives now and what it gave then."""
    from triops.acceptance import command

    try:
        told = command.describe_case(file)
    except command.CaseError as error:
        raise typer.BadParameter(str(error)) from None
    for line in told:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    report = run_check(command.Options(device=device, backend=backend, cases=file))
    show_check(report)
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def warmup(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; every one there is by default")] = None,
) -> None:
    """Compile every kernel now, CPU and GPU, on all cores, into the caches, so that no later program waits for it."""
    import triops  # noqa: F401
    from triops import _info, _warmup
    from triops._op import OPERATORS

    chosen = [check_device(device)] if device else _warmup.devices()
    with _progress() as progress:
        task = progress.add_task("compiling", total=len(chosen) * len(OPERATORS))
        for operator, where, _ in _warmup.warm_all(chosen):
            progress.update(task, advance=1, description=f"{operator} on {where}")
    if "cpu" in chosen:
        console.print(f"compiled CPU kernels: {_info.cache_directory()}", highlight=False, soft_wrap=True)
    if "cuda" in chosen:
        console.print("compiled GPU kernels: in Triton's cache", highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for what the demo writes")] = Path("triops-demo"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the best there is by default")] = None,
) -> None:
    """A synthetic LiDAR sweep through every operator, checked against the reference, with a picture."""
    from importlib.util import find_spec

    import triops
    from triops import _bench, scenes

    where = check_device(device)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with _progress() as progress:
        task = progress.add_task("compiling and running", total=len(_bench.chosen([], demo_only=True)))
        for row in _bench.rows([], where, demo_only=True, budget=0.3, peers=False):
            rows.append(row)
            progress.update(task, advance=1, description=row.operator)
    show_rows(rows, f"every operator on {where}; 'x reference' is how many times longer plain torch takes")
    if find_spec("matplotlib"):
        from triops._demo import draw_scene

        scene = scenes.lidar_scene()
        index = triops.points_in_boxes(scene.points[None].to(where), scene.boxes[None].to(where))[0]
        picture = out / "scene.png"
        draw_scene(scene.points, scene.boxes, index, picture)
        console.print(f"picture: {picture.resolve()}", highlight=False, soft_wrap=True)
    else:
        console.print("no picture: matplotlib is not installed. Remedy: pip install 'triops[viz]'")
    from triops.acceptance.command import Options, headline

    report = run_check(Options(device=where, demo_only=True, out=out))
    console.print(f"accuracy and efficiency: {headline(report)}", highlight=False)
    console.print(f"report: {(out / 'report.html').resolve()}", highlight=False, soft_wrap=True)
    if not (report.passed and all(row.right for row in rows)):
        console.print("[red]an operator differs from its reference[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
