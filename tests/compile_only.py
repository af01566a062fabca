"""Compile every kernel that the launchers launch, for GPUs that are not here.

A stand-in driver names a target and launches nothing, so the ordinary launchers run on CPU tensors:
no kernel signature is written twice. Usage: python tests/compile_only.py [--one] [OPERATOR ...]
With --one for the first target alone.
It needs a process without Triton's interpreter; `test_compile_only.py` starts one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import triops  # noqa: F401
from triops import _gpu, _sample
from triops._op import OPERATORS

_gpu.launch.fast_launches = False  # what one target compiled must not serve the next

TARGETS = [
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("hip", "gfx942", 64),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class NoDevice:
    """Stands in for the CUDA or HIP driver."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[set[str]]:
    """Launches compile for `target` and run nothing; yields the names of what was compiled."""
    compiled: set[str] = set()
    seen: set[int] = set()
    run, empty = JITFunction.run, torch.empty

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if id(self) not in seen:  # forget what another target left behind
            seen.add(id(self))
            self.device_caches.clear()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.add(kernel.metadata.name)
        return kernel

    JITFunction.run = compile_instead
    torch.empty = torch.zeros  # type: ignore[assignment]  # launchers may read what no kernel wrote
    driver.set_active(NoDevice(target))
    _gpu.launch._ready.clear()  # every target is a device that has compiled nothing yet
    try:
        yield compiled
    finally:
        JITFunction.run, torch.empty = run, empty
        driver._active = None


def main(names: list[str], targets: list[GPUTarget]) -> int:
    samples: dict[str, Any] = {}
    edges: dict[str, list[Any]] = {}  # arguments of 1 become constants inside a kernel, which takes other paths
    for sample in _sample.all_samples():
        if not names or sample.operator in names:
            if sample.scale == "general":
                samples.setdefault(sample.operator, sample)
            if sample.name.startswith(("one ", "1 ")):
                edges.setdefault(sample.operator, []).append(sample)
    failures = 0
    for target in targets:
        start, kernels = time.perf_counter(), set()
        for name, sample in samples.items():
            operator = OPERATORS[name]
            if "gpu" not in operator.backends:
                continue
            # every dtype on one target; what the others may reject shows in one wide and one narrow dtype
            for dtype in sample.dtypes if target.arch == 90 else sample.dtypes[:2]:
                try:
                    with compiling_for(target) as compiled:
                        operator.kernel("gpu")(*sample.make(dtype))
                    kernels |= compiled
                except Exception as error:
                    failures += 1
                    print(f"FAILED {name} {dtype} on {target.backend} {target.arch}: {error!r}"[:2000])
            for edge in edges.get(name, []) if target.arch == 90 else []:
                try:
                    with compiling_for(target):
                        operator.kernel("gpu")(*edge.make(edge.dtypes[0]))
                except Exception as error:
                    failures += 1
                    print(f"FAILED {edge}: {error!r}"[:2000])
        seconds = time.perf_counter() - start
        print(
            f"{target.backend} {target.arch}: {len(kernels)} kernels in {seconds:.1f} s: {', '.join(sorted(kernels))}"
        )
    print(f"{len(samples)} operators, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    one = "--one" in sys.argv[1:]
    sys.exit(main([name for name in sys.argv[1:] if name != "--one"], TARGETS[:1] if one else TARGETS))
