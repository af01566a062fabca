"""Stand-ins for functions of spconv that triops does not have: they import, and say so when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def missing(module: str, name: str, why: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{module}.{name}: triops does not have this function. {why}")

    call.__name__ = call.__qualname__ = name
    return call
