"""Every script of the gallery runs, and its picture is on the page."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for path in (ROOT / "docs" / "gallery").glob("*.py") if path.stem != "picture")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_draws_its_picture(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / f"{script.stem}.png").stat().st_size > 5000


def test_every_picture_is_on_the_page() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"images/gallery/(\w+)\.png", page)
    assert sorted(shown) == [script.stem for script in SCRIPTS]
    assert all((ROOT / "docs" / "images" / "gallery" / f"{name}.png").is_file() for name in shown)
