"""Facts about dynamic_scatter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEVICES, GPU, TOLERANCE, assert_same, run
from torch import Tensor

import triops
from triops._op import OPERATORS

FORWARD, BACKWARD = "dynamic_scatter_forward", "dynamic_scatter_backward"
BACKENDS = OPERATORS[FORWARD].backends
INF, NAN = math.inf, math.nan


def forward(backend: str, features: Any, coords: Any, reduce: str) -> list[Tensor]:
    features = torch.as_tensor(features, dtype=torch.float32)
    return [t.cpu() for t in run(backend, FORWARD, (features, torch.as_tensor(coords), reduce))]


def backward(backend: str, grad: Any, features: Any, reduced: Any, voxel: Any, counts: Any, reduce: str) -> Any:
    floats = (torch.as_tensor(t, dtype=torch.float32) for t in (grad, features, reduced))
    ints = (torch.as_tensor(t, dtype=torch.int32) for t in (voxel, counts))
    return run(backend, BACKWARD, (*floats, *ints, reduce)).cpu().tolist()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_points_of_one_voxel_become_one_row(backend: str) -> None:
    features, coords = [[1.0, 10], [2, 20], [6, 60]], [[0, 0, 5], [0, 0, 2], [0, 0, 5]]
    for reduce, expected in (("mean", [3.5, 35]), ("max", [6, 60]), ("sum", [7, 70])):
        reduced, voxel_coords, point_to_voxel, counts = forward(backend, features, coords, reduce)
        assert reduced.tolist() == [[2, 20], expected]
        assert voxel_coords.tolist() == [[0, 0, 2], [0, 0, 5]]
        assert point_to_voxel.tolist() == [1, 0, 1]
        assert counts.tolist() == [1, 2]


def test_voxels_ascend_by_the_first_coordinate_then_the_next(backend: str) -> None:
    coords = [[1, 0, 0], [0, 9, 9], [0, 10, 0], [0, 9, 10], [1, 0, 0]]
    assert forward(backend, torch.ones(5, 1), coords, "sum")[1].tolist() == [
        [0, 9, 9], [0, 9, 10], [0, 10, 0], [1, 0, 0]
    ]  # fmt: skip


def test_a_negative_coordinate_anywhere_leaves_the_point_out(backend: str) -> None:
    coords = [[-1, 0, 0], [0, -5, 0], [0, 0, -1], [0, 0, 0], [-1, -1, -1]]
    reduced, voxel_coords, point_to_voxel, counts = forward(backend, [[1.0], [2], [3], [4], [5]], coords, "sum")
    assert reduced.tolist() == [[4]]
    assert voxel_coords.tolist() == [[0, 0, 0]]
    assert point_to_voxel.tolist() == [-1, -1, -1, 0, -1]
    assert counts.tolist() == [1]


def test_nothing_left_gives_no_voxels(backend: str) -> None:
    for count in (0, 3):
        reduced, voxel_coords, point_to_voxel, counts = forward(
            backend, torch.ones(count, 2), torch.full((count, 3), -1), "max"
        )
        assert (reduced.shape, voxel_coords.shape, counts.shape) == ((0, 2), (0, 3), (0,))
        assert point_to_voxel.tolist() == [-1] * count


def test_nan_never_wins_a_maximum_and_a_voxel_of_nothing_else_is_minus_infinity(backend: str) -> None:
    features = [[NAN, NAN, -INF, 1], [-3, NAN, NAN, INF], [NAN, NAN, -INF, NAN]]
    assert forward(backend, features, [[0], [0], [0]], "max")[0].tolist() == [[-3, -INF, -INF, INF]]


def test_sums_of_halves_are_made_in_float32(backend: str) -> None:
    # 2048 + 1 + 1 is 2048 in steps of float16, and 2050 in one
    features, coords = torch.tensor([[2048.0], [1], [1]], dtype=torch.float16), torch.zeros(3, 1).int()
    reduced = run(backend, FORWARD, (features, coords, "sum"))[0]
    assert reduced.dtype == torch.float16
    assert reduced.item() == 2050


def test_the_gradient_of_a_sum_and_of_a_mean_goes_to_every_point(backend: str) -> None:
    args = ([[6.0], [8]], torch.zeros(4, 1), torch.zeros(2, 1), [1, 0, 1, -1], [1, 2])
    assert backward(backend, *args, "sum") == [[8], [6], [8], [0]]
    assert backward(backend, *args, "mean") == [[4], [6], [4], [0]]


def test_the_gradient_of_a_maximum_goes_to_the_lowest_point_that_holds_it(backend: str) -> None:
    features = [[1.0, 5, NAN], [3, 5, NAN], [3, NAN, NAN], [9, 9, 9]]
    grad = backward(backend, [[10.0, 20, 30]], features, [[3.0, 5, -INF]], [0, 0, 0, -1], [3], "max")
    assert grad == [[0, 20, 0], [10, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_a_voxel_that_is_not_there_is_refused_on_cpu_and_skipped_on_gpu(backend: str) -> None:
    args = ([[6.0]], torch.zeros(2, 1), torch.zeros(1, 1), [0, 7], [1])
    for reduce in ("mean", "max", "sum"):
        if backend == "gpu":
            assert backward(backend, *args, reduce) == [[6], [0]]
        else:
            with pytest.raises(IndexError, match=r"point_to_voxel must lie in -1\.\.0"):
                backward(backend, *args, reduce)


def test_strict_checks_refuse_it_on_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" not in BACKENDS:
        pytest.skip("no Triton")
    pytest.importorskip("triton")
    monkeypatch.setenv("TRIOPS_CHECK", "1")
    with pytest.raises(IndexError, match="point_to_voxel"):
        backward("gpu", [[6.0]], torch.zeros(2, 1), torch.zeros(1, 1), [0, -2], [1], "sum")


@pytest.mark.parametrize("limit", [5000, 2**31 - 1, 2**63 - 1])
def test_any_coordinates_are_told_apart(backend: str, limit: int) -> None:
    """Flat numbers of 32 bits, of 64, and none at all."""
    coords = torch.tensor([[limit, limit, 0], [0, 0, limit], [limit, limit, 0], [limit, 0, limit], [0, limit, 0]])
    reduced, voxel_coords, point_to_voxel, _ = forward(backend, [[1.0], [2], [3], [4], [5]], coords, "sum")
    assert voxel_coords.tolist() == [[0, 0, limit], [0, limit, 0], [limit, 0, limit], [limit, limit, 0]]
    assert reduced.flatten().tolist() == [2, 5, 4, 4]
    assert point_to_voxel.tolist() == [3, 0, 3, 2, 1]


@pytest.mark.skipif("gpu" not in BACKENDS, reason="no Triton")
def test_more_blocks_than_a_program_sums_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triops._gpu.scan"), "MAX_ADDED", 2)
    g = torch.Generator().manual_seed(1)
    args = (torch.randn(5000, 2, generator=g), torch.randint(-1, 9, (5000, 3), generator=g), "mean")
    assert_same(run("gpu", FORWARD, args), run("reference", FORWARD, args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_the_public_function_is_differentiable_and_the_gradient_adds_up(device: str, reduce: str) -> None:
    g = torch.Generator().manual_seed(1)
    features = torch.randn(500, 3, generator=g).to(device).requires_grad_()
    coords = torch.randint(-1, 4, (500, 3), generator=g).int().to(device)
    reduced, voxel_coords = triops.dynamic_scatter(features, coords, reduce)
    assert not voxel_coords.requires_grad
    (grad,) = torch.autograd.grad(reduced.sum(), features)
    kept = (coords >= 0).all(1)
    assert grad[~kept].abs().sum() == 0
    expected = kept.sum() if reduce == "sum" else len(reduced)
    torch.testing.assert_close(grad.sum(0).cpu(), torch.full((3,), float(expected)))


def test_a_second_derivative_is_refused() -> None:
    features = torch.randn(5, 2, requires_grad=True)
    reduced, _ = triops.dynamic_scatter(features, torch.zeros(5, 3).int(), "max")
    (grad,) = torch.autograd.grad((reduced**2).sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        grad.sum().backward()


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(0, 80), channels=st.integers(0, 9), axes=st.integers(1, 5), above=st.integers(1, 12),
    reduce=st.sampled_from(["mean", "max", "sum"]), seed=st.integers(0, 10**6),
    dtype=st.sampled_from(list(TOLERANCE)),
)  # fmt: skip
def test_every_backend_does_what_a_loop_over_the_voxels_does(
    count: int, channels: int, axes: int, above: int, reduce: str, seed: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(count, channels, generator=g).to(dtype)
    coords = torch.randint(-1, above, (count, axes), generator=g)
    rows: dict[tuple[int, ...], list[int]] = {}
    for i, cell in enumerate(coords.tolist()):
        if min(cell) >= 0:
            rows.setdefault(tuple(cell), []).append(i)
    for backend in BACKENDS:
        reduced, voxel_coords, _, counts = (t.cpu() for t in run(backend, FORWARD, (features, coords, reduce)))
        assert [tuple(c) for c in voxel_coords.tolist()] == sorted(rows)
        for v, cell in enumerate(sorted(rows)):
            held = features[rows[cell]].double()
            want = held.amax(0) if reduce == "max" else held.sum(0) if reduce == "sum" else held.mean(0)
            assert counts[v] == len(held)
            torch.testing.assert_close(reduced[v].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maxima_are_those_of_the_reference_to_the_last_bit(backend: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(500, 5, generator=draw).to(dtype)
    args = (features, torch.randint(-1, 5, (500, 3), generator=draw), "max")
    assert torch.equal(run(backend, FORWARD, args)[0].cpu(), run("reference", FORWARD, args)[0])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_shuffled_points_give_the_same_maxima(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    features, coords = torch.randn(300, 4, generator=g), torch.randint(-1, 5, (300, 3), generator=g)
    order = torch.randperm(300, generator=g)
    first, second = triops.dynamic_scatter(features, coords, "max"), triops.dynamic_scatter(
        features[order], coords[order], "max"
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_threads_change_nothing(reduce: str) -> None:
    g = torch.Generator().manual_seed(1)
    features = torch.randn(60_000, 40, generator=g, requires_grad=True)
    coords = torch.randint(-1, 20, (60_000, 3), generator=g)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            reduced, voxel_coords = triops.dynamic_scatter(features, coords, reduce)
            results.append((reduced, voxel_coords, *torch.autograd.grad((reduced**2).sum(), features)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(GPU == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_two_runs_on_a_gpu_give_the_same_bits(reduce: str) -> None:
    features = torch.randn(200_000, 8, device="cuda", requires_grad=True)
    coords = torch.randint(-1, 20, (200_000, 3), device="cuda")
    results = []
    for _ in range(2):
        reduced, voxel_coords = triops.dynamic_scatter(features, coords, reduce)
        results.append((reduced, voxel_coords, *torch.autograd.grad((reduced**2).sum(), features)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# the face of mmcv


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_mmcvs_functions_return_and_fill(reduce: str) -> None:
    from triops.compat import mmcv

    ext = mmcv.extension("mmcv._ext")
    features = torch.tensor([[1.0], [2], [6]], requires_grad=True)
    coords = torch.tensor([[0, 0, 5], [-1, -1, -1], [0, 0, 5]]).int()
    reduced, voxel_coords, point_to_voxel, counts = ext.dynamic_point_to_voxel_forward(features, coords, reduce)
    assert reduced.tolist() == [[{"mean": 3.5, "max": 6, "sum": 7}[reduce]]]
    assert not reduced.requires_grad
    assert voxel_coords.tolist() == [[0, 0, 5]]
    assert (point_to_voxel.dtype, point_to_voxel.tolist()) == (torch.int32, [0, -1, 0])
    grad = torch.zeros(3, 1)
    ext.dynamic_point_to_voxel_backward(
        grad, torch.tensor([[8.0]]), features, reduced, point_to_voxel, counts, reduce
    )  # fmt: skip
    assert grad.flatten().tolist() == {"mean": [4, 0, 4], "max": [0, 0, 8], "sum": [8, 0, 8]}[reduce]
