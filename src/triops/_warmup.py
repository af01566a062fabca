"""Compile kernels ahead of time, into the caches of Numba and Triton, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch


def devices() -> list[str]:
    """Those that have kernels to compile here."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def warm(operator: str, device: str, demo: bool = False) -> int:
    """Run the small samples of one operator in every dtype, or what `triops demo` runs. -> how many calls that took"""
    import triops  # noqa: F401
    from triops import _compiling, _demo, _sample
    from triops._op import OPERATORS

    _compiling.show = lambda line: None  # whoever asked for this knows, and several processes would speak at once
    small = (s for s in _sample.all_samples() if s.operator == operator and s.scale != "network")
    todo = _demo.inputs(operator) if demo else [(sample, dtype) for sample in small for dtype in sample.dtypes]
    for sample, dtype in todo:
        OPERATORS[operator](*_sample.to_device(sample.make(dtype), device))
    return len(todo)


def warm_all(
    chosen: list[str], workers: int | None = None, operators: Sequence[str] = (), demo: bool = False
) -> Iterator[tuple[str, str, int]]:
    """Warm every operator on the chosen devices, each in a process of its own. Yields operator, device and calls."""
    import triops  # noqa: F401
    from triops._op import OPERATORS

    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(workers or os.cpu_count() or 1, mp_context=context) as pool:
        todo = [(name, device) for device in chosen for name in operators or OPERATORS]
        tasks = {pool.submit(warm, name, device, demo): (name, device) for name, device in todo}
        for task in as_completed(tasks):
            yield *tasks[task], task.result()


def warm_network(example: Callable[[], Any], workers: int | None = None) -> int:
    """Compile the GPU kernels that a call needs, side by side. -> how many that are

    The call runs with no kernel of triops launched: launches are noted and compiled on threads of their own, outputs
    hold zeros, and where the host waits for a number it gets a small one. No kernel depends on counts, so those that
    the call needs with real numbers are the same ones. For a process of its own: while it lasts, `torch.empty` and
    Triton's launches are not what other threads expect.
    """
    import triops  # noqa: F401
    from triops import _gpu
    from triops._gpu.ahead import compiling_on_threads

    if _gpu.INTERPRETED:
        raise RuntimeError("triops warmup: Triton's interpreter compiles nothing; unset TRITON_INTERPRET")
    empty, compiling = torch.empty, _gpu.launch._State.compiling
    torch.empty = torch.zeros  # type: ignore[assignment]  # what no kernel writes may still be read as an index
    _gpu.launch._State.compiling = True  # in every thread, since autograd has its own
    try:
        with compiling_on_threads(workers, of_all_threads=True) as kernels:
            example()
    finally:
        torch.empty, _gpu.launch._State.compiling = empty, compiling
    return len(kernels)


def load_example(name: str) -> Callable[[], Any]:
    """The callable that `module:callable` or `file.py:callable` names."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"--network must be module:callable or file.py:callable, got {name!r}")
    if where.endswith(".py"):
        spec = spec_from_file_location(Path(where).stem, where)
        if spec is None or spec.loader is None or not Path(where).is_file():
            raise ValueError(f"--network: there is no file {where}")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = import_module(where)
    example = getattr(module, attribute, None)
    if not callable(example):
        raise ValueError(f"--network: {where} has no callable {attribute}")
    return example  # type: ignore[no-any-return]
