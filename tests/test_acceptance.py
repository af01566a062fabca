"""The checker is checked: what is wrong is caught, what is right passes, files and reports hold what they should."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import triops_cli
from triops import _environment, _sample
from triops._arguments import UsageError, choose_operators
from triops._compare import difference
from triops._op import OPERATORS
from triops._sample import Standard
from triops.acceptance import case_file, command, record, runner, shapes, timing
from triops.acceptance.baseline import Measured, larger, slower
from triops.acceptance.case_file import Case, CaseError
from triops.acceptance.diffs import compare
from triops.acceptance.record import Recorder
from triops.acceptance.report import headline
from triops.acceptance.report import html as report_page
from triops.acceptance.results import as_json
from triops.acceptance.stability import Stability, measure_stability
from triops.acceptance.standard import efficiency, is_regression, judge
from triops.acceptance.timing import Times
from triops.acceptance.workspace import workspace

INF, NAN = math.inf, math.nan


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


# The measures


def test_the_four_diffs_by_hand() -> None:
    found = compare(tensor(1.0, 2.5, 3.0, -4.0), tensor(1.0, 2.0, 4.0, -4.0))
    assert found.diff1 == pytest.approx(1.5 / 11)
    assert found.diff2 == pytest.approx(math.sqrt(1.25 / 37))
    assert found.diff3 == pytest.approx(0.25)
    assert found.diff4 == 0.5
    assert found.peak == pytest.approx(0.25)


def test_below_the_threshold_diff3_is_absolute() -> None:
    assert compare(tensor(3e-7), tensor(1e-7)).diff3 == pytest.approx(2e-7, rel=1e-3)
    assert compare(tensor(3e-5).half(), tensor(1e-5)).diff3 == pytest.approx(2e-5, rel=1e-2)


def test_a_zero_denominator_is_zero_for_equal_and_infinite_for_unequal_values() -> None:
    equal, unequal = compare(torch.zeros(3), torch.zeros(3)), compare(tensor(0.0, 0.5), torch.zeros(2))
    assert (equal.diff1, equal.diff2, equal.diff3, equal.diff4, equal.peak) == (0, 0, 0, None, 0)
    assert (unequal.diff1, unequal.diff2, unequal.diff3, unequal.peak) == (INF, INF, 0.5, INF)


def test_no_values_at_all_are_no_difference() -> None:
    assert compare(torch.zeros(0, 3), torch.zeros(0, 3)).diff1 == 0


def test_nan_and_inf_have_their_places_and_the_rest_is_still_compared() -> None:
    found = compare(tensor(NAN, INF, -INF, 2.0), tensor(NAN, INF, -INF, 1.0))
    assert (found.wrong_nan, found.wrong_inf, found.diff3) == (0, 0, 1.0)
    assert compare(tensor(NAN, 1.0), tensor(1.0, NAN)).wrong_nan == 2
    assert compare(tensor(INF, INF, 1.0), tensor(-INF, 1.0, INF)).wrong_inf == 3


def test_a_wide_baseline_that_overflows_the_dtype_asks_for_inf() -> None:
    assert compare(torch.tensor([INF]).half(), torch.tensor([1e5], dtype=torch.float64)).wrong_inf == 0
    assert compare(torch.tensor([65504.0]).half(), torch.tensor([1e5], dtype=torch.float64)).wrong_inf == 1


def test_huge_values_do_not_overflow_the_sums() -> None:
    big = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert compare(big, big).diff2 == 0
    assert compare(-big, big).diff2 == pytest.approx(2)


def test_integers_beyond_float64_are_told_apart() -> None:
    found = compare(torch.tensor([2**60]), torch.tensor([2**60 + 1]))
    assert found.unequal == 1
    assert found.diff3 > 0


# The standard, with errors planted in right results

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
RIGHT = torch.randn(50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RIGHT[3, 5], RIGHT[7, 2], RIGHT[9, 9] = NAN, INF, -INF


def accepted(got: torch.Tensor, wide: torch.Tensor, kind: Any = "dynamic") -> bool:
    """As a kernel would be judged whose reference, run at the same dtype, rounds the float64 result."""
    return all(j.passed for j in judge(got, wide.to(got.dtype), wide, Standard(kind, float32=1e-5, half=3e-3)))


def planted(kind: str, dtype: torch.dtype) -> torch.Tensor:
    got = RIGHT.to(dtype)
    if kind == "bias":
        got = (RIGHT + 1e-2).to(dtype)
    elif kind == "relative bias":
        got = (RIGHT * 1.01).to(dtype)
    elif kind == "swapped row":
        got[[20, 21]] = got[[21, 20]]
    elif kind == "unwritten element":
        got[30, 4] = NAN  # as poisoned allocations show it
    elif kind == "element left zero":
        got[30, 4] = 0
    elif kind == "NaN in the wrong place":
        got[3, 5], got[3, 6] = 0.5, NAN
    elif kind == "NaN missing":
        got[3, 5] = 0.5
    elif kind == "inf of the wrong sign":
        got[7, 2] = -INF
    elif kind == "inf missing":
        got[7, 2] = 6e4
    elif kind == "finite error beside a legitimate NaN":
        got[3, 6] += 1
    return got


PLANTED = [
    "bias", "swapped row", "unwritten element", "element left zero", "NaN in the wrong place", "NaN missing",
    "inf of the wrong sign", "inf missing", "finite error beside a legitimate NaN",
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("standard", ["static", "dynamic", "exact"])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_error_is_caught(kind: str, standard: str, dtype: torch.dtype) -> None:
    assert accepted(RIGHT.to(dtype), RIGHT, standard)
    assert not accepted(planted(kind, dtype), RIGHT, standard)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_relative_bias_is_caught(dtype: torch.dtype) -> None:
    assert not accepted(planted("relative bias", dtype), RIGHT, "static")
    assert not accepted(planted("relative bias", dtype), RIGHT, "dynamic")


@pytest.mark.parametrize("wrong", [0, 55, 99])
def test_one_wrong_index_is_caught_wherever_it_is(wrong: int) -> None:
    index = torch.arange(100, dtype=torch.int32)
    other = index.clone()
    other[wrong] += 1
    (found,) = judge(other, index, index, Standard())
    assert found.failures == [f"1 of 100 values differ, first at [{wrong}]: {wrong + 1} instead of {wrong}"]


def test_one_wrong_value_among_a_million_is_caught_in_half() -> None:
    wide = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = wide.half()
    assert accepted(got, wide)
    got[123_456] = 0
    assert not accepted(got, wide)


def test_values_too_high_throughout_are_a_bias_however_small() -> None:
    wide = torch.rand(1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 1
    up = torch.nextafter(wide.float(), torch.tensor(INF))
    (found,) = judge(torch.where(up > wide, up, torch.nextafter(up, torch.tensor(INF))), wide.float(), wide, Standard())
    assert "bias" in found.failures[0]


def test_a_wrong_shape_dtype_or_number_of_outputs_is_caught() -> None:
    good = torch.zeros(3, 4)
    for bad in (torch.zeros(4, 3), torch.zeros(3, 4).half(), (good, good)):
        assert not all(j.passed for j in judge(bad, good, good.double(), Standard()))


def test_a_flipped_predicate_makes_the_reference_at_the_own_dtype_the_baseline() -> None:
    wide = torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64)
    own = torch.tensor([1.0, 2.0, 3.0, 4.0])  # float32 rounds a point into the box, float64 does not
    (right,) = judge(own.clone(), own, wide, Standard())
    assert (right.passed, right.baseline, right.flips) == (True, "own dtype", 1)
    assert not judge(wide.float(), own, wide, Standard())[0].passed


def test_flips_of_an_index_are_reported_and_allowed() -> None:
    own, wide = torch.tensor([0, 1, -1]), torch.tensor([0, 1, 2])
    (found,) = judge(own.clone(), own, wide, Standard())
    assert (found.passed, found.flips) == (True, 1)


# Kernels through the runner


SMALL_TASKS = [t for t in runner.tasks(["points_in_boxes"], quick=True) if t.scale != "network"]


def one_task(**changes: Any) -> runner.Task:
    return replace(SMALL_TASKS[0], **changes)


@pytest.mark.parametrize("seeds", [range(1, 11), pytest.param(range(11, 101), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_correct_kernels_pass_with_every_one_of_a_hundred_seeds(operator: str, seeds: range) -> None:
    small = min(
        (s for s in _sample.all_samples() if s.operator == operator and s.scale == "general"),
        key=lambda s: _sample.bytes_of(s.make(s.dtypes[0])),
    )
    first, second = (_sample.tensors_of(runner._make(small, small.dtypes[0], seed)) for seed in (1, 2))
    assert not all(map(torch.equal, first, second)), "a seed must change the input"
    for seed in seeds:
        dtype = small.dtypes[seed % len(small.dtypes)]
        task = runner.Task(operator, small.name, small.scale, dtype, lambda: runner._make(small, dtype, seed))  # noqa: B023
        (result,) = runner.check([task], "cpu")
        assert result.passed, (seed, dtype, result.failures)


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_one_wrong_value_in_any_output_of_any_operator_is_caught(operator: str) -> None:
    op = OPERATORS[operator]
    sample = next(s for s in _sample.all_samples() if s.operator == operator and s.scale == "general")
    for dtype in [d for d in sample.dtypes if d != torch.bfloat16]:
        args = sample.make(dtype)
        own, wide = runner.references(op, args)
        right = [t.clone() for t in _sample.specified(op, args, op(*args))]
        assert all(j.passed for j in judge(right, own, wide, _sample.standard_of(op)))
        for i, output in enumerate(right):
            if output.numel() == 0:
                continue
            wrong = output.clone()
            at = int(wrong.double().abs().argmax())
            if wrong.is_floating_point():
                wrong.view(-1)[at] = wrong.view(-1)[at] * 1.05 or 1.0
            else:
                wrong.view(-1)[at] = not wrong.view(-1)[at] if wrong.dtype == torch.bool else wrong.view(-1)[at] - 1
            found = judge([*right[:i], wrong, *right[i + 1 :]], own, wide, _sample.standard_of(op))
            assert [j.passed for j in found] == [j != i for j in range(len(right))], (dtype, i)


def test_other_seeds_are_other_inputs_and_the_generator_comes_back() -> None:
    first, second, third = (runner.tasks(["points_in_boxes"], quick=True, seed=s)[1].make()[0] for s in (0, 0, 5))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.Generator.__name__ == "Generator"


def test_a_kernel_that_leaves_an_element_unwritten_or_throws_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS["points_in_boxes"]
    right = op.kernel("cpu")

    def forgets(*args: Any) -> torch.Tensor:
        out = torch.empty_like(right(*args))
        out.view(-1)[1:] = right(*args).view(-1)[1:]
        return out

    def throws(*args: Any) -> torch.Tensor:
        raise ZeroDivisionError("no")

    task = one_task()
    for kernel, words in ((forgets, "differ, first at"), (throws, "ZeroDivisionError: no")):
        monkeypatch.setitem(op._kernels, "cpu", kernel)
        (result,) = runner.check([task], "cpu")
        assert not result.passed
        assert words in result.failures[0]


def test_a_malformed_call_that_is_accepted_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.ops.points_in_boxes import samples

    accepted = _sample.BadCall("points_in_boxes: fine", lambda: None, ValueError, "x")
    other = _sample.BadCall("points_in_boxes: other words", samples.BAD_CALLS[0].call, ValueError, "nothing like it")
    monkeypatch.setattr(samples, "BAD_CALLS", [*samples.BAD_CALLS[:2], accepted, other])
    failures = [b.failure for b in runner.check_bad_calls(["points_in_boxes"])]
    assert failures[:3] == ["", "", "was accepted"]
    assert failures[3].startswith("raised ValueError: points_in_boxes: points must have shape")


# Performance


def test_efficiency_names_the_bound_and_the_reason() -> None:
    fast = efficiency(1e-3, 10**6, 10, 1e9, 1e12, 1e-6, "network", Standard())
    assert (fast.io, fast.bound, fast.reached) == (pytest.approx(1.0), "memory", True)
    tiny = efficiency(1e-5, 100, 10, 1e9, 1e12, 1e-5, "general", Standard())
    assert not tiny.reached
    assert tiny.why.startswith("too small: any call costs 10.0 us")
    slow = efficiency(1e-2, 10**6, 2 * 10**9, 1e9, 1e12, 1e-6, "network", Standard(why_slower="gathers"))
    assert (slow.bound, slow.why) == ("arithmetic", "gathers")
    assert efficiency(1.0, 1, 1, 1e9, 1e12, 1e-6, "boundary", Standard()).reached


def test_the_regression_gate() -> None:
    assert not is_regression(50e-6, 55e-6)
    assert is_regression(50e-6, 55.1e-6)
    assert not is_regression(1e-3, 1.039e-3)
    assert is_regression(1e-3, 1.041e-3)


def test_on_a_cpu_times_are_compared_as_ratios_to_the_yardstick() -> None:
    before = Measured(1e-3, ratio=2.0)
    assert slower(before, Measured(3e-3, ratio=2.0)) is None, "the machine is slower, the kernel is not"
    assert slower(before, Measured(1e-3, ratio=2.1)) == pytest.approx(1e-3 / 1.05)
    assert slower(before, Measured(1e-3, ratio=2.1, noise=0.06)) is None, "that much is noise"
    assert slower(replace(before, noise=0.06), Measured(1e-3, ratio=2.1)) is None
    assert slower(before, Measured(1e-3, ratio=2.3, noise=0.06)) is not None
    assert slower(Measured(50e-6, ratio=1.0), Measured(54e-6, ratio=1.08)) is None
    assert slower(Measured(50e-6, ratio=1.0), Measured(56e-6, ratio=1.12)) == pytest.approx(50e-6)


def test_the_ratio_to_the_yardstick_and_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(timing, "time", clock)

    def takes(*seconds: float) -> Callable[[], None]:
        turns = itertools.cycle(seconds)

        def call() -> None:
            clock.now += next(turns)

        return call

    monkeypatch.setattr(timing, "_yardstick", lambda threads: takes(1e-3))
    assert timing.yardstick_ratio(takes(4e-3), 1.0) == pytest.approx((4.0, 0.0))
    assert timing.yardstick_ratio(takes(4e-3, 4e-3, 9e-3), 1.0) == pytest.approx((4.0, 0.0))
    assert timing.yardstick_ratio(takes(2e-5), 1.0) == pytest.approx((0.02, 0.0))
    monkeypatch.setattr(timing, "_yardstick", lambda threads: takes(1e-3, 1.5e-3, 1.5e-3))
    assert timing.yardstick_ratio(takes(4e-3), 1.0) == pytest.approx((4.0, 0.5))


def test_the_yardstick_is_work() -> None:
    ratio, noise = timing.yardstick_ratio(lambda: None, 0.01)
    assert 0 < ratio < 0.1
    assert noise >= 0


def test_the_gate_of_workspace() -> None:
    assert not larger(Measured(1.0, workspace=10**6), Measured(1.0, workspace=10**6 + 2**16))
    assert larger(Measured(1.0, workspace=10**6), Measured(1.0, workspace=10**6 + 2**16 + 1))
    assert not larger(Measured(1.0, workspace=10**8), Measured(1.0, workspace=104 * 10**6))
    assert larger(Measured(1.0, workspace=10**8), Measured(1.0, workspace=104 * 10**6 + 1))
    assert not larger(Measured(1.0), Measured(1.0, workspace=10**9)), "unknown before"


def test_workspace_is_what_torch_and_numpy_hold_at_the_peak_beside_inputs_and_outputs() -> None:
    x = torch.zeros(1_000_000)

    def frees(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x + 1
        return x

    def array(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.zeros(1_000_000) + 1).float()

    def view(x: torch.Tensor) -> torch.Tensor:
        return x.view(1000, 1000)[:500].t()

    megabytes = [round(workspace(f, (x,), "cpu") / 10**6) for f in (frees, array, view)]
    assert megabytes == [4, 16, 0]


@pytest.fixture
def one_timed_case(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A check of one small case that takes as long and as much as this says."""
    told = {"seconds": 1e-3, "ratio": 2.0, "noise": 0.01, "workspace": 10**6}
    monkeypatch.setattr(runner, "tasks", lambda *a, **k: [one_task(timed=True)])
    monkeypatch.setattr(runner, "measure", lambda *a, **k: Times(told["seconds"], told["seconds"]))
    monkeypatch.setattr(runner, "yardstick_ratio", lambda *a, **k: (told["ratio"], told["noise"]))
    monkeypatch.setattr(runner, "workspace", lambda *a, **k: told["workspace"])
    return told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"seconds": 1.1e-3}, []),
        ({"ratio": 2.2}, ["slower: 1 ms instead of 909 us"]),
        ({"ratio": 2.2, "noise": 0.2}, []),
        ({"workspace": 2 * 10**6}, ["more workspace: 2 MB instead of 1 MB"]),
    ],
)
def test_a_run_that_takes_more_than_its_baseline_fails(
    tmp_path: Path, one_timed_case: dict[str, float], change: dict[str, float], words: list[str]
) -> None:
    file = tmp_path / "baselines" / "cpu.json"
    assert command.check(command.Options(device="cpu", save_baseline=file)).passed
    (saved,) = json.loads(file.read_text())["cases"]
    assert {k: saved[k] for k in one_timed_case} == one_timed_case
    one_timed_case.update(change)
    report = command.check(command.Options(device="cpu", baseline=file, out=tmp_path))
    (result,) = report.results
    assert (result.regressions, report.passed) == (words, not words)
    assert headline(report).endswith(f"; {1 if words else 'none'} slower or larger than in {file}")
    page = (tmp_path / "report.html").read_text()
    assert all(w in page for w in words)
    assert any("this machine was busy" in line for line in command.remarks(report)) == (result.noise > 0.1)
    assert command.table(report, every=True)[0][1][0][8] == ("WORSE" if words else "right")
    again = command.check(command.Options(device="cpu", baseline=tmp_path / "report.json"))
    assert again.passed, "a report.json is a baseline, too"


def test_saving_a_baseline_updates_what_was_measured_and_keeps_the_rest(
    tmp_path: Path, one_timed_case: dict[str, float]
) -> None:
    file = tmp_path / "cpu.json"
    command.check(command.Options(device="cpu", save_baseline=file))
    whole = json.loads(file.read_text())
    whole["cases"].append({**whole["cases"][0], "operator": "another"})
    file.write_text(json.dumps(whole))
    one_timed_case["ratio"] = 3.0
    command.check(command.Options(device="cpu", save_baseline=file))
    cases = {c["operator"]: c["ratio"] for c in json.loads(file.read_text())["cases"]}
    assert cases == {"another": 2.0, "points_in_boxes": 3.0}


def test_a_baseline_of_another_machine_or_no_baseline_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    for text, words in (
        ("{}", "not a baseline"),
        ("[1", "not a baseline"),
        ("[]", "not a baseline"),
        (json.dumps({"environment": {"cpu": "abacus"}, "device": "cpu", "cases": []}), "abacus.*no comparison"),
    ):
        file.write_text(text)
        for options in ({"baseline": file}, {"save_baseline": file}):
            with pytest.raises(UsageError, match=words):
                command.check(command.Options(("points_in_boxes",), "cpu", **options))
        assert file.read_text() == text
    with pytest.raises(UsageError, match="No such file"):
        command.check(command.Options(("points_in_boxes",), "cpu", baseline=tmp_path / "missing"))


# Stability


def planted_kernel(kind: str) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    calls = iter(range(10**6))

    def kernel(x: torch.Tensor) -> list[torch.Tensor]:
        out = x * 2
        if kind == "run":
            out[0] += 1e-3 * next(calls)
        elif kind == "threads":
            out[0] += 1e-3 * torch.get_num_threads()
        elif kind == "NaN":
            out[0] = NAN if next(calls) % 2 else 1.0
        return [out]

    return kernel


@pytest.mark.parametrize(
    ("kind", "run_to_run", "across_threads"),
    [("none", 0, 0), ("run", 2e-3, 4e-3), ("threads", 0, 1e-3), ("NaN", INF, INF)],
)
def test_how_much_floats_change_is_a_number(kind: str, run_to_run: float, across_threads: float) -> None:
    x, before = torch.full((4,), 0.5), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for exact in (False, True):
            kernel = planted_kernel(kind)
            found = measure_stability(lambda: kernel(x), kernel(x), threads=True, exact=exact)  # noqa: B023
            assert torch.get_num_threads() == 2
            assert found.run_to_run == pytest.approx(run_to_run, rel=0.01)
            assert found.across_threads == pytest.approx(across_threads, rel=0.01)
            assert bool(found.failures) == (exact and kind != "none")
    finally:
        torch.set_num_threads(before)


def test_an_index_that_changes_from_run_to_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS["points_in_boxes"]
    right, calls = op.kernel("cpu"), iter(range(100))

    def wavers(*args: Any) -> torch.Tensor:
        out: torch.Tensor = right(*args)
        out.view(-1)[0] += next(calls) % 2
        return out

    monkeypatch.setitem(op._kernels, "cpu", wavers)
    (result,) = runner.check([one_task()], "cpu")
    assert result.failures[0].startswith("output 0 changes from run to run: 1 of ")


def test_an_output_that_changes_its_size_fails() -> None:
    sizes = iter((3, 3, 4, 3))
    found = measure_stability(lambda: [torch.zeros(next(sizes))], [torch.zeros(3)], threads=True)
    assert found.run_to_run == 0
    assert found.failures == ["output 0 changes with 1 threads: [4] instead of [3]"]


def test_the_report_says_how_much_results_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "tasks", lambda *a, **k: [one_task()])
    report = command.check(command.Options(device="cpu", out=tmp_path))
    assert "The same bits on every run and with every number of threads." in (tmp_path / "report.html").read_text()
    report.results[:] = [replace(report.results[0], stability=Stability(0.0, 3e-7))]
    assert "changes by at most 0 of the largest; with the number of threads, by 3.0e-7." in report_page(report)
    assert as_json(report)["cases"][0]["stability"]["across_threads"] == 3e-7
    assert command.table(report, every=True)[0][1][0][7] == "3.0e-7"


# Case files


@pytest.fixture
def case(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors", reason="case files need it")
    features = torch.randn(1, 4, 3, 5).contiguous(memory_format=torch.channels_last).half()
    boxes = torch.tensor([[[0.0, 0, 2, 2]]]).half()
    path = tmp_path / "case.safetensors"
    outputs = [*OPERATORS["border_align_forward"](features, boxes, 2)]
    case_file.write(path, Case("border_align_forward", (features, boxes, 2), outputs, {"why": "a test"}))
    return path


def test_a_case_file_comes_back_as_it_was(case: Path) -> None:
    found = case_file.read(case)
    features, boxes, pool_size = found.args
    assert features.is_contiguous(memory_format=torch.channels_last)
    assert (features.dtype, boxes.shape, pool_size, found.about) == (torch.float16, (1, 1, 4), 2, {"why": "a test"})
    assert found.outputs is not None
    assert found.outputs[1].dtype == torch.int32


@pytest.mark.parametrize("keep", [0, 5, 8, 40, 300, -1])
def test_a_truncated_file_is_refused(case: Path, keep: int) -> None:
    case.write_bytes(case.read_bytes()[:keep])
    with pytest.raises(CaseError, match=r"case\.safetensors: not a whole safetensors file"):
        case_file.read(case)


@pytest.mark.parametrize("data", [b"not a case", b"\x80\x04K\x01.", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("safetensors")
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with pytest.raises(CaseError, match="not a whole safetensors file"):
        case_file.read(file)
    with pytest.raises(CaseError, match="no such file"):
        case_file.read(tmp_path / "missing")


def rewritten(case: Path, change: Any) -> Path:
    """The same file with another header."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(case, "pt") as file:
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["triops case"])
    text = change(header)
    save_file(tensors, case, {"triops case": text if isinstance(text, str) else json.dumps(header)})
    return case


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.update(format=99), "must be of format 1"),
        (lambda h: h.update(operator="os.system"), "no operator 'os.system' here"),
        (lambda h: h.update(operator=["rm"]), "no operator"),
        (lambda h: h["arguments"].pop(), "takes 3 arguments: input, boxes, pool_size"),
        (lambda h: h.update(arguments={}), "takes 3 arguments"),
        (lambda h: h["arguments"][0].update(tensor="input 9"), "'input 9' is missing"),
        (lambda h: h["arguments"][0].update(order=[0, 1, 2, 2]), "order of its dimensions"),
        (lambda h: h["arguments"][0].update(order=[0, 1, 2, True]), "order of its dimensions"),
        (lambda h: h.update(outputs=7), "outputs must be a list"),
        (lambda h: "[" * 100_000, "case.safetensors"),
        (lambda h: "{", "case.safetensors"),
        (lambda h: "[]", "must be of format 1"),
    ],
)
def test_a_malformed_header_is_refused(case: Path, change: Any, words: str) -> None:
    with pytest.raises(CaseError, match=words):
        case_file.read(rewritten(case, change))


def test_a_safetensors_file_of_a_network_is_refused(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file({"weight": torch.zeros(2)}, tmp_path / "net.safetensors")
    with pytest.raises(CaseError, match="not a case that triops wrote"):
        case_file.read(tmp_path / "net.safetensors")


def test_a_case_with_bad_arguments_fails_without_harm(case: Path) -> None:
    rewritten(case, lambda h: h["arguments"].__setitem__(2, -5))
    (result,) = runner.check(runner.case_tasks(case), "cpu")
    assert "pool_size must be at least 1, got -5" in result.failures[0]
    rewritten(case, lambda h: h["arguments"].__setitem__(2, "five"))
    (result,) = runner.check(runner.case_tasks(case), "cpu")
    assert "TypeError: border_align_forward: pool_size must be an integer" in result.failures[0]


def test_failures_are_saved_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    op = OPERATORS["points_in_boxes"]
    right = op.kernel("cpu")
    with monkeypatch.context() as patch:
        patch.setitem(op._kernels, "cpu", lambda *a: right(*a) + 1)
        assert not any(r.passed for r in runner.check(SMALL_TASKS[:8], "cpu", save_failures=tmp_path))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 8
    (again,) = runner.check(runner.case_tasks(files[0]), "cpu")
    assert again.passed
    assert "values differ" in again.recorded[0]


# Recording


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "0", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)


PROGRAM = "import torch, triops\nfor n in (1, 2, 3): triops.points_in_boxes(torch.zeros(1, n, 3), torch.ones(1, 1, 7))"


def test_a_program_records_its_calls_and_the_check_runs_them(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    done = python(PROGRAM, TRIOPS_RECORD=str(tmp_path / "calls"))
    assert done.returncode == 0, done.stderr
    files = case_file.files_in(tmp_path / "calls")
    assert [f.name.rpartition("-")[0] for f in files] == [f"0000{n}-points_in_boxes" for n in (1, 2, 3)]
    report = command.check(command.Options(device="cpu", cases=tmp_path / "calls"))
    assert (report.passed, len(report.results)) == (True, 3)
    assert not any(r.recorded for r in report.results)


def test_recording_stops_at_its_limit_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    done = python(PROGRAM, TRIOPS_RECORD=str(tmp_path), TRIOPS_RECORD_LIMIT="2")
    assert len(case_file.files_in(tmp_path)) == 2
    assert "the limit is reached" in done.stderr
    done = python(PROGRAM, TRIOPS_RECORD=str(tmp_path / "b"), TRIOPS_RECORD_LIMIT="9,100B")
    assert len(case_file.files_in(tmp_path / "b")) == 2


@pytest.mark.parametrize("mode", ["data", "shapes"])
def test_a_program_that_is_recorded_outlives_a_full_disk(mode: str, tmp_path: Path) -> None:
    if mode == "data":
        pytest.importorskip("safetensors")
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"  # no file can grow
    done = python(f"{full}{PROGRAM}\nprint('ran')", TRIOPS_RECORD=str(tmp_path), TRIOPS_RECORD_MODE=mode)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert done.stderr.count("later calls are not recorded") == 1
    assert [*tmp_path.iterdir()] == []


OTHER_DATA = PROGRAM + "\n" + PROGRAM.replace("zeros", "ones").replace("import", "import sys,")


def test_a_call_that_comes_again_is_counted_and_not_written_again(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    assert python(OTHER_DATA + "\n" + PROGRAM, TRIOPS_RECORD=str(tmp_path)).returncode == 0
    files = case_file.files_in(tmp_path)
    assert len(files) == 6
    assert record.counts_in(tmp_path) == {file.name: 2 if i < 3 else 1 for i, file in enumerate(files)}


def test_shapes_alone_can_be_recorded_and_checked(tmp_path: Path) -> None:
    without = "import sys; sys.modules['safetensors'] = None\n"
    done = python(without + OTHER_DATA, TRIOPS_RECORD=str(tmp_path / "net"), TRIOPS_RECORD_MODE="shapes")
    assert done.returncode == 0, done.stderr
    files = case_file.files_in(tmp_path / "net")
    assert [f.name.rpartition("-")[0] for f in files] == [f"0000{n}-points_in_boxes" for n in (1, 2, 3)]
    assert set(record.counts_in(tmp_path / "net").values()) == {2}
    case = case_file.read(files[2])
    assert (case.described, case.args[0].shape, case.args[2:]) == (True, (1, 3, 3), ("center", 0.0))
    assert (case.args[0] == 0).all()
    assert (case.args[1] == 1).all()
    report = command.check(command.Options(device="cpu", cases=tmp_path / "net"))
    assert (report.passed, [r.calls for r in report.results]) == (True, [2, 2, 2])


def test_a_mode_of_recording_that_there_is_not_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_environment, "_warned", set())
    monkeypatch.setenv("TRIOPS_RECORD_MODE", "sahpes")
    with pytest.warns(RuntimeWarning, match="TRIOPS_RECORD_MODE must be data or shapes, got 'sahpes'"):
        assert not _environment.record_shapes_only()
    for value, shapes_only in (("Shapes", True), ("data", False), ("", False)):
        monkeypatch.setenv("TRIOPS_RECORD_MODE", value)
        assert _environment.record_shapes_only() is shapes_only


def test_a_forked_process_counts_its_own_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    recorder, op = Recorder(tmp_path, 9, 10**6), OPERATORS["points_in_boxes"]
    args = (torch.zeros(1, 2, 3), torch.ones(1, 1, 7), "center", 0.0)
    for _ in range(4):
        recorder(op, op.reference, args)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 4711)
        recorder(op, op.reference, args)
    (file,) = case_file.files_in(tmp_path)
    assert json.loads((tmp_path / "calls-4711.json").read_text()) == {file.name: 1}
    assert record.counts_in(tmp_path) == {file.name: 5}


def test_damaged_counts_are_no_harm(tmp_path: Path) -> None:
    for i, text in enumerate(("", "[", "[1]", '{"a": "b", "c": -1, "d": true, "e": 2}')):
        (tmp_path / f"calls-{i}.json").write_text(text)
    assert record.counts_in(tmp_path) == {"e": 2}


def test_folders_are_networks_and_the_report_sums_them_up(tmp_path: Path) -> None:
    op = OPERATORS["points_in_boxes"]
    for network, sizes, process in (("pillars", (2, 3, 2, 2), 1), ("pillars", (3, 5), 2), ("second", (7,), 3)):
        recorder = Recorder(tmp_path / network, 9, 10**6, shapes_only=True)
        for size in sizes:
            recorder(op, op.reference, (torch.zeros(1, size, 3), torch.ones(1, 1, 7), "center", 0.0))
        recorder.save_counts()
        for file in (tmp_path / network).glob(f"*{os.getpid()}*"):
            text = file.read_text().replace(f"-{os.getpid()}", f"-{process}")
            file.rename(file.with_name(file.name.replace(str(os.getpid()), str(process)))).write_text(text)
    report = command.check(command.Options(device="cpu", cases=tmp_path, out=tmp_path / "report", seconds=0.001))
    pillars, second = report.networks
    assert (pillars.name, pillars.operators, len(pillars.results), pillars.calls) == ("pillars", 1, 3, 6)
    assert [r.calls for r in pillars.results] == [3, 2, 1], "what two processes have called is one case"
    assert (second.name, second.calls, second.wrong) == ("second", 1, 0)
    assert pillars.seconds == pytest.approx(sum(r.calls * (r.seconds or 0) for r in pillars.results))
    assert second.seconds > 0
    assert "<h2>Networks</h2>" in (tmp_path / "report" / "report.html").read_text()
    assert any(line.startswith("pillars: 1 operators, 3 cases in 6 calls, ") for line in command.remarks(report))


# Descriptions of tensors


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 3), torch.rand(3, 4).t(), torch.rand(2, 8, 5, 6).contiguous(memory_format=torch.channels_last),
        torch.rand(5, 10)[:, ::2], torch.rand(1, 5).expand(4, 5), torch.rand(0, 3), torch.tensor(1.5),
        torch.randint(-5, 9, (100, 4)), torch.rand(9).half(), torch.rand(20, 40).bfloat16(), torch.rand(9) > 0.5,
        torch.rand(50, 2, dtype=torch.float64) * 1e200, torch.tensor([2**60, -(2**60)]),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}{list(t.stride())}",
)  # fmt: skip
def test_a_tensor_made_from_a_description_is_like_the_first(tensor: torch.Tensor) -> None:
    description = json.loads(json.dumps(shapes.described(tensor, 3)))
    again, same, other = shapes.made(description), shapes.made(description), shapes.made({**description, "seed": 4})
    assert (again.dtype, again.shape, again.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(again, same)
    if description["low"] != description["high"]:
        assert not torch.equal(again, other)
    if tensor.numel():
        columns = tensor.dim() > 1 and tensor.shape[-1] <= 16
        for got, given in zip(
            *(t.reshape(-1, t.shape[-1]).t() if columns else t.reshape(1, -1) for t in (again, tensor)), strict=True
        ):
            assert given.min() <= got.min()
            assert got.max() <= given.max()


def test_ranges_leave_out_what_is_not_finite_and_order_is_kept() -> None:
    found = shapes.described(torch.tensor([[NAN, INF], [2.0, -INF], [3.0, NAN]]), 0)
    assert (found["low"], found["high"]) == ([2.0, 0.0], [3.0, 0.0])
    starts = shapes.made(shapes.described(torch.tensor([0, 4, 4, 9, 30]), 0))
    assert (starts[1:] >= starts[:-1]).all()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)).view(5, 10)
    again = shapes.made(shapes.described(order, 0))
    assert sorted(again.flatten().tolist()) == list(range(50))
    assert not torch.equal(again, order)
    rows = torch.where(order < 30, order, -1)
    again = shapes.made(shapes.described(rows, 0))
    assert sorted(again[again >= 0].tolist()) == list(range(30)), "each row once, as sites have them"
    assert shapes.made(shapes.described(torch.rand(9).unfold(0, 4, 1), 0)).shape == (6, 4), "windows overlap"


GOOD = {"shape": [2, 3], "dtype": "float32", "stride": [3, 1], "low": 0.0, "high": 1.0, "seed": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": None}, {"shape": [2, -3]}, {"shape": [2, True]}, {"shape": [2]}, {"shape": [10**6] * 2},
        {"stride": [10**12, 1]}, {"stride": [-1, 1]}, {"stride": "31"}, {"dtype": "complex64"}, {"dtype": ["float32"]},
        {"low": "0"}, {"low": [1, 2]}, {"low": None}, {"high": [[1, 2, 3]]}, {"high": 1e300, "low": 10**400},
        {"seed": -1}, {"seed": 1.5}, {"seed": 2**70}, {"dtype": "int32", "low": 0.5},
    ],
)  # fmt: skip
def test_a_malformed_description_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(shapes.DescriptionError):
        shapes.made({**GOOD, **change})
    arguments = [{"described": {**GOOD, **change}}, {"described": GOOD}, "center", 0.0]
    header = {"format": 1, "operator": "points_in_boxes", "arguments": arguments, "outputs": None, "about": {}}
    file = tmp_path / "x.case.json"
    file.write_text(json.dumps({"triops case": header}))
    with pytest.raises(CaseError, match=r"x\.case\.json"):
        case_file.read(file)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"triops case": 5}', "[" * 100_000, "\x00\xff"])
def test_a_json_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.case.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(CaseError, match=r"x\.case\.json"):
        case_file.read(file)


NOT_FROM_RANGES = (
    "roiaware_pool3d_backward",  # lists that start with their lengths
    "ms_deform_attn", "ms_deform_attn_backward",  # sizes of maps that the rows of another argument add up to
)  # fmt: skip


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_calls_of_every_operator_can_be_made_up_from_their_shapes(operator: str, tmp_path: Path) -> None:
    op, refused = OPERATORS[operator], []
    samples = [s for s in _sample.all_samples() if s.operator == operator and s.scale == "general"][:3]
    for i, sample in enumerate(samples):
        file = tmp_path / f"{i}{case_file.SHAPES_SUFFIX}"
        case_file.write_described(file, operator, sample.make(sample.dtypes[0]), i, {})
        args = case_file.read(file).args
        try:
            got = op(*args)
        except (ValueError, IndexError) as error:
            refused.append(str(error))
            continue
        expected = _sample.specified(op, args, op.reference(*args))
        assert not difference(_sample.specified(op, args, got), expected, _sample.standard_of(op).error_scale)
    assert not refused or operator in NOT_FROM_RANGES


def test_a_case_that_cannot_be_made_up_is_no_failure(tmp_path: Path) -> None:
    file = tmp_path / f"a{case_file.SHAPES_SUFFIX}"
    args = (torch.zeros(1, 2, 3), torch.ones(1, 1, 7), "center", 0.0)
    case_file.write_described(file, "points_in_boxes", args, 0, {})
    file.write_text(file.read_text().replace('"center"', '"top"'))
    report = command.check(command.Options(device="cpu", cases=tmp_path))
    assert report.passed
    assert report.results[0].not_run.startswith("ValueError: points_in_boxes: z_origin must be")
    assert command.table(report)[0][1][0][8] == "not run"
    assert any("not made up from shapes: ValueError" in line for line in command.remarks(report))


def test_without_safetensors_recording_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['safetensors'] = None\n" + PROGRAM
    done = python(code, TRIOPS_RECORD=str(tmp_path))
    assert done.returncode != 0
    assert "TRIOPS_RECORD needs the package safetensors. Remedy: pip install safetensors" in done.stderr
    assert python(code).returncode == 0


def test_a_kernel_that_dies_leaves_its_inputs(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    recorder = Recorder(tmp_path, 5, 10**6)

    def dies(*args: Any) -> None:
        raise SystemError("gone")

    args = (torch.zeros(1, 2, 3), torch.ones(1, 1, 7), "center", 0.0)
    with pytest.raises(SystemError):
        recorder(OPERATORS["points_in_boxes"], dies, args)
    (file,) = case_file.files_in(tmp_path)
    found = case_file.read(file)
    assert found.outputs is None
    assert torch.equal(found.args[1], args[1])


def test_the_import_stays_light_and_recording_is_off() -> None:
    done = python("""import sys, triops
print([m for m in sys.modules if 'accept' in m or 'safetensors' in m], triops._op.recorder)""")
    assert done.stdout.strip() == "[] None", done.stderr


# The whole


SOME = ("points_in_boxes", "bbox_overlaps", "roiaware_pool3d_backward", "border_align_forward", "get_indice_pairs")


@pytest.mark.parametrize(
    "operators", [SOME, pytest.param((), marks=pytest.mark.full)], ids=["of five operators", "of everything"]
)
def test_a_quick_check_passes_and_writes_its_report(operators: tuple[str, ...], tmp_path: Path) -> None:
    """What `triops check --quick` does: of everything, about a minute on two idle cores."""
    report = command.check(command.Options(operators, device="cpu", quick=True, out=tmp_path))
    names = set(choose_operators(operators) or OPERATORS)  # also the backward of each
    assert report.passed, command.remarks(report)
    assert {r.operator for r in report.results} == names
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert len(data["cases"]) == len(report.results) == len(runner.tasks(choose_operators(operators), quick=True))
    page = (tmp_path / "report.html").read_text()
    assert all(f'id="{name}"' in page for name in names)
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    timed = [r for r in report.results if r.seconds is not None]
    assert {r.operator for r in timed} == {s.operator for s in _sample.all_samples() if s.demo} & names
    assert all(r.efficiency and (r.efficiency.reached or r.efficiency.why) for r in timed)


def test_the_report_shows_what_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    op = OPERATORS["points_in_boxes"]
    right = op.kernel("cpu")
    monkeypatch.setitem(op._kernels, "cpu", lambda *a: right(*a) + 1)
    monkeypatch.setattr(runner, "tasks", lambda *a, **k: SMALL_TASKS[:1])
    report = command.check(command.Options(("points_in_boxes",), "cpu", out=tmp_path))
    assert not report.passed
    assert as_json(report)["passed"] is False
    page = (tmp_path / "report.html").read_text()
    assert "1 of 1 cases failed" in page
    assert "What fails" in page
    assert command.table(report)[0][1][0][8] == "WRONG"


def test_the_module_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "triops.acceptance", "ingroup_inds", "--quick", "--device", "cpu", "--out"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "10 cases passed" in done.stdout
    assert (tmp_path / "report.html").is_file()


def test_a_backend_that_cannot_be_is_refused() -> None:
    for options, words in (
        (command.Options(backend="fpga"), "must be reference, cpu or gpu"),
        (command.Options(device="abacus"), "must be cpu or cuda"),
        (command.Options(cases=Path("no such folder")), "no such file"),
    ):
        with pytest.raises(UsageError, match=words):
            command.check(options)


def test_an_operator_may_set_its_own_standard() -> None:
    own = _sample.standard_of(OPERATORS["bbox_overlaps"])
    assert (own.floats, own.float32, own.half) == ("static", 1e-5, 3e-3)
    assert _sample.standard_of(OPERATORS["points_in_boxes"]).floats == "dynamic"


def test_replay_tells_what_a_case_holds_and_judges_then_and_now(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert triops_cli.main(["replay", str(case), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "border_align_forward(input=float16[1, 4, 3, 5]@cpu" in out
    assert "1 case passed" in out
    case.write_bytes(case.read_bytes()[:-1])
    assert triops_cli.main(["replay", str(case)]) == 2
    assert "not a whole" in capsys.readouterr().err


def test_check_on_the_command_line_shows_a_table_and_sets_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = OPERATORS["sparse_neighbors"]
    arguments = ["check", "sparse_neighbors", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    assert triops_cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "small cases" in out
    assert "report.html" in out
    right = op.kernel("cpu")
    monkeypatch.setitem(op._kernels, "cpu", lambda *a: tuple(t + 1 for t in right(*a)))
    assert triops_cli.main(arguments) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_saved_case_runs_on_every_backend(case: Path) -> None:
    for backend in ("reference", "cpu", "gpu"):
        if backend == "gpu":
            pytest.importorskip("triton")
        device = "cuda" if backend == "gpu" and torch.cuda.is_available() else "cpu"
        (result,) = runner.check(runner.case_tasks(case), device, backend=backend)
        assert (result.passed, result.backend) == (True, backend), result.failures


def test_the_results_page_is_up_to_date() -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "results_page.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
