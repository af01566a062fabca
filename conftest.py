"""Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported."""

import functools
import os
from typing import Any

import torch

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may have torch, Triton and pytest alone; most tests need no more
    pass
else:  # The same examples on every run; HYPOTHESIS_PROFILE=explore looks for new ones.
    settings.register_profile("steady", derandomize=True)
    settings.register_profile("explore", derandomize=False, max_examples=500)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Since 2.10 `fullgraph=True` implies this; before, torch's own `nonzero` needs it as much as operators here do.
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    os.environ.setdefault("TORCHDYNAMO_CAPTURE_DYNAMIC_OUTPUT_SHAPE_OPS", "1")

# Looking for doctests would import these: scripts that turn the interpreter off, an operator that is meant to be wrong.
collect_ignore = ["tests/compile_only.py", "tests/compile_count.py", "tests/planted"]
try:
    import triton  # noqa: F401
except ImportError:
    collect_ignore_glob = ["src/**/gpu.py", "src/**/*_gpu.py", "src/triops/_gpu/*.py"]


def refuse_integer_masks(method: str, position: int) -> None:
    """The interpreter of Triton 3.9 takes booleans only as masks; older ones take integers too. Be as strict there."""
    from triton.runtime.interpreter import InterpreterBuilder

    real = getattr(InterpreterBuilder, method)

    @functools.wraps(real)
    def checked(builder: Any, *args: Any, **options: Any) -> Any:
        dtype = args[position].data.dtype
        assert dtype.kind == "b", f"the mask of {method} must be boolean, got {dtype}: see `_gpu.arithmetic.as_mask`"
        return real(builder, *args, **options)

    setattr(InterpreterBuilder, method, checked)


def store_histograms_as_int32() -> None:
    """The interpreter of Triton 3.4 makes them int64 and stores 8 bytes for each, 4 of them beside the last."""
    from triton.runtime.interpreter import InterpreterBuilder

    real = InterpreterBuilder.create_histogram

    @functools.wraps(real)
    def create_histogram(builder: Any, *args: Any) -> Any:
        made = real(builder, *args)
        made.data = made.data.astype("int32")
        return made

    InterpreterBuilder.create_histogram = create_histogram


if os.environ.get("TRITON_INTERPRET") == "1" and "collect_ignore_glob" not in globals():
    store_histograms_as_int32()
    for method, position in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        refuse_integer_masks(method, position)
