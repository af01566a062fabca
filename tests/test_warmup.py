"""Facts about `triops warmup`: what it has run, no later process compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from triops import _warmup

COUNT = """
import torch, triops
from numba.core.event import install_recorder
with install_recorder("numba:compile") as recorder:
    triops.points_in_boxes(torch.zeros(1, 5, 3), torch.zeros(1, 2, 7))
print(sum(event.is_start for _, event in recorder.buffer))
"""
WARM = """
from triops import _warmup
if __name__ == "__main__":
    import triops
    from triops._op import OPERATORS
    for name in list(OPERATORS):
        if name != "points_in_boxes":
            del OPERATORS[name]
    print([(operator, device) for operator, device, _ in _warmup.warm_all(["cpu"], workers=1)])
"""


def test_a_warm_operator_is_not_compiled_again(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    script = tmp_path / "warm.py"
    script.write_text(WARM)

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert run(str(script)) == "[('points_in_boxes', 'cpu')]"
    assert run("-c", COUNT) == "0"


def test_every_device_here_is_warmed() -> None:
    assert _warmup.devices()[0] == "cpu"
