"""The soak: a short one over everything finds nothing, and faults that are planted are found, named and repeatable."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import triops
from triops._op import OPERATORS
from triops.acceptance import command
from triops.acceptance.soak import mutate
from triops.acceptance.soak.calls import KINDS, Call, Spec, draw, targets
from triops.acceptance.soak.execute import is_clear, run_round

HERE = Path(__file__).parent


def soak(*arguments: str, planted: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "triops.acceptance.soak", *(["--import", "planted"] if planted else []), *arguments],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def environment() -> dict[str, str]:
    paths = [str(HERE), str(Path(triops.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


# Which calls


def test_every_operator_and_every_public_function_is_called() -> None:
    public = {n for n in triops.__all__ if callable(getattr(triops, n)) and not isinstance(getattr(triops, n), type)}
    assert set(targets()) == set(OPERATORS) | {f"triops.{name}" for name in public - {"reference_backend"}}


def described(call: Call) -> list[Any]:
    """What of a call two draws must have in common."""
    found: list[Any] = [call.kind, call.offset]
    for value in call.args:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
            found.append((value.dtype, value.shape, value.stride(), repr(value.tolist())))
        else:
            found.append(type(value) if type(value) is object else repr(value))
    return found


@pytest.mark.parametrize("target", targets())
def test_a_seed_names_one_call(target: str) -> None:
    for seed in range(4):
        assert described(draw(Spec(target, "cpu", seed))) == described(draw(Spec(target, "cpu", seed)))


def test_all_kinds_of_calls_are_drawn() -> None:
    drawn = {draw(Spec("ingroup_inds", "cpu", seed)).kind for seed in range(60)}
    assert drawn == set(KINDS)


def test_other_strides_change_no_value() -> None:
    from random import Random

    values = (torch.arange(24.0).view(2, 3, 4), torch.arange(5), 3, "max")
    strides = set()
    for seed in range(40):
        changed = mutate.restrided(Random(seed), values)
        assert torch.equal(changed[0], values[0])
        assert torch.equal(changed[1], values[1])
        assert changed[2:] == values[2:]
        strides.add(changed[0].stride())
    assert len(strides) >= 3


@pytest.mark.parametrize(
    ("error", "clear"),
    [
        (ValueError("points must ..."), True),
        (IndexError("row 7"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("sparse_conv went wrong"), False),
        (KeyError("x"), False),
        (AssertionError(), False),
    ],
    ids=str,
)
def test_what_a_malformed_call_may_raise(error: Exception, clear: bool) -> None:
    assert is_clear(error) == clear


# A short soak


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    done = soak("--calls", "280", "--seed", "1", "--json", str(tmp_path / "soak.json"))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["calls"] >= 280
    assert set(found["counts"]) == set(found["targets"]) == set(targets())
    assert set(found["kinds"]) == set(KINDS)
    assert "no crash, no hang, no difference" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU itself is here")
def test_calls_of_triton_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    for target in ("bbox_overlaps", "ingroup_inds", "packed_pairs"):
        for seed in range(4):
            (verdict,) = run_round([Spec(target, "interpreter", seed)])
            assert not verdict.failures, verdict


# Planted faults

FAULTS = {
    "writes_beyond": "4 bytes written after int32",
    "off_by_one_ulp": "values differ, worst at",
    "hangs": "did not come back within 6 s",
    "segfaults": "crashed: SIGSEGV",
    "fails_unclearly": "raises KeyError",
    "accepts_anything": "instead of TypeError with 'values must be float32'",
    "shares_scratch": "values differ, worst at",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("planted")
    done = soak(
        *FAULTS, "right", "--backend", "cpu", "--calls", "250", "--seed", "3", "--timeout", "6",
        "--failures-per-target", "1", "--json", str(folder / "soak.json"), "--save-failures", str(folder / "cases"),
        planted=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    failures: dict[str, Any] = {}
    for failure in json.loads((folder / "soak.json").read_text())["failures"]:
        failures.setdefault(failure["target"], failure)
    return failures, done.stdout


@pytest.fixture
def planted_here() -> Iterator[None]:
    """The operators with faults in this process, for one test: the others are about the library's own."""
    sys.path.insert(0, str(HERE))
    importlib.import_module("planted")
    yield
    sys.path.remove(str(HERE))
    for name in [n for n, op in OPERATORS.items() if op.package == "planted"]:
        del OPERATORS[name]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, planted: Any) -> None:
    failures, words = planted
    assert FAULTS[fault] in failures[fault]["what"]
    assert failures[fault]["repeat"] in words


def test_an_operator_without_a_fault_is_not_blamed(planted: Any) -> None:
    assert set(planted[0]) == set(FAULTS)


def test_a_crash_and_a_hang_say_where(planted: Any) -> None:
    for fault in ("segfaults", "hangs"):
        assert f"in {fault}" in planted[0][fault]["what"]


def test_one_command_repeats_a_crash(planted: Any) -> None:
    name = f"segfaults:cpu:{planted[0]['segfaults']['seed']}"
    assert f"--repeat {name}" in planted[0]["segfaults"]["repeat"]
    assert soak("--repeat", name, planted=True).returncode == -signal.SIGSEGV


@pytest.mark.usefixtures("planted_here")
def test_a_difference_is_repeated_by_its_name_and_by_its_case_file(planted: Any) -> None:
    failure = planted[0]["off_by_one_ulp"]
    (verdict,) = run_round([Spec("off_by_one_ulp", "cpu", failure["seed"])])
    assert verdict.failures == [failure["what"]]
    assert command.describe_case(Path(failure["case"]))[0].startswith("off_by_one_ulp(values=float32")
    report = command.check(command.Options(device="cpu", cases=Path(failure["case"])))
    assert not report.passed


def test_ctrl_c_prints_what_was_done() -> None:
    process = subprocess.Popen(
        [sys.executable, "-um", "triops.acceptance.soak", "ingroup_inds", "--minutes", "9", "--backend", "reference"],
        env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    words, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ingroup_inds" in words
    assert words.rstrip().endswith("interrupted")


def test_a_sum_that_cancels_is_judged_by_the_reference_in_float64() -> None:
    """Some pixel gets 2,500 in terms of both signs, which add up to 72: the reference is off by 8e-6 of that."""
    from triops.acceptance.soak import execute
    from triops.acceptance.soak.calls import Spec, draw

    call = draw(Spec("deform_roi_pool_backward", "cuda", 2394757785))
    expected = execute._expected(call)
    assert expected.outputs is not None
    exact = execute._in_float64(call, expected.outputs)
    off = exact[0].clone()
    off[0, 10, 0, 0] -= 2e-4
    assert execute.difference([off, *exact[1:]], expected.outputs, "row")
    assert not execute._differences(call, execute.Outcome([off, *exact[1:]]), expected)
    off[0, 10, 0, 0] -= 2e-2
    assert execute._differences(call, execute.Outcome([off, *exact[1:]]), expected)


def test_a_sum_of_what_is_not_finite_may_be_inf_or_nan() -> None:
    from triops.acceptance.soak import execute

    inf, nan = float("inf"), float("nan")
    expected = torch.tensor([1.0, nan, inf, nan, 2.0])
    got = torch.tensor([1.0, inf, nan, 3.0, inf])
    allowed = execute._allowed_sum(got, expected, expected, torch.zeros(5))
    assert allowed.tolist()[:3] == pytest.approx([1.0, inf, nan], nan_ok=True)
    assert execute.difference([got], [allowed], "row").startswith("output 0: 2 of 5")


def test_a_sum_in_float64_that_cancels_is_judged_by_numbers_beside_it() -> None:
    """A map of one value: the kernel's gradient of an offset is 0, the reference's -6e-17."""
    from triops.acceptance.soak import execute
    from triops.acceptance.soak.calls import Spec, draw

    call = draw(Spec("deform_roi_pool_backward", "cpu", 3650084861))
    expected = execute._expected(call)
    assert expected.outputs is not None
    off = expected.outputs[1].clone()
    at = (2, 1, 0, 2)
    assert 0 < abs(off[at]) < 1e-16
    off[at] = 0
    assert not execute._differences(call, execute.Outcome([expected.outputs[0], off]), expected)
    off[at] = 1e-13
    assert execute._differences(call, execute.Outcome([expected.outputs[0], off]), expected)


def test_a_gradient_of_a_norm_that_cancels_is_judged_by_its_column() -> None:
    """2,000 equal gradients leave nothing but rounding: at most 3e-6 in a column, where the reference errs by 2e-7."""
    from triops.acceptance.soak import execute
    from triops.acceptance.soak.calls import Spec, draw

    call = draw(Spec("batch_norm_act_backward", "cpu", 3063337288))
    expected = execute._expected(call)
    assert expected.outputs is not None
    off = execute._in_float64(call, expected.outputs)[0]
    off[360, 1] += 1e-7
    assert execute.difference([off], expected.outputs[:1], "row")
    assert not execute._differences(call, execute.Outcome([off, *expected.outputs[1:]]), expected)
    off[360, 1] += 1e-5
    assert execute._differences(call, execute.Outcome([off, *expected.outputs[1:]]), expected)


def test_a_meta_tensor_reaches_no_kernel_in_the_interpreter() -> None:
    drawn = (draw(Spec("ingroup_inds", "interpreter", seed)) for seed in range(1000))
    call = next(call for call in drawn if call.args and getattr(call.args[0], "is_meta", False))
    assert run_round([call.spec])[0].failures == []
