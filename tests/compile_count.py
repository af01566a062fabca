"""Call every operator with many counts, and see that no call after the first of a dtype compiles a GPU kernel.

Nothing is compiled or launched: Triton asks a hook before it compiles, which notes what it was and says no. Usage:
python tests/compile_count.py [OPERATOR ...]
It needs a process without Triton's interpreter; `test_compile_only.py` starts one.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from compile_only import TARGETS, NoDevice
from triton import knobs
from triton.runtime.driver import driver

from triops import _gpu, _sample
from triops._gpu.pinned import PinnedCounter
from triops._op import OPERATORS

CALLS = 24
COUNTS = (1, 2, 3, 8, 15, 16, 17, 64, 250, 256, 1000, 1024, 1025, 4096)  # 1 and multiples of 16 are Triton's own cases


class Draw:
    """Draws counts: every second one out of COUNTS, the others of any magnitude up to the limit."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.first = True

    def __call__(self, limit: int) -> int:
        if self.first:  # an ordinary call comes first, and then the odd ones
            return min(limit, 37)
        if self.random.random() < 0.5:
            return min(limit, self.random.choice(COUNTS))
        return max(1, int(limit ** self.random.random()))


def compilations(sized: _sample.Sized, dtype: torch.dtype) -> list[str]:
    """What calls after the first would compile."""
    wanted: dict[Any, str] = {}

    def note(*, key: Any, repr: str, fn: Any, **rest: Any) -> bool:
        wanted.setdefault((fn.name, str(key)), repr)
        return True

    draw = Draw(seed=7)
    launcher = OPERATORS[sized.operator].kernel("gpu")
    _gpu.launch._ready.clear()  # as in a fresh process
    after_first: set[Any] = set()
    for _ in range(CALLS):
        args = sized.make(draw)(dtype)
        number = draw(1000)
        PinnedCounter.wait = lambda self, number=number: number  # type: ignore[method-assign]  # no kernel wrote one
        empty, torch.empty = torch.empty, torch.zeros  # type: ignore[assignment]  # launchers may read what none wrote
        knobs.runtime.jit_cache_hook = note
        try:
            launcher(*args)
        finally:
            torch.empty, knobs.runtime.jit_cache_hook = empty, None  # type: ignore[assignment]
        if draw.first:
            draw.first, after_first = False, set(wanted)
    return [wanted[key] for key in wanted if key not in after_first]


def main(names: list[str]) -> int:
    _gpu.launch.fast_launches = False  # its keys are finer than Triton's
    driver.set_active(NoDevice(TARGETS[1]))
    failures = 0
    for sized in _sample.all_sized():
        if names and sized.operator not in names:
            continue
        start = time.perf_counter()
        sample = next(s for s in _sample.all_samples() if s.operator == sized.operator)
        for dtype in sample.dtypes[:2]:
            for what in compilations(sized, dtype):
                failures += 1
                print(f"FAILED {sized} {dtype}: {what}"[:2000])
        print(f"{sized}: {time.perf_counter() - start:.1f} s")
    print(f"{len(_sample.all_sized())} kinds of calls, {failures} compilations after the first")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
