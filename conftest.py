"""Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported."""

import os

import torch
from hypothesis import settings

# The same examples on every run; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("steady", derandomize=True)
settings.register_profile("explore", derandomize=False, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore = ["tests/compile_only.py"]  # a script that turns the interpreter off; looking for doctests imports it
try:
    import triton  # noqa: F401
except ImportError:
    collect_ignore_glob = ["src/**/gpu.py", "src/**/*_gpu.py", "src/triops/_gpu/*.py"]
