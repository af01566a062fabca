"""The examples that need nothing but triops keep their promise, in few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_borders_refine_the_boxes_of_borderdet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from borderdet_head import main

    coarse, refined = main(["--steps", "30"])
    assert refined > coarse + 0.02
