"""What every CPU kernel keeps to, so that a call can be interrupted at any moment."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from numba import types
from numba.core.dispatcher import Dispatcher
from test_op import python

from triops import _sample
from triops._op import OPERATORS

COMPILED = {"jit", "inline"}  # the decorators


def called_from_python(module: ModuleType) -> Iterator[Dispatcher]:
    """Compiled functions whose names occur in the functions of a module that are not compiled."""
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(function, ast.FunctionDef) and not COMPILED & set(map(ast.unparse, function.decorator_list)):
            in_python = {n.value for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == "py_func"}
            for node in set(ast.walk(function)) - in_python:
                if isinstance(node, ast.Name) and isinstance(vars(module).get(node.id), Dispatcher):
                    yield vars(module)[node.id]


def _is_scalar(kind: Any) -> bool:
    if isinstance(kind, types.BaseTuple):
        return all(map(_is_scalar, kind))
    return isinstance(kind, types.Number | types.Boolean | types.NoneType)


def test_what_python_calls_returns_no_array() -> None:
    """Numba makes the arrays that it returns by a function in Python, and an interrupt that is seen there is lost: the
    caller gets a SystemError or a ValueError. Kernels write into arrays that they are given, and return numbers."""
    for sample in {s.operator: s for s in reversed(_sample.all_samples()) if s.scale == "general"}.values():
        if "cpu" in OPERATORS[sample.operator].backends:
            OPERATORS[sample.operator].kernel("cpu")(*sample.make(torch.float32))
    modules = [module for name, module in sys.modules.items() if name.startswith("triops.")]
    kernels = {kernel for module in modules for kernel in called_from_python(module)}
    assert len(kernels) > 40
    for kernel in kernels:
        for signature in kernel.nopython_signatures:
            assert _is_scalar(signature.return_type), f"{kernel.py_func.__qualname__} returns {signature.return_type}"


CALLS = {
    "dynamic_scatter of a million points": """
        features = torch.rand(1_000_000, 4, generator=g)
        coords = torch.randint(0, 200, (1_000_000, 3), generator=g, dtype=torch.int32)
        call = lambda: triops.dynamic_scatter(features, coords, "max")
    """,
    "a rulebook of sites in no order": """
        sites = torch.randint(0, 40, (100_000, 4), generator=g, dtype=torch.int32) * torch.tensor([0, 1, 1, 1])
        call = lambda: triops.get_indice_pairs(sites.int(), 1, [40, 40, 40], 3, subm=True)
    """,
    "points_in_boxes": """
        points = torch.rand(1, 200_000, 3, generator=g) * 50
        boxes = torch.rand(1, 3_000, 7, generator=g) * torch.tensor([50.0, 50, 50, 4, 4, 4, 7])
        call = lambda: triops.points_in_boxes(points, boxes)
    """,
}


@pytest.mark.parametrize("what", CALLS)
def test_an_interrupt_is_a_keyboard_interrupt(what: str) -> None:
    done = python(
        f"""
        import random, signal, time
        import torch, triops
        g = torch.Generator().manual_seed(0)
        {CALLS[what].strip()}
        call()
        begin = time.perf_counter()
        call()
        span = time.perf_counter() - begin
        random.seed(0)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        seen = dict()
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, span))
                while True:
                    call()
            except BaseException as error:
                seen[type(error).__name__] = seen.get(type(error).__name__, 0) + 1
        print(seen)
        """
    )
    assert done.stdout.strip() == "{'KeyboardInterrupt': 60}", done.stderr
