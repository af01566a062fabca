"""Arguments whose order differs between the two generations of torchsparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def named_arguments(function: str, order: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional and named arguments by their names, as Python itself would bind them."""
    if len(args) > len(order):
        raise TypeError(f"{function}: at most {len(order)} more positional arguments were expected, got {len(args)}")
    made = dict(zip(order, args, strict=False))
    twice = made.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"{function}: got several values for {', '.join(sorted(twice))}")
    return made | kwargs
