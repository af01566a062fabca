"""Facts about voxelize and dynamic_voxelize."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEVICES, assert_same, run
from torch import Tensor

import triops
from triops._op import OPERATORS
from triops.ops.voxelize.geometry import grid_size

BACKENDS = OPERATORS["voxelize_padded"].backends
UNIT, BOUNDS = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0, 3.0, 2.0]  # x in 0..4, y in 0..3, z in 0..2


def padded(backend: str, points: Any, max_points: int = 2, max_voxels: int = 9, size: Any = UNIT, bounds: Any = BOUNDS):
    points = torch.as_tensor(points, dtype=torch.float32)
    return [t.cpu() for t in run(backend, "voxelize_padded", (points, size, bounds, max_points, max_voxels))]


def cells(backend: str, points: Any, size: Any = UNIT, bounds: Any = BOUNDS, dtype: torch.dtype = torch.float32):
    points = torch.as_tensor(points, dtype=torch.float64).to(dtype)
    return run(backend, "dynamic_voxelize", (points, size, bounds)).cpu().tolist()


def line(*x: float) -> list[list[float]]:
    """Points along x; the fourth number says which one it is."""
    return [[value, 0.5, 0.5, float(i)] for i, value in enumerate(x)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_voxels_are_numbered_by_their_first_points(backend: str) -> None:
    _, coords, num_points, slots, count = padded(backend, line(3.5, 0.5, 3.2, 1.5, 0.1))
    assert int(count) == 3
    assert coords.tolist() == [[0, 0, 3], [0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert num_points.tolist() == [2, 2, 1, 0, 0]
    assert slots.tolist() == [0, 2, 1, 4, 3]


def test_coordinates_are_z_y_x(backend: str) -> None:
    assert padded(backend, [[3.5, 2.5, 1.5]])[1].tolist() == [[1, 2, 3]]
    assert cells(backend, [[3.5, 2.5, 1.5]]) == [[1, 2, 3]]


def test_a_voxel_keeps_its_first_points_and_drops_the_others(backend: str) -> None:
    voxels, _, num_points, slots, count = padded(backend, line(0.5, 0.6, 2.5, 0.7, 2.6, 0.8))
    assert int(count) == 2
    assert voxels[:2, :, 3].tolist() == [[0, 1], [2, 4]]
    assert num_points[:2].tolist() == [2, 2]
    assert slots.tolist() == [0, 1, 2, -1, 3, -1]


def test_voxels_after_the_last_are_dropped_and_earlier_ones_go_on_filling(backend: str) -> None:
    voxels, coords, num_points, slots, count = padded(backend, line(0.5, 1.5, 2.5, 2.6, 0.6), max_voxels=2)
    assert int(count) == 2
    assert coords.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert voxels[:, :, 3].tolist() == [[0, 4], [1, 0]]
    assert num_points.tolist() == [2, 1]
    assert slots.tolist() == [0, 2, -1, -1, 1]


def test_what_is_not_filled_is_zero(backend: str) -> None:
    voxels = padded(backend, [[0.5, 0.5, 0.5, 7.0], [9.0, 9.0, 9.0, 7.0]], max_points=3)[0]
    assert voxels.shape == (2, 3, 4)
    assert voxels.flatten(0, 1)[1:].abs().sum() == 0
    assert voxels[0, 0].tolist() == [0.5, 0.5, 0.5, 7]


def test_the_lower_bound_is_inside_and_the_upper_is_not(backend: str) -> None:
    points = [[0.0, 0, 0], [4.0, 0, 0], [0, 3.0, 0], [0, 0, 2.0], [math.nextafter(4, 0), 2.5, 1.5], [-1e-6, 0, 0]]
    expected = [[0, 0, 0], [-1] * 3, [-1] * 3, [-1] * 3, [1, 2, 3], [-1] * 3]
    assert cells(backend, points, dtype=torch.float64) == expected


def test_one_coordinate_outside_marks_all_three(backend: str) -> None:
    assert cells(backend, [[9.0, 0.5, 0.5], [0.5, -9.0, 0.5], [0.5, 0.5, 9.0]]) == [[-1, -1, -1]] * 3


def test_points_that_are_not_finite_are_outside(backend: str) -> None:
    nan, inf = math.nan, math.inf
    points = [[nan, 0.5, 0.5], [0.5, inf, 0.5], [0.5, 0.5, -inf], [3e38, 0.5, 0.5], [-3e38, 0.5, 0.5]]
    assert cells(backend, points) == [[-1, -1, -1]] * 5


def test_negative_zero_is_in_the_first_cell(backend: str) -> None:
    assert cells(backend, [[-0.0, -0.0, -0.0]]) == [[0, 0, 0]]


def test_cells_come_from_a_division_in_the_dtype_of_the_points(backend: str) -> None:
    # 0.7 / 0.1 is 7 in float32 and below 7 in float64
    size, bounds = [0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert cells(backend, [[0.7, 0.5, 0.5]], size, bounds, torch.float32) == [[5, 5, 7]]
    assert cells(backend, [[0.7, 0.5, 0.5]], size, bounds, torch.float64) == [[5, 5, 6]]


def test_cells_are_those_of_a_division_and_not_of_a_product(backend: str) -> None:
    sizes, points = np.float32([0.05, 0.1, 0.16]), np.arange(1, 700, dtype=np.float32)[:, None] * np.float32(
        [0.05, 0.1, 0.16]
    )  # fmt: skip
    divided, multiplied = np.floor(points / sizes), np.floor(points * (np.float32(1) / sizes))
    assert (divided != multiplied).any()
    got = cells(backend, points, sizes.tolist(), [0.0, 0.0, 0.0, 100.0, 100.0, 200.0])
    assert got == divided[:, ::-1].astype(int).tolist()


def test_a_range_that_is_no_multiple_of_the_size_is_rounded(backend: str) -> None:
    # 70.4 / 0.5 = 140.8: the last cell reaches beyond the range
    assert grid_size([0.5, 0.5, 0.5], [0, -40, -3, 70.4, 40, 1]) == [141, 160, 8]
    assert cells(backend, [[70.45, 0.0, 0.0]], [0.5, 0.5, 0.5], [0, -40, -3, 70.4, 40, 1]) == [[6, 80, 140]]
    # halves are rounded away from zero, and 1 / 0.4 is one half in float32
    assert grid_size([0.4, 2.0, 2.0], [0, 0, 0, 1, 1, 5]) == [3, 1, 3]


def test_one_grid_for_every_dtype(backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        assert cells(backend, [[1.1, 0.0, 0.0]], [0.4, 1, 1], [0, 0, 0, 1, 1, 1], dtype) == [[0, 0, 2]]


def test_a_cell_that_holds_thousands_keeps_the_lowest_in_order(backend: str) -> None:
    points = torch.rand(3000, 3, generator=torch.Generator().manual_seed(1))
    voxels, _, num_points, slots, count = padded(backend, points, 700, 5)
    assert int(count) == 1
    assert num_points[0] == 700
    assert torch.equal(voxels[0], points[:700])
    assert slots[:700].tolist() == list(range(700))
    assert (slots[700:] == -1).all()


@pytest.mark.skipif("gpu" not in BACKENDS, reason="no Triton")
@pytest.mark.parametrize("dense", [True, False])
def test_more_blocks_than_a_program_sums_up(monkeypatch: pytest.MonkeyPatch, dense: bool) -> None:
    gpu = pytest.importorskip("triops.ops.voxelize.gpu")
    monkeypatch.setattr(pytest.importorskip("triops._gpu.scan"), "MAX_ADDED", 2)
    monkeypatch.setattr(gpu, "MAX_DENSE", gpu.MAX_DENSE if dense else 0)
    points = torch.rand(5000, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([4.2, 3.2, 2.2])
    args = (points, [0.1, 0.1, 0.1], BOUNDS, 3, 4000)
    assert_same(run("gpu", "voxelize_padded", args), run("reference", "voxelize_padded", args))


def test_no_points_give_no_voxels(backend: str) -> None:
    voxels, coords, num_points, slots, count = padded(backend, torch.zeros(0, 5), max_points=3)
    assert (voxels.shape, coords.shape, num_points.shape, slots.shape) == ((0, 3, 5), (0, 3), (0,), (0,))
    assert int(count) == 0
    assert cells(backend, torch.zeros(0, 3)) == []


@pytest.mark.parametrize("device", DEVICES)
def test_the_public_function_cuts_off_the_padding(device: str) -> None:
    points = torch.tensor(line(3.5, 0.5, 3.2, 9.0), device=device)
    voxels, coords, num_points = triops.voxelize(points, (1, 1, 1), BOUNDS, max_points=2, max_voxels=100)
    assert voxels[:, :, 3].tolist() == [[0, 2], [1, 0]]
    assert coords.tolist() == [[0, 0, 3], [0, 0, 0]]
    assert num_points.tolist() == [2, 1]
    nothing = triops.voxelize(points + 100, (1, 1, 1), BOUNDS, 2, 100)
    assert [t.shape for t in nothing] == [(0, 2, 4), (0, 3), (0,)]


def test_arrays_and_numpy_numbers_pass_for_sizes_and_ranges() -> None:
    points = torch.tensor([[3.5, 0.5, 0.5]])
    size, bounds = np.ones(3, np.float32), tuple(np.float32(b) for b in BOUNDS)
    assert triops.dynamic_voxelize(points, size, bounds).tolist() == [[0, 0, 3]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_point_gets_the_gradient_of_its_slot(device: str) -> None:
    points = torch.tensor(line(0.5, 1.5, 0.6, 0.7, 9.0), device=device, requires_grad=True)
    voxels, _, _ = triops.voxelize(points, UNIT, BOUNDS, 2, 9)
    weight = torch.arange(16.0, device=device).view(2, 2, 4)
    (grad,) = torch.autograd.grad((voxels * weight).sum(), points)
    assert grad.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [0] * 4, [0] * 4]


def python_voxelize(points: Tensor, size: list[float], bounds: list[float], max_points: int, max_voxels: int) -> Any:
    """As one would say it: one point after the other."""
    voxels: dict[tuple[int, ...], list[int]] = {}
    for i, cell in enumerate(triops.dynamic_voxelize(points, size, bounds).tolist()):
        key = tuple(cell)
        if key[0] < 0 or (key not in voxels and len(voxels) == max_voxels):
            continue
        held = voxels.setdefault(key, [])
        if len(held) < max_points:
            held.append(i)
    return voxels


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 120), seed=st.integers(0, 10**6), size=st.sampled_from([0.3, 1.0, 2.5]),
    max_points=st.integers(1, 6), max_voxels=st.integers(1, 60),
)  # fmt: skip
def test_every_backend_does_what_a_loop_over_the_points_does(
    count: int, seed: int, size: float, max_points: int, max_voxels: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    points = torch.rand(count, 4, generator=g) * torch.tensor([5.0, 4.0, 3.0, 1.0]) - 0.5
    expected = python_voxelize(points, [size] * 3, BOUNDS, max_points, max_voxels)
    for backend in BACKENDS:
        voxels, coords, num_points, _, found = padded(backend, points, max_points, max_voxels, [size] * 3)
        assert int(found) == len(expected)
        assert [tuple(c) for c in coords[: len(expected)].tolist()] == list(expected)
        for v, held in enumerate(expected.values()):
            assert num_points[v] == len(held)
            assert torch.equal(voxels[v, : len(held)], points[held])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_shuffled_points_fill_the_same_voxels(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    points = torch.rand(200, 3, generator=g) * 4
    shuffled = points[torch.randperm(200, generator=g)]
    first, second = (triops.voxelize(p, UNIT, BOUNDS, 200, 200) for p in (points, shuffled))
    count = {
        tuple(c): int(n) for c, n in zip(first[1].tolist(), first[2], strict=True)
    }  # fmt: skip
    assert count == {tuple(c): int(n) for c, n in zip(second[1].tolist(), second[2], strict=True)}


def test_threads_change_nothing() -> None:
    points = torch.rand(150_000, 4, generator=torch.Generator().manual_seed(1)) * 4
    args = (points, [0.05, 0.05, 0.05], BOUNDS, 4, 60_000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = triops.voxelize_padded(*args)
        torch.set_num_threads(4)
        assert all(torch.equal(a, b) for a, b in zip(alone, triops.voxelize_padded(*args), strict=True))
    finally:
        torch.set_num_threads(before)


# the face of mmcv


def test_mmcvs_functions_fill_what_they_are_given() -> None:
    from triops.compat import mmcv

    ext = mmcv.extension("mmcv._ext")
    points = torch.tensor(line(3.5, 0.5, 3.2, 9.0), requires_grad=True)
    size, bounds = torch.tensor(UNIT), torch.tensor(BOUNDS)
    voxels, coords, num_points, count = (
        torch.zeros(20, 2, 4), torch.zeros(20, 3).int(), torch.zeros(20).int(), torch.zeros((), dtype=torch.int64),
    )  # fmt: skip
    for deterministic in (True, False):
        ext.hard_voxelize_forward(
            points, size, bounds, voxels, coords, num_points, count,
            max_points=2, max_voxels=20, NDim=3, deterministic=deterministic,
        )  # fmt: skip
        assert count.item() == 2
        assert coords[:3].tolist() == [[0, 0, 3], [0, 0, 0], [0, 0, 0]]
        assert num_points[:3].tolist() == [2, 1, 0]
        assert voxels[:2, :, 3].tolist() == [[0, 2], [1, 0]]
        assert not voxels.requires_grad
    cell = torch.zeros(4, 3).int()
    ext.dynamic_voxelize_forward(points, size, bounds, cell, NDim=3)
    assert cell.tolist() == [[0, 0, 3], [0, 0, 0], [0, 0, 3], [-1, -1, -1]]
    with pytest.raises(ValueError, match="NDim must be 3, got 2"):
        ext.dynamic_voxelize_forward(points, size, bounds, cell, NDim=2)
