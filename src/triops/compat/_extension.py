"""Supplied modules: a stand-in for a compiled extension module, and a package under another name.

An extension module has some functions, and for every other name one that says it is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


class Extension(ModuleType):
    """Any public name is there, as programs ask at import; one that triops does not have raises when it is called."""

    def __init__(self, name: str, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(name, f"The extension module {name}, over triops.")
        self.__triops__ = True
        for function_name, function in functions.items():
            setattr(self, function_name, _outside_autograd(function))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"{self.__name__}.{name}: triops does not have this operator. docs/dropin/mmcv.md lists those it has; "
                "for the others the library has to be compiled."
            )

        missing.__name__ = name
        return missing


def in_mode_of_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of integers that asks whether its caller trains."""
    function.in_mode_of_caller = True  # type: ignore[attr-defined]
    return function


def _outside_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """Extension modules compute and fill tensors; autograd is their callers' business."""
    if isinstance(function, type) or hasattr(function, "in_mode_of_caller"):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


# What the import system sets on every module.
_IMPORT_STATE = frozenset(
    ["__builtins__", "__cached__", "__file__", "__loader__", "__name__", "__package__", "__path__", "__spec__"]
)


class Package(ModuleType):
    """A module in it does not hide a class of its name, as `MinkowskiEngine.MinkowskiConvolution` has both."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and isinstance(self.__dict__.get(name), type)):
            super().__setattr__(name, value)


def same_names(name: str, source: str) -> ModuleType:
    """A module called `name` with everything that the module `source` of triops has in it."""
    module = Package(name)
    module.__dict__.update((k, v) for k, v in vars(import_module(source)).items() if k not in _IMPORT_STATE)
    return module
