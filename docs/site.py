"""Hooks of the documentation site: what is written elsewhere becomes part of it (mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent


def on_config(config: Any) -> None:
    """Put every page of docs/operators into the navigation, under its title, and the changelog at its end."""
    pages = sorted((ROOT / "docs" / "operators").glob("*.md"))
    operators = [{_title(page): f"operators/{page.name}"} for page in pages]
    config.nav = [{"Operators": operators} if "Operators" in entry else entry for entry in config.nav]
    config.nav.append({"Changelog": "changelog.md"})


def on_files(files: Any, config: Any) -> None:
    """Add the changelog, which lies outside docs."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=text.replace("](docs/", "](")))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace `<!-- README: heading -->` by the table that the README has below this text."""
    return re.sub(r"<!-- README: (.*?) -->", lambda found: _table(found[1]), markdown)


def _title(page: Path) -> str:
    """The first heading, up to the first comma: pages of several operators go by the first."""
    return page.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ").split(",")[0]


def _table(before: str) -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = readme[readme.index(before) :].split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next(i for i, line in enumerate(lines[begin:], begin) if not line.startswith("|"))
    return "\n".join(lines[begin:end]).replace("](docs/", "](")
