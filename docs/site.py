"""Hooks of the documentation site: what is written elsewhere becomes part of it (mkdocs.yml)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent


def on_config(config: Any) -> None:
    """Put every page of an operator into the navigation, under its title."""
    sections = {name: pages for entry in config.nav for name, pages in entry.items()}
    sections["Operators"].extend(_pages("operators"))
    sections["How it works"][0]["Operators"].extend(_pages("operators/design"))


def on_files(files: Any, config: Any) -> None:
    """Add the changelog, which lies outside docs, and a page for each notebook, which is there to download, too."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=text.replace("](docs/", "](")))
    for book in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        files.append(File.generated(config, f"notebooks/{book.stem}.md", content=_notebook(book)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in `<!-- README: text -->`, the table that the README has below this text, and `<!-- results: folders -->`,
    the lines of docs/results.md about the operators that these folders of src/triops/ops define."""
    markdown = re.sub(r"(notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)  # the page that `on_files` makes of it
    markdown = re.sub(r"<!-- README: (.*?) -->", lambda found: _table("README.md", found[1]), markdown)
    return re.sub(r"<!-- results: (.*?) -->", lambda found: _results(found[1].split(", ")), markdown)


def _notebook(book: Path) -> str:
    parts = []
    for cell in json.loads(book.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text.replace(".ipynb)", ".md)") if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([*parts, f"[This page as a notebook]({book.name})"]) + "\n"


def _pages(folder: str) -> list[dict[str, str]]:
    pages = sorted((ROOT / "docs" / folder).glob("*.md"))
    return [{_title(page): f"{folder}/{page.name}"} for page in pages]


def _title(page: Path) -> str:
    """The first heading, up to the first comma or colon: pages of several operators go by the first."""
    return re.split("[,:]", page.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# "))[0]


def _results(folders: list[str]) -> str:
    files = [ROOT / "src" / "triops" / "ops" / folder / "reference.py" for folder in folders]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    operators = {*re.findall(r"^def (\w+)\(", text, re.MULTILINE)}
    head, rule, *rows = _table("docs/results.md", "<summary>Every operator").split("\n")
    rows = [row for row in rows if row.split(" | ")[0].lstrip("| ") in operators]
    return "\n".join([head, rule, *rows]) if rows else "No figures in `benchmarks/results` yet."


def _table(file: str, before: str) -> str:
    """The first table behind a text of a file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = text[text.index(before) :].split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next(i for i, line in enumerate(lines[begin:], begin) if not line.startswith("|"))
    return "\n".join(lines[begin:end]).replace("](docs/", "](")
