"""Plain text for terminals: colours where there are any, tables that fit the width, a line of progress."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

_CODES = {"bold": "1", "red": "31", "green": "32"}
_FIRST_COLUMN = 24  # characters that a wrapped first column keeps at least
_GAP = "  "

Row = Sequence[str]


def width() -> int:
    """Columns of the terminal; 100 where the output goes to a file."""
    return shutil.get_terminal_size((100, 24)).columns


def styled(text: str, style: str) -> str:
    """The text in bold, red or green, where stdout is a terminal and NO_COLOR is not set."""
    plain = not text or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain else f"\033[{_CODES[style]}m{text}\033[0m"


def wrapped(text: str, indent: str = "") -> str:
    """The text in lines that fit the terminal; all but the first are indented. Paths are left whole."""
    return textwrap.fill(
        text, max(width(), 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(
    heads: Row, groups: Sequence[tuple[str, Sequence[Row]]], *, numbers: Sequence[str] = (),
    optional: Sequence[str] = (), styles: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Groups of rows, each group under its title.

    Where the terminal is too narrow, columns named in `optional` are left out, the first of them first. Where that is
    not enough either, each row takes several lines: its first cell, then the others, each behind its heading.

    numbers: headings of columns that are aligned to the right.
    styles: from the text of a cell to its style.
    """
    styles = styles or {}
    kept = list(range(len(heads)))
    while _needed(heads, groups, kept) > width():
        dropped = next((heads.index(h) for h in optional if heads.index(h) in kept), None)
        if dropped is None:
            return _stacked(heads, groups, kept, styles)
        kept.remove(dropped)
    widths = _widths(heads, groups, kept)
    widths[0] = max(min(widths[0], width() - sum(widths[1:]) - len(_GAP) * len(kept)), 1)
    lines = [styled(_line([heads[i] for i in kept], [heads[i] for i in kept], widths, numbers, {}), "bold")]
    for title, rows in groups:
        lines += [styled(title, "bold")] if title else []
        for row in rows:
            first, *more = textwrap.wrap(row[0], widths[0]) or [""]
            cells = [first, *(row[i] for i in kept[1:])]
            lines.append(_line(cells, [heads[i] for i in kept], widths, numbers, styles))
            lines += [_GAP + line for line in more]
    return "\n".join(lines)


def _widths(heads: Row, groups: Sequence[tuple[str, Sequence[Row]]], kept: Sequence[int]) -> list[int]:
    rows = [heads, *(row for _, rows in groups for row in rows)]
    return [max(len(row[i]) for row in rows) for i in kept]


def _needed(heads: Row, groups: Sequence[tuple[str, Sequence[Row]]], kept: Sequence[int]) -> int:
    widths = _widths(heads, groups, kept)
    return min(widths[0], _FIRST_COLUMN) + sum(widths[1:]) + len(_GAP) * len(kept)


def _line(
    cells: Row, heads: Row, widths: Sequence[int], numbers: Sequence[str], styles: Mapping[str, str]
) -> str:  # fmt: skip
    parts = []
    for cell, head, size in zip(cells, heads, widths, strict=True):
        padding = " " * (size - len(cell))
        text = styled(cell, styles[cell]) if cell in styles else cell
        parts.append(padding + text if head in numbers else text + padding)
    return (_GAP + _GAP.join(parts)).rstrip()


def _stacked(
    heads: Row, groups: Sequence[tuple[str, Sequence[Row]]], kept: Sequence[int], styles: Mapping[str, str]
) -> str:
    lines = []
    for title, rows in groups:
        lines += [styled(title, "bold")] if title else []
        for row in rows:
            lines += textwrap.wrap(row[0], width() - 2, initial_indent=_GAP, subsequent_indent=_GAP)
            line, used = "  ", 2  # with its styles, and what the eye sees of it
            for head, cell in ((heads[i], row[i]) for i in kept[1:] if row[i]):
                if used + len(head) + len(cell) + 3 > width() and line.strip():
                    lines.append(line)
                    line, used = "  ", 2
                line += f"{_GAP}{head} {styled(cell, styles[cell]) if cell in styles else cell}"
                used += len(head) + len(cell) + 3
            lines += [line] if line.strip() else []
    return "\n".join(lines)


class Progress:
    """One line on stderr that says what is being done, how far it is, and since when.

    Where stderr is no terminal, a line every quarter of a minute, as a sign of life in a log.
    """

    def __init__(self, what: str, total: int | None = None, stream: TextIO | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def advance(self, what: str, total: int | None = None) -> None:
        self.done, self.what, self.total = self.done + 1, what, total or self.total
        now = time.monotonic()
        last = self._live and self.done == self.total  # which may take longer than the others
        if last or now - self._shown > (0.1 if self._live else 15):
            self._shown = now
            self._draw() if self._live else print(self._text(), file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own above the progress."""
        self._clear()
        print(text, file=self._stream, flush=True)
        self._draw()

    def _text(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        share = f"{self.done}/{self.total}" if self.total else str(self.done)
        bar = ""
        if self._live and self.total and width() >= 60:
            full = 20 * self.done // self.total
            bar = f" [{'#' * full}{'.' * (20 - full)}]"
        return f"{minutes}:{seconds:02}{bar} {share} {self.what}"

    def _draw(self) -> None:
        if self._live:
            self._stream.write(f"\r\033[K{self._text()[: width() - 1]}")
            self._stream.flush()

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\033[K")
            self._stream.flush()
