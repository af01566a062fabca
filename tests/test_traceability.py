"""What docs/traceability.md names exists: functions, tests, samples and bad calls."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "traceability.md").read_text(encoding="utf-8")
OPERATORS = {
    "points_in_boxes": "points_in_boxes",
    "bbox_overlaps": "bbox_overlaps",
    "border_align_forward": "border_align",
    "get_indice_pairs": "get_indice_pairs",
    "roiaware_pool3d_backward": "roiaware_pool3d",
}


def named_after(word: str, text: str) -> set[str]:
    """What stands in backticks behind a word: samples `a`, `b`."""
    lists = re.findall(rf"{word}s? ((?:`[^`]+`(?:, )?)+)", text)
    return {name for found in lists for name in re.findall("`([^`]+)`", found)}


def section(heading: str) -> str:
    return TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_every_document_has_a_section() -> None:
    assert re.findall(r"^## (.*)$", TEXT, re.MULTILINE)[1:] == [*OPERATORS]


@pytest.mark.parametrize("name", sorted({*re.findall(r"`(triops(?:\.\w+)+)`", TEXT)}))
def test_functions_exist(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        assert hasattr(importlib.import_module(module), attribute)
    except AssertionError:
        importlib.import_module(name)


@pytest.mark.parametrize("file", sorted({*re.findall(r"`(test_\w+)::", TEXT)}))
def test_tests_exist(file: str) -> None:
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {*re.findall(rf"`{file}::(\w+)`", TEXT)} <= tests


@pytest.mark.parametrize("heading", OPERATORS)
def test_samples_and_bad_calls_exist(heading: str) -> None:
    module = importlib.import_module(f"triops.ops.{OPERATORS[heading]}.samples")
    samples = named_after("sample", section(heading))
    calls = named_after("bad call", section(heading))
    assert samples <= {sample.name for sample in module.SAMPLES if sample.operator == heading}
    assert calls <= {call.name.split(": ", 1)[1] for call in module.BAD_CALLS}
    assert samples
    assert calls
