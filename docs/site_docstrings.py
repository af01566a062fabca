"""Docstrings for the API pages: an extension of Griffe, which reads them."""

from __future__ import annotations

import re
from typing import Any

import griffe

RETURNS = re.compile(r"^Returns:\n((?: {4}.*\n?)+)", re.MULTILINE)
# A returned value with its name, as "coords int32 [V, 3]: the cells".
VALUE = re.compile(r"(?!int|float|bool)[a-z]\w*(?::|,? (?:\[|int|float|bool))")


class SiteDocstrings(griffe.Extension):
    """Puts paragraphs that begin with `>>>` between fences, and several returned values into a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = "\n\n".join(map(_fenced, obj.docstring.value.split("\n\n")))
            obj.docstring.value = RETURNS.sub(_listed, text)


def _fenced(paragraph: str) -> str:
    """The docstrings have no heading above their examples."""
    if not paragraph.lstrip("\n").startswith(">>>"):
        return paragraph
    return f"```pycon\n{paragraph}\n```"


def _listed(section: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in section[1].splitlines()]
    if sum(VALUE.match(line) is not None for line in lines) < 2:
        return section[0]
    listed = []
    for line in lines:
        is_more = line.startswith(" ") or line[:1].islower()  # of the value above
        listed += [f"- {line}"] if VALUE.match(line) else [f"  {line.strip()}"] if is_more else ["", line]
    return "Returns:\n    these values, in order\n\n" + "".join(f"    {line}".rstrip() + "\n" for line in listed)
