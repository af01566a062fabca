"""The versions that the README and pyproject.toml promise are those that `make test-versions` was run with."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests_versions"))

import run  # noqa: E402

README, PROJECT = ((ROOT / name).read_text() for name in ("README.md", "pyproject.toml"))


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_readme_shows_the_outcomes() -> None:
    assert run.table(run.read()) in README


@pytest.mark.parametrize("environment", run.MATRIX, ids=lambda environment: environment.name)
def test_every_environment_was_run_and_passed(environment: run.Environment) -> None:
    (outcome,) = [e for e in run.read() if (e["torch"], e["python"]) == (environment.torch, environment.python)]
    assert {key: outcome[key] for key in environment._fields} == environment._asdict()
    assert outcome["failed"] == 0
    assert outcome["passed"] > 500


def test_the_declared_ranges_are_those_of_the_matrix() -> None:
    oldest = {key: min((getattr(e, key) for e in run.MATRIX), key=number) for key in ("python", "torch", "triton")}
    newest = max((e.python for e in run.MATRIX), key=number)
    beyond = f"3.{number(newest)[1] + 1}"
    assert f'requires-python = ">={oldest["python"]},<{beyond}"' in PROJECT
    assert f'"torch>={oldest["torch"].removesuffix(".0")}"' in PROJECT
    assert f"triton>={oldest['triton'].removesuffix('.0')};" in PROJECT
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    assert classified == sorted({e.python for e in run.MATRIX}, key=number)
