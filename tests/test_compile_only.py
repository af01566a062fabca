"""Every GPU kernel compiles for sm_80, sm_90, sm_100 and gfx942, on any machine; and no count compiles it anew."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triops import _sample
from triops._op import OPERATORS

pytest.importorskip("triton", reason="no Triton on this platform")


def run(script: str, *options: str) -> list[str]:
    """In a process of its own, without Triton's interpreter. -> what it prints"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *options],
        capture_output=True, text=True, env=environment, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.versions
def test_every_kernel_compiles() -> None:
    """For one target, which tells whether a Triton knows the language."""
    *targets, summary = run("compile_only.py", "--one")
    assert summary == f"{len(OPERATORS)} operators, 0 failures"
    assert len(targets) == 1


@pytest.mark.full
def test_every_kernel_compiles_for_every_target() -> None:
    *targets, summary = run("compile_only.py")
    assert summary == f"{len(OPERATORS)} operators, 0 failures"
    assert len(targets) == 4
    assert len({line.partition(": ")[2].partition(" kernels")[0] for line in targets}) == 1, "the same kernels on each"


def test_no_call_after_the_first_of_a_dtype_compiles_a_kernel() -> None:
    assert run("compile_count.py")[-1] == f"{len(_sample.all_sized())} kinds of calls, 0 compilations after the first"
