"""Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported."""

import functools
import os
from typing import Any

import numpy as np
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

# Looking for doctests would import these: scripts that turn the interpreter off or change it, an operator that is meant
# to be wrong, a script that is given its torchvision.
collect_ignore = [
    "tests/compile_only.py", "tests/compile_count.py", "tests/like_a_gpu.py", "tests/planted",
    "tests_networks/torchvision_models.py",
]  # fmt: skip
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


def refuse_pointers_narrower_than_masks(method: str) -> None:
    """Triton 3.4 broadcasts masks and values to the pointers; newer ones also the pointers to those. Be as strict."""
    from triton.language.semantic import TritonSemantic

    real = getattr(TritonSemantic, method)

    @functools.wraps(real)
    def checked(semantic: Any, pointers: Any, *args: Any) -> Any:
        shape = tuple(map(int, pointers.shape))
        for other in args[:2]:  # mask and what stands where it is false, or values and mask
            wanted = tuple(map(int, getattr(other, "shape", ())))
            assert np.broadcast_shapes(shape, wanted) == shape, f"{method} of {shape} pointers with {wanted}"
        return real(semantic, pointers, *args)

    setattr(TritonSemantic, method, checked)


def drop_nan_in_extrema() -> None:
    """As a GPU and the interpreter of Triton 3.9: `tl.maximum(nan, x)` is x. Older interpreters give NaN."""
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda builder, a, b: builder.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda builder, a, b: builder.binary_op(a, b, np.fmin)


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
    drop_nan_in_extrema()
    for method in "load", "store":
        refuse_pointers_narrower_than_masks(method)
    for method, position in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        refuse_integer_masks(method, position)
