"""Variables of the environment: read and checked in one place, never silently ignored, never in the way."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest
from test_op import python

import triops
from triops import _environment, _op

CALL = "import torch, triops; triops.points_in_boxes(torch.zeros(1, 2, 3), torch.zeros(1, 1, 7))"
LINE = "DEBUG:triops:points_in_boxes(points=float32[1, 2, 3]@cpu"
LEVELS = "TRIOPS_LOG must be debug, info, warning, error, critical or 1, got "


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was warned of yet."""
    monkeypatch.setattr(_environment, "_warned", set())


@pytest.mark.parametrize(
    ("value", "level"),
    [("debug", 10), ("DEBUG", 10), ("1", 10), (" on ", 10), ("Warning", 30), ("", None), ("0", None)],
)  # fmt: skip
def test_levels_of_the_log(monkeypatch: pytest.MonkeyPatch, value: str, level: int | None) -> None:
    monkeypatch.setenv("TRIOPS_LOG", value)
    assert _environment.log_level() == level


@pytest.mark.parametrize(("value", "on"), [("1", True), ("on", True), ("True", True), ("0", False), ("false", False)])
def test_a_switch_has_the_usual_words(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("TRIOPS_CHECK", value)
    assert _environment.check_values() is on


@pytest.mark.parametrize(
    ("name", "value", "read", "default", "expected"),
    [
        ("TRIOPS_LOG", "7", _environment.log_level, None, LEVELS + "'7'"),
        ("TRIOPS_CHECK", "Jes", _environment.check_values, False, "TRIOPS_CHECK must be 1 or 0, got 'Jes'"),
        ("TRIOPS_BACKEND", "cpu", _environment.reference_forced, False, "TRIOPS_BACKEND must be reference, got 'cpu'"),
        ("TRIOPS_RECORD_LIMIT", "many", _environment.record_limit, (1000, 10**9),
         "TRIOPS_RECORD_LIMIT must be COUNT or COUNT,BYTES such as 200,500MB, got 'many'"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_understood_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: object, default: object, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning) as caught:
        assert [read() for _ in range(3)] == [default] * 3  # type: ignore[operator]
    assert [str(w.message) for w in caught] == [f"triops: {expected}; it counts as not set"]


def test_a_program_with_nonsense_in_its_environment_runs_and_hears_of_it() -> None:
    done = python(CALL + "; print('ran')", TRIOPS_LOG="loud", TRIOPS_BACKEND="refrence", TRIOPS_BACKNED="reference")
    assert done.stdout.strip() == "ran", done.stderr
    said = [line.partition("RuntimeWarning: triops: ")[2] for line in done.stderr.splitlines() if "Warning:" in line]
    assert sorted(said) == [
        "TRIOPS_BACKEND must be reference, got 'refrence'; it counts as not set",
        f"TRIOPS_BACKNED is not a variable of triops; there are {', '.join(_environment.VARIABLES)}",
        LEVELS + "'loud'; it counts as not set",
    ]


def test_limits_are_read() -> None:
    assert _environment.parse_limit("7, 2KB") == (7, 2000)


def test_a_folder_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from triops.acceptance import record

    monkeypatch.setattr(_op, "recorder", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^TRIOPS_RECORD must be a folder that can be written, got '.*calls': .*"):
        record.start(str(tmp_path / "file" / "calls"))


def test_without_variables_nothing_is_printed_and_no_handler_is_set() -> None:
    done = python(CALL + "; import logging; print(logging.getLogger().handlers, logging.getLogger('triops').handlers)")
    assert (done.stdout.strip(), done.stderr) == ("[] []", "")


def test_the_log_can_be_turned_on_from_outside_and_leaves_the_programs_logging_alone() -> None:
    again = "triops.points_in_boxes(torch.zeros(1, 2, 3), torch.zeros(1, 1, 7))"
    done = python(f"{CALL}; import logging; logging.basicConfig(format='mine %(message)s'); {again}", TRIOPS_LOG="1")
    first, second = done.stderr.splitlines()
    assert first.startswith(LINE)
    assert second.startswith("mine points_in_boxes(points")
    assert logging.getLogger("triops").level == logging.NOTSET


def test_only_one_module_reads_them() -> None:
    package = Path(triops.__file__).parent
    for path in package.rglob("*.py"):
        if path.name == "_environment.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call | ast.Subscript) and "environ" in ast.unparse(node):
                assert "TRIOPS_" not in ast.unparse(node), path


def test_the_page_describes_every_variable() -> None:
    page = (Path(__file__).parents[1] / "docs" / "environment.md").read_text()
    for name in _environment.VARIABLES:
        assert f"`{name}=" in page
