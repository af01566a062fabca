"""Fill the tables of a page, `<!-- table: NAME -->` to `<!-- end -->`, from benchmarks/results/trials/PAGE.json.

What was measured once and is not timed by a script of benchmarks/: what was tried and left, runs of other people's
tests, figures of a machine that is gone. `python benchmarks/results_page.py` writes the pages. A table is

    {"taken": "when, where, how", "columns": [...], "rows": [[...], ...], "ratios": {"torch, ms": "triops, ms"}}

A cell is a text, a number, a list of the lowest and the highest of several runs, or null for none. Behind each number
of a column that `ratios` names stands how many times that of the other column it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TRIALS = ROOT / "benchmarks" / "results" / "trials"
TABLE = re.compile(r"(<!-- table: ([\w. ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Those with such marks."""
    every = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if TABLE.search(page.read_text(encoding="utf-8"))]


def filled(page: Path, others: dict[str, str]) -> str:
    """Its text with fresh tables: one of `others`, or of the page's own file."""
    file = TRIALS / f"{page.stem.lower()}.json"
    tables = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def fresh(found: re.Match[str]) -> str:
        mark, name = found[1], found[2]
        return mark + (others[name] if name in others else _table(tables[name]))

    return TABLE.sub(fresh, page.read_text(encoding="utf-8"))


def _table(table: dict[str, Any]) -> str:
    columns, rows = table["columns"], table["rows"]
    right = [all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    lines = [columns, ["---:" if is_right else "---" for is_right in right]]
    for row in rows:
        values = dict(zip(columns, row, strict=True))
        lines.append([_cell(value) + _ratio(table, values, name) for name, value in zip(columns, row, strict=True)])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n<small>{table['taken']}</small>\n"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)


def _ratio(table: dict[str, Any], values: dict[str, Any], name: str) -> str:
    other = values.get(table.get("ratios", {}).get(name))
    if other is None or not isinstance(values[name], (int, float)):
        return ""
    ratio = values[name] / other
    return f" ({ratio:.0f}x)" if ratio >= 10 else f" ({ratio:.1f}x)"
