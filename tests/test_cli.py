"""The command line, as a person calls it."""

from __future__ import annotations

import json
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
