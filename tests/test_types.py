"""What a type checker and an editor see of the public functions and modules."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import triops
import triops.nn

WORDS = {"mode", "reduce", "reduction", "method", "pool", "shape", "z_origin"}  # options that are one of a few words
FUNCTIONS = {name: f for name in triops.__all__ if inspect.isfunction(f := getattr(triops, name))}
OPTIONS = [
    (name, option, parameter.default)
    for name, function in FUNCTIONS.items()
    for option, parameter in inspect.signature(function).parameters.items()
    if option in WORDS
]


@pytest.mark.parametrize(("name", "option", "default"), OPTIONS)
def test_an_option_of_a_few_words_has_their_type(name: str, option: str, default: str) -> None:
    hint = get_type_hints(FUNCTIONS[name])[option]
    assert get_origin(hint) is Literal
    assert default in get_args(hint)


def test_no_option_is_any_string() -> None:
    anything = {
        (name, option)
        for name, function in FUNCTIONS.items()
        for option, hint in get_type_hints(function).items()
        if hint is str
    }
    assert anything == {("batch_norm_act", "activation")}, "whose words the layers pass on"


CLASSES = {
    node.name: node
    for path in (Path(triops.nn.__file__).parent).glob("*.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef)
}


@pytest.mark.parametrize(
    "name", [n for n, c in CLASSES.items() if any(ast.unparse(b)[:12] == "def forward(" for b in c.body)]
)
def test_a_call_of_a_module_has_the_types_of_its_forward(name: str) -> None:
    """`nn.Module` says that a call takes and gives anything."""
    if name in ("SparseSequential", "_Residual"):  # one gives what its last module gives, one is private
        return
    typed = [b for b in CLASSES[name].body if isinstance(b, ast.If) and ast.unparse(b.test) == "TYPE_CHECKING"]
    assert [ast.unparse(b.body) for b in typed] == ["__call__ = forward"]
