"""Every GPU kernel in Triton's interpreter, as it would run on a GPU: what the interpreter hides shows here.

Blocks have the sizes of a GPU, programs run in the opposite order, a plain `/` and `tl.sqrt` of float32 are a little
off, and what a masked load leaves open is NaN. Usage: python tests/like_a_gpu.py [OPERATOR ...]
One sample of each operator, or all small samples of those that are named.
It needs a process of its own, since block sizes are fixed at import; `test_like_a_gpu.py` starts one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

import conftest  # noqa: F401  # the interpreter as strict as tests want it
from triops import _gpu


def sizes_of_a_gpu(size: int, *, interpreted: int) -> int:
    return size


_gpu.launch.block = _gpu.block = sizes_of_a_gpu  # before the operators' modules are imported

from support import assert_same, run, run_guarded, small  # noqa: E402

from triops import _sample  # noqa: E402


class Contiguous:
    """The interpreter's native functions read a block [1, N] that was broadcast as if N numbers lay there."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.native, name)
        if not callable(function) or isinstance(function, type):
            return function
        return lambda *args: function(*(np.array(a, order="C") if isinstance(a, np.ndarray) else a for a in args))


def a_little_off(values: Any) -> Any:
    """float32 numbers, each one unit in the last place too large or too small, as its bits say."""
    if values.dtype != np.float32:
        return values
    off = np.where(values.view(np.int32) & 4, np.inf, -np.inf).astype(np.float32)
    return np.where(np.isfinite(values) & (values != 0), np.nextafter(values, off), values)


def act_like_a_gpu() -> None:
    interpreter._interpreter = Contiguous(interpreter._interpreter)
    builder = InterpreterBuilder
    place, load = builder.set_grid_idx, builder.create_masked_load

    def from_the_end(self: Any, x: int, y: int, z: int) -> None:
        place(self, *(n - 1 - i for n, i in zip(self.grid_dim, (x, y, z), strict=True)))

    def open_where_masked(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        found = load(self, pointers, mask, other, *rest)
        # A scalar `other` of 0 cannot be told from none.
        if other is None and found.data.size > 1 and found.data.dtype.kind == "f":
            found.data = np.where(np.broadcast_to(mask.data, found.data.shape), found.data, np.nan).astype(
                found.data.dtype
            )
        return found

    builder.set_grid_idx = from_the_end
    builder.create_masked_load = open_where_masked
    builder.create_fdiv = lambda self, a, b: self.binary_op(a, b, lambda a, b: a_little_off(np.divide(a, b)))
    builder.create_sqrt = lambda self, a: self.unary_op(a, lambda a: a_little_off(np.sqrt(a)))


def main(names: list[str]) -> int:
    np.seterr(all="ignore")
    act_like_a_gpu()
    every = small(_sample.all_samples())
    first = {s.operator: s for s in reversed(every) if s.scale == "general"}
    samples = [s for s in every if s.operator in names] if names else [*first.values()]
    failures, start = 0, time.perf_counter()
    for sample in samples:
        name, args = sample.operator, sample.make(sample.dtypes[0])
        try:
            assert_same(run_guarded("gpu", name, args), run("reference", name, args), str(sample), operator=name)
        except Exception as error:  # of a kernel, or of what it gave
            failures += 1
            print(f"FAILED {sample}: {error!r}"[:1000])
    print(f"{len(samples)} samples, {failures} failures, {time.perf_counter() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
