"""Examples in docstrings as code: an extension of Griffe, which reads the docstrings of the API pages."""

from __future__ import annotations

from typing import Any

import griffe


class FencedExamples(griffe.Extension):
    """Puts every paragraph that begins with `>>>` between fences. The docstrings have no heading above them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(_fenced, paragraphs))


def _fenced(paragraph: str) -> str:
    if not paragraph.lstrip("\n").startswith(">>>"):
        return paragraph
    return f"```pycon\n{paragraph}\n```"
