"""The command line, as a person calls it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest

import triops
import triops_cli
from triops import _compiling, _demo, _info, _sample, _terminal, _warmup, compat
from triops._arguments import choose_operators, operators_of
from triops._op import OPERATORS
from triops.acceptance import command, runner
from triops.cli import _called_as


class Done(NamedTuple):
    status: int
    out: str
    err: str


class Call:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> Done:
        try:
            status = triops_cli.main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse's way
            status = int(stop.code or 0)
        return Done(status, *self.capsys.readouterr())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(capsys)


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120)


# The entry point

LIGHT = """
import sys
import triops_cli
try:
    status = triops_cli.main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
print(status, *sorted({"torch", "numpy", "numba", "triton", "triops"} & set(sys.modules)), len(sys.modules))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["gtdb", "--help"], ["--version"], []])
def test_help_and_version_import_neither_torch_nor_the_package(arguments: list[str]) -> None:
    bare = int(python("-c", "import sys; print(len(sys.modules))").stdout)
    done = python("-c", LIGHT, *arguments)
    status, *heavy, count = done.stdout.splitlines()[-1].split()
    assert heavy == [], done.stderr
    assert status == ("0" if arguments else "2")
    assert int(count) < bare + 80, "argparse, pathlib, re and what they import; nothing else"


@pytest.mark.skipif(sys.platform == "win32", reason="no times of child processes")
def test_help_takes_less_than_a_third_of_a_second() -> None:
    """Of a processor, since other work on the machine is no fault of the command: importing torch alone takes more."""

    def seconds() -> float:
        before = os.times()
        python("-m", "triops_cli", "--help")
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    assert min(seconds() for _ in range(3)) < 0.3


@pytest.mark.skipif(sys.platform == "win32", reason="no such pipes")
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "triops_cli", "info"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (triops_cli.NOBODY_READS, b"")


def test_version_is_that_of_the_package(cli: Call) -> None:
    assert cli("--version") == (0, f"triops {triops.__version__}\n", "")


@pytest.mark.parametrize("module", ["triops", "triops_cli"])
def test_modules_run_as_the_command(module: str) -> None:
    done = python("-m", module, "--version")
    assert done.stdout == f"triops {triops.__version__}\n", done.stderr


def test_help_names_every_command(cli: Call) -> None:
    from triops.cli import COMMANDS

    out = cli("--help").out
    assert all(re.search(rf"^ +{name}\s", out, re.MULTILINE) for name in COMMANDS)
    for name in COMMANDS:
        assert cli(name, "--help").status == 0


def test_an_option_that_is_none_is_refused(cli: Call) -> None:
    done = cli("check", "--quik")
    assert done.status == 2
    assert "--quik" in done.err


# Names


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("points_in_boxes", ["points_in_boxes"]),
        ("bbox_overlaps", ["bbox_overlaps", "bbox_overlaps_backward"]),
        ("voxelize", ["voxelize_padded"]),
        ("roiaware_pool3d", ["roiaware_pool3d_backward", "roiaware_pool3d_forward"]),
        ("roiaware_pool3d_forward", ["roiaware_pool3d_forward"]),
        ("border_align", ["border_align_backward", "border_align_forward"]),
        ("dynamic_scatter", ["dynamic_scatter_backward", "dynamic_scatter_forward"]),
        ("nms3d", ["nms_rotated"]),
        ("nms3d_normal", ["nms"]),
        ("boxes_iou_bev", ["box_iou_rotated"]),
        ("sparse_conv", ["sparse_conv", "sparse_conv_backward_weight"]),
        ("rulebook", [op.name for op in OPERATORS.values() if op.package == "triops.ops.rulebook"]),
        ("Rulebook", []),
        ("reference_backend", []),
        ("points_in_spheres", []),
    ],
)
def test_a_name_stands_for_registered_operators(name: str, operators: list[str]) -> None:
    assert operators_of(name) == operators


def test_every_public_function_of_tensors_is_a_name() -> None:
    functions = [getattr(triops, name) for name in triops.__all__]
    names = [
        f.__name__ for f in functions if isinstance(f, FunctionType) and "Tensor" in f.__annotations__.get("return", "")
    ]
    assert [name for name in names if not operators_of(name)] == []
    assert set(choose_operators(names)) <= set(OPERATORS)


def test_check_takes_public_names(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [t for t in runner.tasks(["nms_rotated"], quick=True) if t.scale != "network"][:1]
    asked: list[list[str]] = []
    monkeypatch.setattr(runner, "tasks", lambda operators, **_: asked.append(operators) or small)
    assert cli("check", "nms3d", "--device", "cpu", "--out", tmp_path).status == 0
    assert asked == [["nms_rotated"]]


@pytest.mark.parametrize("name", ["check", "bench"])
def test_an_unknown_operator_is_named_with_the_known_ones(cli: Call, name: str) -> None:
    done = cli(name, "frustum")
    assert done.status == 2
    assert done.err.startswith(f"triops {name}: no operator frustum; there are ")
    assert done.err.count("\n") == 1
    assert "nms3d" in done.err


def test_an_operator_that_is_misspelt_is_named(cli: Call) -> None:
    assert cli("check", "voxelise").err == "triops check: no operator voxelise; did you mean voxelize?\n"


# What cannot be done here is one sentence


def one_sentence(done: Done, start: str) -> None:
    assert done.status == 2
    assert done.err.startswith(start)
    assert done.err.count("\n") == 1, "one line, no traceback"


def test_an_environment_that_cannot_be_written_is_one_sentence(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triops.compat import _startup

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(_startup.sysconfig, "get_path", lambda name: str(tmp_path / "file"))
    target = tmp_path / "file" / compat._startup.FILE
    one_sentence(cli("activate"), f"triops activate: {target} cannot be written (Not a directory). Remedy: ")
    one_sentence(cli("deactivate"), f"triops deactivate: {target} cannot be removed (Not a directory)")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["check", "points_in_boxes", "--device", "cpu", "--out"], "--out"),
        (["check", "points_in_boxes", "--device", "cpu", "--save-failures"], "--save-failures"),
        (["demo", "--out"], "--out"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_sentence_before_anything_runs(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "check", lambda *a, **k: pytest.fail("the check has started"))
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "reports"
    one_sentence(cli(*arguments, folder), f"triops {arguments[0]}: {option}: {folder} cannot be written (Not a dir")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["check", "points_in_boxes", "--device", "cpu", "--save-baseline"], "--save-baseline"),
        (["bench", "points_in_boxes", "--device", "cpu", "--json"], "--json"),
        (["eval", "kitti", "a", "b", "--html"], "--html"),
        (["gtdb", "a", "--report"], "--report"),
    ],
)
def test_a_folder_in_place_of_a_file_is_one_sentence_before_anything_runs(
    cli: Call, tmp_path: Path, arguments: list[str], option: str
) -> None:
    start = f"triops {arguments[0]}: {option}: {tmp_path} cannot be written (Is a directory)"
    one_sentence(cli(*arguments, tmp_path), start)


def test_a_disk_that_fills_up_is_one_sentence(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr(_info, "versions", full)
    one_sentence(cli("info"), "triops info: report.html: No space left on device")


def test_a_device_that_is_not_here_is_one_sentence(cli: Call) -> None:
    one_sentence(cli("warmup", "--device", "tpu"), "triops warmup: --device must be cpu or cuda, got tpu")


# Ctrl-C


@pytest.fixture
def heard() -> Iterator[None]:
    """A process that a shell started in the background ignores SIGINT, and so would a test in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_an_interrupted_check_writes_the_report_of_what_was_done(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [t for t in runner.tasks(["points_in_boxes"], quick=True) if t.scale != "network"][:5]
    monkeypatch.setattr(runner, "tasks", lambda *a, **k: small)
    real = command.check

    def interrupted(options: command.Options, on_result: command.OnResult) -> object:
        def after_two(result: object, total: int) -> None:
            on_result(result, total)  # type: ignore[arg-type]
            after_two.calls += 1  # type: ignore[attr-defined]
            if after_two.calls == 2:  # type: ignore[attr-defined]
                signal.raise_signal(signal.SIGINT)

        after_two.calls = 0  # type: ignore[attr-defined]
        return real(options, after_two)

    monkeypatch.setattr(command, "check", interrupted)
    done = cli("check", "points_in_boxes", "--device", "cpu", "--out", tmp_path)
    assert done.status == 130
    assert "stopped after 2 of 5 cases; 2 cases passed" in done.out
    found = json.loads((tmp_path / "report.json").read_text())
    assert (len(found["cases"]), found["interrupted_of"]) == (2, 5)
    assert "Stopped after 2 of 5 cases" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("heard")
def test_an_interrupt_elsewhere_is_one_word(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info, "versions", lambda: signal.raise_signal(signal.SIGINT))
    assert cli("info") == (130, "", "stopped\n")


# What is shown


def fits(text: str, columns: int) -> None:
    """Every line is as wide as the terminal, or a path, which is left whole on a line of its own."""
    assert [line for line in text.splitlines() if len(line) > columns and " " in line.strip()] == []


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_info_names_every_operator_and_the_cache_in_lines_that_fit(
    cli: Call, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = cli("info")
    assert done.status == 0
    assert f"all {len(OPERATORS)} operators" in done.out
    fits(done.out, columns)
    others = [name for name in OPERATORS if name != "nms"]
    split = {"on CPU numba, on GPU triton": others, "on CPU numba, on GPU reference": ["nms"]}
    monkeypatch.setattr(_info, "serving_together", lambda: split)
    done = cli("info")
    assert all(name in done.out for name in OPERATORS), "where they differ, each is named"
    assert "compiled CPU kernels" in done.out
    fits(done.out, columns)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_check_fits_the_terminal(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    small = [t for t in runner.tasks(["dynamic_scatter_forward"], quick=True) if t.scale != "network"][:2]
    monkeypatch.setattr(runner, "tasks", lambda *a, **k: small)
    done = cli("check", "--all", "dynamic_scatter_forward", "--device", "cpu", "--out", tmp_path)
    assert done.status == 0, done.out
    fits(done.out, columns)
    assert done.out.count("right") == 2
    assert "2 cases passed" in done.out


def test_a_table_drops_columns_then_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ("case", "dtype", "time", "verdict")
    groups = [
        ("points_in_boxes", [("a sweep of many points", "float32", "1.2 ms", "right"), ("none", "", "", "WRONG")])
    ]

    def shown(columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        return _terminal.table(heads, groups, numbers=("time",), optional=("dtype",)).splitlines()

    assert shown(80) == [
        "  case                    dtype      time  verdict",
        "points_in_boxes",
        "  a sweep of many points  float32  1.2 ms  right",
        "  none                                     WRONG",
    ]
    assert shown(45)[2] == "  a sweep of many points  1.2 ms  right"
    assert shown(30) == [
        "points_in_boxes",
        "  a sweep of many points",
        "    time 1.2 ms  verdict right",
        "  none",
        "    verdict WRONG",
    ]
    assert shown(15)[:3] == ["points_in_boxes", "  a sweep of", "  many points"]


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _terminal.styled("right", "green") == "right"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert _terminal.styled("right", "green") == "\033[32mright\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert _terminal.styled("right", "green") == "right"


def test_bench_measures_checks_and_writes_json(cli: Call, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    done = cli("bench", "points_in_boxes_all", "--seconds", "0.01", "--json", target)
    assert done.status == 0, done.out
    rows = json.loads(target.read_text())["rows"]
    assert rows[0]["operator"] == "points_in_boxes_all"
    assert rows[0]["right"]
    assert set(rows[0]["others"]) >= {"reference", "torch"}


@pytest.mark.parametrize("error", [0.0, 0.05])
def test_bench_gives_no_speed_up_for_a_wrong_result(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    op, target = OPERATORS["bbox_overlaps"], tmp_path / "bench.json"
    right = op.kernel("cpu")
    monkeypatch.setitem(op._kernels, "cpu", lambda *a: right(*a) * (1 + error))
    sample = next(s for s in _sample.all_samples() if s.operator == op.name and s.scale == "general")
    monkeypatch.setattr(_sample, "all_samples", lambda: [replace(sample, scale="network")])
    done = cli("bench", op.name, "--device", "cpu", "--seconds", "0.01", "--json", target)
    (row,) = json.loads(target.read_text())["rows"]
    assert (done.status, row["right"]) == (int(error > 0), error == 0)
    assert done.out.count(" NO") == done.status


def test_demo_draws_the_scene_then_times_and_checks(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warmup, "warm_all", lambda *a, **k: iter(()))
    done = cli("demo", "--out", tmp_path, "--device", "cpu")
    assert done.status == 0, done.out
    assert "NO" not in done.out
    assert all(f"\n{_demo.public_name(name)}\n" in done.out for name in _demo.TOUR)
    assert f"{len(_demo.TOUR)} of " in done.out
    assert f"accuracy: {len(_demo.TOUR)} cases passed" in done.out
    assert "triops demo --all" in done.out
    assert (tmp_path / "report.html").is_file()
    if find_spec("matplotlib"):
        assert (tmp_path / "scene.png").stat().st_size > 20_000
        assert 0 < done.out.index("scene.png") < done.out.index("right?"), "the picture comes first"


def test_demo_names_the_program_as_a_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / ("triops.exe" if sys.platform == "win32" else "triops")
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert _called_as() == str(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _called_as() == "triops"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert _called_as() == "triops"


def test_demo_shows_what_is_wrong(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS["ingroup_inds"]
    right = op.kernel("cpu")
    monkeypatch.setitem(op._kernels, "cpu", lambda *a: right(*a) + 1)
    only = [s for s in _sample.all_samples() if s.operator == "ingroup_inds"]
    monkeypatch.setattr(_sample, "all_samples", lambda: only)
    monkeypatch.setattr(_demo, "draw_scene", lambda *a: None)
    monkeypatch.setattr(_warmup, "warm_all", lambda *a, **k: iter(()))
    done = cli("demo", "--out", tmp_path, "--device", "cpu", "--all")
    assert done.status == 1
    assert re.search(r"windows of 1000000 points .* NO\n", done.out)
    assert "accuracy: 1 of 1 cases failed" in done.out


def test_a_first_demo_compiles_on_all_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from triops import cli as commands

    asked: list[Any] = []

    def warm_all(devices: list[str], **options: Any) -> Iterator[tuple[str, str, int]]:
        asked.append((devices, options))
        yield "nms", "cpu", 2
        raise OSError("no more processes")

    monkeypatch.setattr(_warmup, "warm_all", warm_all)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    commands._compile_together(every=False)
    ((devices, options),) = asked
    assert (devices, options["demo"]) == (["cpu"], True)
    assert tuple(reversed(options["operators"])) == _demo.TOUR
    assert {*_demo.TOUR} < {s.operator for s in _demo.timed_samples(every=True)}
    for operator in options["operators"]:
        small, large = _demo.inputs(operator)[0], _demo.inputs(operator)[1:]
        assert small[0].scale == "general"
        assert all(s.demo for s, _ in large)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    commands._compile_together(every=False)
    assert len(asked) == 1


# Compilation


@pytest.fixture
def notice(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines about compilations, of which nothing was told yet."""
    lines: list[str] = []
    for name, value in (("show", lines.append), ("SILENCE", 0.1), ("_silent", 0.0), ("_said", set())):
        monkeypatch.setattr(_compiling, name, value)
    return lines


def compile_for(seconds: float, module: str = "triops.ops.nms.cpu", processor: str = "CPU") -> None:
    with _compiling.compiling(module, processor):
        time.sleep(seconds)


def test_a_long_compilation_is_told_while_it_lasts_and_once(notice: list[str]) -> None:
    with _compiling.compiling("triops.ops.nms.cpu", "CPU"), _compiling.compiling("triops._cpu.sort", "CPU"):
        deadline = time.monotonic() + 20
        while not notice and time.monotonic() < deadline:
            time.sleep(0.01)
        assert notice == ["compiling nms for this CPU, once"]
    compile_for(0.3)
    assert notice == ["compiling nms for this CPU, once"]
    with _compiling.compiling("triops.ops.nms.gpu", "GPU"):
        while len(notice) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert notice[1:] == ["compiling nms for this GPU, once"]


def test_kernels_that_operators_share_are_told_by_the_operator_that_is_called(notice: list[str]) -> None:
    called: dict[str, Any] = {"__name__": "triops.ops.nms.cpu", "compile_for": compile_for}
    exec("def launch(): compile_for(0.3, 'triops._cpu.sort')", called)
    called["launch"]()
    assert notice == ["compiling nms for this CPU, once"]


def test_short_compilations_add_up(notice: list[str]) -> None:
    compile_for(0.0)
    assert notice == []
    deadline = time.monotonic() + 20
    while not notice and time.monotonic() < deadline:
        compile_for(0.04)
    assert notice == ["compiling nms for this CPU, once"]


def test_where_nobody_shows_it_the_line_goes_to_the_terminal_or_the_log(
    notice: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(_compiling, "show", None)
    with caplog.at_level("INFO", "triops"):
        _compiling._say("compiling nms for this CPU, once")
    assert [r.getMessage() for r in caplog.records] == ["compiling nms for this CPU, once"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _compiling._say("compiling nms for this GPU, once")
    assert capsys.readouterr().err == "triops: compiling nms for this GPU, once\n"


def test_numba_tells_of_the_kernels_of_triops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    from triops._cpu.jit import jit

    told: list[str] = []
    monkeypatch.setattr(_compiling, "started", lambda module, processor: told.append(f"{module} {processor}"))
    monkeypatch.setattr(_compiling, "ended", lambda: told.append("ended"))

    def add(a: int) -> int:
        return a + 1

    assert numba.njit(add)(1) == 2
    assert told == []
    add.__module__ = "triops.ops.toy.cpu"
    monkeypatch.setattr("triops._cpu.jit.keep_compiled", lambda kernel: None)
    assert jit(add)(1) == 2
    assert told == ["triops.ops.toy.cpu CPU", "ended"]


def test_a_numba_that_cannot_be_imported_is_one_warning_and_info_tells_it(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs NumPy 1.0 or less')")
    code = """
        import sys, warnings
        sys.path.insert(0, sys.argv[1])
        import torch, triops
        from triops import _info
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                out = triops.points_in_boxes(torch.zeros(1, 2, 3), torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0]]]))
                triops.bbox_overlaps(torch.zeros(1, 4), torch.zeros(1, 4))
        print(out.tolist(), *(w.message for w in caught), sep="\\n")
        print({s["cpu"] for s in _info.serving().values()}, *_info.remedies(), sep="\\n")
    """
    done = python("-c", textwrap.dedent(code), tmp_path)
    reason = (
        "numba is installed but cannot be imported (ImportError: Numba needs NumPy 1.0 or less). "
        "Remedy: pip install numba --upgrade"
    )
    out, warning, serving, note, *_ = done.stdout.splitlines() or [done.stderr]
    assert out == "[[0, 0]]", done.stderr
    assert warning == f"triops: CPU calls use the slow plain-torch reference: {reason}"
    assert serving == "{'reference'}"
    assert note == f"CPU calls use the slow reference: {reason}"
