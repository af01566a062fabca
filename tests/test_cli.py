"""The command line, as a person calls it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line is an extra")

from typer.testing import CliRunner

from triops._op import OPERATORS
from triops.cli import app

runner = CliRunner()


def test_info_names_every_operator_and_the_cache() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in OPERATORS)
    assert "compiled CPU kernels" in result.output


def test_bench_measures_checks_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    result = runner.invoke(app, ["bench", "points_in_boxes_all", "--seconds", "0.01", "--json", str(target)])
    assert result.exit_code == 0, result.output
    rows = json.loads(target.read_text())["rows"]
    assert rows[0]["operator"] == "points_in_boxes_all"
    assert rows[0]["right"]
    assert set(rows[0]["others"]) >= {"reference", "torch"}


def test_an_unknown_operator_is_named_with_the_known_ones() -> None:
    result = runner.invoke(app, ["bench", "points_in_spheres"])
    assert result.exit_code == 2
    assert "points_in_spheres" in result.output
    assert "points_in_boxes" in result.output


def test_demo_checks_every_operator_and_draws_the_scene(tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "scene.png").stat().st_size > 20_000
    assert "scene.png" in result.output
    assert "NO" not in result.output


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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    reason = (
        "numba is installed but cannot be imported (ImportError: Numba needs NumPy 1.0 or less). "
        "Remedy: pip install numba --upgrade"
    )
    out, warning, serving, note, *_ = done.stdout.splitlines() or [done.stderr]
    assert out == "[[0, 0]]", done.stderr
    assert warning == f"triops: CPU calls use the slow plain-torch reference: {reason}"
    assert serving == "{'reference'}"
    assert note == f"CPU calls use the slow reference: {reason}"
