"""Kernels give the same in Triton's interpreter where it acts as a GPU does: block sizes, order, rough quotients."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no Triton on this platform")


# Whose answers depend on the last bit of a quotient: rough ones in their kernels fail in 17 of these samples.
DECIDING = (
    "voxelize_padded", "dynamic_voxelize", "nms", "convex_iou", "roi_pool_forward", "min_area_polygons",
    "points_in_polygons", "batch_norm_act",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU itself runs the contract")
@pytest.mark.parametrize("operators", [(), DECIDING], ids=["one sample of each", "all samples of some"])
def test_kernels_give_the_answer_of_the_reference(operators: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("like_a_gpu.py")), *operators],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " samples, 0 failures" in done.stdout
