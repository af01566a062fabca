"""Kernels compiled on threads, without a GPU: a stand-in for the driver."""

from __future__ import annotations

import pytest
from test_op import python

pytest.importorskip("triton.runtime._async_compile")

STAND_IN = """
    from types import SimpleNamespace
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triops import _gpu
    from triops._gpu.ahead import compiling_on_threads
    from triops.ops.sigmoid_focal_loss import gpu

    made = []
    def launcher(source, metadata):
        made.append(list(source.signature.values()))
        {launcher}
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 5, launcher_cls=launcher,
    ))
    with compiling_on_threads(2) as kernels, _gpu.compiling():
        for dtype in (torch.float32, torch.float16, torch.float32):
            logits = torch.zeros(5, 3, dtype=dtype)
            gpu.sigmoid_focal_loss(logits, torch.zeros(5, dtype=torch.int64), None, 2.0, 0.25)
    print(len(kernels), len(made), all("*" in types[0] for types in made))
"""


@pytest.mark.parametrize("launcher", ["pass", "raise RuntimeError('no C compiler')"])
def test_launchers_are_made_beside_the_kernels_once_for_all_of_the_same_types(launcher: str) -> None:
    done = python(STAND_IN.replace("{launcher}", launcher))
    assert done.stdout.strip() == "2 2 True", done.stderr
