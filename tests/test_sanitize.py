"""What `make sanitize` reads from compute-sanitizer, for which a script stands in: the true one needs a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from triops.acceptance import sanitize

CLEAN = "========= ERROR SUMMARY: 0 errors"
INVALID = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 12 errors"
HAZARD = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"
STAND_IN = """#!{python}
import json, pathlib, sys
arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
pathlib.Path(value("--log-file")).write_text({log!r})
pathlib.Path(value("--json")).write_text(json.dumps({{"done": {{"nms": 3, "voxelize": 0}}, "refused": []}}))
pathlib.Path({seen!r}).write_text(json.dumps(arguments))
sys.exit({status})
"""


def stand_in(folder: Path, log: str, status: int) -> str:
    script = folder / "compute-sanitizer"
    text = STAND_IN.format(python=sys.executable, log=log, seen=str(folder / "seen.json"), status=status)
    script.write_text(text)
    script.chmod(0o755)
    return str(script)


def test_a_clean_run_counts_its_calls_and_names_what_it_did_not_reach(tmp_path: Path) -> None:
    result = sanitize.sanitized(stand_in(tmp_path, CLEAN, 0), "memcheck", "small", 5, 0)
    assert result.passed
    assert (result.calls, result.operators, result.missed) == (3, 1, ["voxelize"])
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen[:2] == ["--tool", "memcheck"]
    assert seen[seen.index("-m") + 1] == "triops.acceptance.sanitize"
    assert seen[seen.index("--inside") + 1] == "small"


@pytest.mark.parametrize(
    ("log", "status"),
    [(INVALID, sanitize.FOUND), (INVALID, 1), (INVALID, 0), (HAZARD, 0), (HAZARD, sanitize.FOUND)],
)
def test_what_the_sanitizer_finds_is_a_failure_whatever_the_program_says(tmp_path: Path, log: str, status: int) -> None:
    result = sanitize.sanitized(stand_in(tmp_path, log, status), "racecheck", "graphs", 5, 0)
    assert not result.passed
    assert result.findings == log


@pytest.mark.parametrize(("log", "status"), [("", 0), ("Error: Device not supported", 1), (CLEAN, 1)])
def test_no_answer_is_no_clean_run(tmp_path: Path, log: str, status: int) -> None:
    result = sanitize.sanitized(stand_in(tmp_path, log, status), "initcheck", "network", 5, 0)
    assert not result.passed
    assert result.problem


SLOW = """#!{python}
import json, pathlib, sys, time
value = lambda name: sys.argv[sys.argv.index(name) + 1]
pathlib.Path(value("--log-file")).write_text({log!r})
done = {{"nms": 3, "voxelize": 0}}
pathlib.Path(value("--json")).write_text(json.dumps({{"done": done, "refused": [], "running": "voxelize"}}))
time.sleep(60)
"""


@pytest.mark.parametrize("log", ["", INVALID.partition("\n")[0]])
def test_a_process_that_does_not_end_says_where_it_was_and_what_it_had_found(tmp_path: Path, log: str) -> None:
    script = tmp_path / "compute-sanitizer"
    script.write_text(SLOW.format(python=sys.executable, log=log))
    script.chmod(0o755)
    result = sanitize.sanitized(str(script), "memcheck", "network", 0.5, 0, grace=2.5)
    assert not result.passed
    assert (result.calls, result.missed) == (3, ["voxelize"])
    assert result.findings == log
    assert log or result.problem == "did not end within 3 s, in a call of voxelize"


def test_findings_name_their_kernels() -> None:
    log = (
        "========= Uninitialized __global__ memory read of size 4 bytes\n"
        "=========     at _nms_kernel+0x3a0 in gpu.py:9\n"
        "========= Error: Race reported between Write access at _scan+0x1 in a.py:1\n"
        "=========     and Read access at _scan+0x2 in a.py:2\n"
    )
    result = sanitize.Result("initcheck", "small", calls=1, operators=1, findings=log)
    assert str(result).endswith("FINDINGS in _scan (2), _nms_kernel (1)")


def test_the_processes_of_a_scene_are_one_line() -> None:
    clean = sanitize.Result("memcheck", "network", calls=2, operators=2, seconds=3.0)
    late = sanitize.Result("memcheck", "network", calls=1, operators=1, missed=["nms"], seconds=5.0, problem="too slow")
    whole = sanitize.merged([clean, late])
    assert str(whole) == "memcheck, network: 3 calls of 3 operators in 5 s: too slow; not reached: nms"
    assert not whole.passed


def test_the_planted_fault_must_be_found(tmp_path: Path) -> None:
    assert sanitize.planted_fault_is_found(stand_in(tmp_path, INVALID, 1)).passed
    assert not sanitize.planted_fault_is_found(stand_in(tmp_path, CLEAN, 0)).passed
    assert not sanitize.planted_fault_is_found(stand_in(tmp_path, HAZARD, 0)).passed


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert sanitize.main([]) == 0
    assert capsys.readouterr().out == "nothing was sanitized: torch sees no GPU here\n"


def test_the_fault_is_one() -> None:
    """In Triton's interpreter or on the GPU, between guard bytes."""
    pytest.importorskip("triton")
    import torch
    from support import GPU

    from triops.acceptance.fault_gpu import fill
    from triops.acceptance.guards import guarded_memory

    with guarded_memory() as guards:
        fill(torch.empty(13, device=GPU), 16)
        assert guards.damage() == ["12 bytes written after float32[13] of torch.empty, 1 to 12 from its edge"]
