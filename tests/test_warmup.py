"""Facts about `triops warmup`: what it has run, no later process compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triops_cli
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


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("chosen", [None, "cpu"])
def test_every_device_here_is_warmed_unless_one_is_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpu: bool, chosen: str | None
) -> None:
    warmed: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(_warmup, "warm_all", lambda devices, *args, **options: warmed.extend(devices) or ())
    assert triops_cli.main(["warmup", *([] if chosen is None else ["--device", chosen])]) == 0
    assert warmed == ([chosen] if chosen else ["cpu", "cuda"] if gpu else ["cpu"])
    assert ("compiled GPU kernels: in Triton's cache" in capsys.readouterr().out) == ("cuda" in warmed)


def test_a_network_is_not_warmed_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triops_cli.main(["warmup", "--network", "math:sqrt"]) == 2
    assert capsys.readouterr().err == "triops warmup: --network: torch sees no GPU here\n"


NETWORK = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, sys.argv[1])
import torch
from compile_only import TARGETS, NoDevice
from triton import knobs
from triton.runtime.driver import driver
from triops import _warmup
from triops._op import OPERATORS

compiled = []
knobs.compilation.listener = lambda cache_hit=None, **others: compiled.append(not cache_hit)
driver.set_active(NoDevice(TARGETS[1]))
count = _warmup.warm_network(_warmup.load_example(sys.argv[2]), 2)
assert torch.empty(3).shape == (3,) and torch.empty is not torch.zeros
print(count, len(compiled), sum(compiled))
"""
EXAMPLE = """
import torch
from triops._op import OPERATORS

def example():
    # what a dispatcher would choose for tensors of a GPU; a count that only a GPU knows is waited for
    kept = OPERATORS["nms"].kernel("gpu")(torch.rand(5, 4), torch.rand(5), None, 0.5, 0)
    assert len(kept) == 2
    rows = OPERATORS["site_rows"].kernel("gpu")(torch.zeros(4, 3, dtype=torch.int32), 1, [8, 8])
    OPERATORS["sparse_to_dense"].kernel("gpu")(torch.rand(4, 16), rows, True)
"""


def test_the_kernels_of_a_call_are_compiled_on_threads_without_a_launch(tmp_path: Path) -> None:
    script, example = tmp_path / "warm.py", tmp_path / "example.py"
    script.write_text(NETWORK)
    example.write_text(EXAMPLE)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(script), str(Path(__file__).parent), f"{example}:example"]
    runs = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        runs.append([int(n) for n in done.stdout.split()])
    assert runs[0] == [7, 7, 7]  # nms: one launch, gather, two of drops, keep; claim; copy
    assert runs[1] == [7, 7, 0]


@pytest.mark.parametrize(
    ("name", "match"),
    [("nothing", "must be module:callable"), ("no_such.py:f", "no file no_such.py"), ("math:nope", "no callable")],
)  # fmt: skip
def test_an_example_that_is_not_there_is_refused(name: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _warmup.load_example(name)
