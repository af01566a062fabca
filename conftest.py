"""Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore = ["tests/compile_only.py"]  # a script that turns the interpreter off; looking for doctests imports it
try:
    import triton  # noqa: F401
except ImportError:
    collect_ignore_glob = ["src/**/gpu.py"]
