"""Facts about roiaware_pool3d."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEVICES, GPU, assert_same, run
from torch import Tensor

import triops
import triops.nn
from triops._op import OPERATORS
from triops.ops.roiaware_pool3d import samples

BACKENDS = OPERATORS["roiaware_pool3d_forward"].backends
FORWARD, BACKWARD = "roiaware_pool3d_forward", "roiaware_pool3d_backward"
BOX = [0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0]  # x in -2..2, y in -1..1, z in 0..2


def forward(
    backend: str,
    rois: Any,
    points: Any,
    features: Any,
    cells: tuple[int, int, int] = (2, 1, 1),
    slots: int = 4,
    mode: str = "max",
    z_origin: str = "bottom",
    margin: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    rois, points, features = (torch.as_tensor(t, dtype=torch.float32) for t in (rois, points, features))
    pooled, argmax, lists = run(backend, FORWARD, (rois, points, features, *cells, slots, mode, z_origin, margin))
    return pooled.cpu(), argmax.cpu(), lists.cpu()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["any order", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> Any:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


# Forward: what goes where


def test_slot_0_counts_and_the_lowest_points_come_first(backend: str) -> None:
    points = [[1.0, 0, 1], [-1.0, 0, 1], [1.5, 0, 1], [0.5, 0, 1], [9.0, 0, 1]]
    _, _, lists = forward(backend, [BOX], points, torch.zeros(5, 1))
    assert lists.view(2, 4).tolist() == [[1, 1, 0, 0], [3, 0, 2, 3]]


def test_points_beyond_the_slots_are_dropped_and_do_not_pool(backend: str) -> None:
    features = [[1.0], [2.0], [3.0], [9.0]]
    for mode, expected in (("max", 3.0), ("avg", 2.0)):
        pooled, argmax, lists = forward(backend, [BOX], [[1.0, 0, 1]] * 4, features, (1, 1, 1), 4, mode)
        assert lists.flatten().tolist() == [3, 0, 1, 2]
        assert pooled.item() == expected
        assert argmax.item() == (2 if mode == "max" else -1)


def test_one_slot_leaves_no_room_for_any_point(backend: str) -> None:
    for mode in ("max", "avg"):
        pooled, argmax, lists = forward(backend, [BOX], [[1.0, 0, 1]], [[5.0]], (1, 1, 1), 1, mode)
        assert (pooled.item(), argmax.item(), lists.item()) == (0, -1, 0)


def test_of_equal_features_the_lowest_point_wins(backend: str) -> None:
    pooled, argmax, _ = forward(backend, [BOX], [[1.0, 0, 1]] * 3, [[1.0, 2.0], [3.0, 2.0], [3.0, 2.0]], (1, 1, 1))
    assert pooled.flatten().tolist() == [3, 2]
    assert argmax.flatten().tolist() == [1, 0]


def test_nan_and_minus_infinity_never_win(backend: str) -> None:
    nan, inf = math.nan, math.inf
    features = [[nan, -inf, nan, -inf], [-3.0, nan, nan, -inf], [nan, inf, nan, nan]]
    pooled, argmax, _ = forward(backend, [BOX], [[1.0, 0, 1]] * 3, features, (1, 1, 1))
    assert pooled.flatten().tolist() == [-3, inf, 0, 0]
    assert argmax.flatten().tolist() == [1, 2, -1, -1]


def test_a_cell_without_points_is_zero_and_has_no_winner(backend: str) -> None:
    pooled, argmax, lists = forward(backend, [BOX], [[1.0, 0, 1]], [[-5.0]])
    assert pooled.flatten().tolist() == [0, -5]
    assert argmax.flatten().tolist() == [-1, 0]
    assert lists[..., 0].flatten().tolist() == [0, 1]


def test_cells_count_along_x_then_y_then_z_from_the_lower_corner(backend: str) -> None:
    cells = (4, 2, 2)
    points = [[-2 + x + 0.5, -1 + y + 0.5, z + 0.5] for x in range(4) for y in range(2) for z in range(2)]
    _, argmax, _ = forward(backend, [BOX], points, torch.zeros(16, 1), cells)
    assert argmax.flatten().tolist() == list(range(16))


def test_a_point_on_the_border_of_two_cells_belongs_to_the_upper(backend: str) -> None:
    _, argmax, _ = forward(backend, [BOX], [[0.0, 0.0, 1.0]], [[1.0]], (2, 2, 2))
    assert argmax.flatten().tolist() == [-1] * 7 + [0]


def test_the_top_face_belongs_to_the_last_cell_and_the_sides_to_none(backend: str) -> None:
    points = [[1.0, 0, 2.0], [1.0, 0, 0.0], [2.0, 0, 1.0], [1.0, 1.0, 1.0], [1.0, 0, 2.001]]
    _, _, lists = forward(backend, [BOX], points, torch.zeros(5, 1), (1, 1, 2))
    assert lists.view(2, 4)[:, :2].tolist() == [[1, 1], [1, 0]]


def test_a_margin_takes_in_points_outside_and_the_outer_cells_hold_them(backend: str) -> None:
    points = [[-2.2, 0, 1], [2.2, 0, 1], [-2.3, 0, 1]]
    _, _, lists = forward(backend, [BOX], points, torch.zeros(3, 1), margin=0.25)
    assert lists.view(2, 4)[:, :2].tolist() == [[1, 0], [1, 1]]


def test_the_cells_turn_with_the_box(backend: str) -> None:
    box = [*BOX[:6], math.pi / 2]  # the long side now lies along y
    _, argmax, _ = forward(backend, [box], [[0.0, 1.5, 1], [0.0, -1.5, 1], [1.5, 0, 1]], torch.zeros(3, 1))
    assert argmax.flatten().tolist() == [1, 0]


def test_z_origin_center_lowers_the_box_by_half(backend: str) -> None:
    points = [[1.0, 0, -0.5], [1.0, 0, 0.5], [1.0, 0, 1.5]]
    for origin, expected in (("bottom", [1, 2]), ("center", [0, 1])):
        _, argmax, _ = forward(backend, [BOX], points, torch.zeros(3, 1), (1, 1, 2), z_origin=origin)
        assert argmax.flatten().tolist() == expected


def test_overlapping_rois_share_their_points(backend: str) -> None:
    _, _, lists = forward(backend, [BOX, BOX, [1.0, *BOX[1:]]], [[1.5, 0, 1]], torch.zeros(1, 1))
    assert lists[..., 0].flatten().tolist() == [0, 1, 0, 1, 0, 1]


def test_more_than_256_cells_a_side_and_2048_slots(backend: str) -> None:
    points = torch.zeros(2100, 3)
    points[:, 0], points[:, 2] = 1.999, 1.0
    _, _, lists = forward(backend, [BOX], points, torch.zeros(2100, 1), (400, 1, 1), 2500)
    assert lists[0, 399, 0, 0, 0] == 2100
    assert lists[0, 399, 0, 0, 1:2101].tolist() == list(range(2100))
    assert lists[0, :399].abs().sum() == 0


@pytest.mark.parametrize("backend", ["cpu", *(["gpu"] if GPU == "cuda" else [])])
def test_more_than_65536_rois(backend: str) -> None:
    """Triton's interpreter would take minutes; a small grid limit of a GPU would show on a GPU alone."""
    rois = torch.tensor(BOX).repeat(70_000, 1)
    rois[:, 0] = torch.arange(70_000) * 10.0
    points = torch.tensor([[0.0, 0, 1], [699_990.5, 0, 1]])
    pooled, argmax, _ = forward(backend, rois, points, [[1.0], [2.0]], (1, 1, 1), 2)
    assert pooled.flatten().nonzero().flatten().tolist() == [0, 69_999]
    assert argmax[-1].item() == 1


def test_rounds_over_the_rois_give_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pytest.importorskip("triops.ops.roiaware_pool3d.gpu")
    args = samples._random(5, 30, 3, seed=1)(torch.float32)
    expected = run("reference", FORWARD, args)
    monkeypatch.setattr(gpu, "WORKSPACE", 2 * 33)  # room for two RoIs
    assert_same(run("gpu", FORWARD, args), expected)


def test_half_features_with_float32_points(backend: str) -> None:
    rois, points, features, *rest = samples._random(3, 40, 3, mode="avg")(torch.float32)
    pooled, _, lists = run(backend, FORWARD, (rois, points, features.half(), *rest))
    assert pooled.dtype == torch.float16
    assert torch.equal(lists.cpu(), run("reference", FORWARD, (rois, points, features, *rest))[2])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["max", "avg"]), st.integers(1, 6))
def test_any_scene_gives_the_same_lists_on_cpu_and_reference(seed: int, mode: str, slots: int) -> None:
    random = torch.Generator().manual_seed(seed)
    shape = torch.randint(1, 6, (3,), generator=random).tolist()
    count, total = torch.randint(0, 40, (2,), generator=random).tolist()
    args = samples._random(count % 5, total, 2, tuple(shape), slots, mode, seed=seed)(torch.float32)
    assert_same(run("cpu", FORWARD, args), run("reference", FORWARD, args))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(-50, 50))
def test_a_scene_that_moves_with_its_boxes_pools_the_same(seed: int, shift: float) -> None:
    rois, points, features, *rest = samples._random(3, 60, 2, (2, 2, 2), 64, seed=seed)(torch.float64)
    offset = torch.tensor([shift, -shift, shift / 2], dtype=torch.float64)
    moved = torch.cat([rois[:, :3] + offset, rois[:, 3:]], 1)
    assert_same(
        run("cpu", FORWARD, (moved, points + offset, features, *rest))[0],
        run("cpu", FORWARD, (rois, points, features, *rest))[0],
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_points_in_another_order_pool_the_same_while_nothing_is_dropped(seed: int) -> None:
    rois, points, features, *rest = samples._random(3, 60, 2, (2, 2, 2), 64, seed=seed)(torch.float32)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    got = run("cpu", FORWARD, (rois, points[order], features[order], *rest))
    expected = run("cpu", FORWARD, (rois, points, features, *rest))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[2][..., 0], expected[2][..., 0])


# Backward


def lists_of(*cells: list[int]) -> Tensor:
    return torch.tensor(cells, dtype=torch.int32).view(1, len(cells), 1, 1, -1)


def test_max_gives_each_gradient_to_its_winner(backend: str, deterministic: bool) -> None:
    argmax = lists_of([0, 1], [0, -1], [2, 1])
    grad = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]).view(1, 3, 1, 1, 2)
    got = run(backend, BACKWARD, (lists_of([0], [0], [0]), argmax, grad, 4, "max"))
    assert got.tolist() == [[5, 0], [0, 34], [16, 0], [0, 0]]


def test_avg_shares_each_gradient_among_the_listed_points(backend: str, deterministic: bool) -> None:
    lists = lists_of([2, 0, 3, 1], [0, 1, 1, 1], [1, 3, 2, 2])  # what stands behind the count is not read
    grad = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]).view(1, 3, 1, 1, 2)
    got = run(backend, BACKWARD, (lists, torch.zeros_like(grad, dtype=torch.int32), grad, 4, "avg"))
    assert got.tolist() == [[0.5, 1], [0, 0], [0, 0], [16.5, 33]]


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_infinities_and_nan_reach_only_their_points(backend: str, deterministic: bool, mode: str) -> None:
    nan, inf = math.nan, math.inf
    cells = [[1, p] for p in (0, 1, 1, 2, 3, 3, 4)]
    grad = torch.tensor([inf, -inf, -1.0, nan, inf, -inf, 3.0]).view(1, 7, 1, 1, 1)
    argmax = lists_of(*[[p] for _, p in cells])
    got = run(backend, BACKWARD, (lists_of(*cells), argmax, grad, 5, mode)).cpu().flatten()
    expected = torch.tensor([inf, -inf, nan, nan, 3.0])
    assert torch.equal(got.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["max", "avg"])
def test_gradients_of_any_magnitude_keep_their_precision(
    backend: str, deterministic: bool, mode: str, dtype: torch.dtype
) -> None:
    """Points with tiny gradients beside points with huge ones: each is right to its own last bits."""
    point = torch.arange(12, dtype=torch.int32).repeat(3)
    grad = (torch.linspace(1, 2, 36, dtype=torch.float64) * 10.0 ** (point.double() * 6 - 33)).to(dtype)
    lists = torch.stack([torch.ones_like(point), point], 1).view(1, 36, 1, 1, 2)
    args = (lists, point.view(1, 36, 1, 1, 1), grad.view(1, 36, 1, 1, 1), 12, mode)
    expected = grad.double().view(3, 12).sum(0)
    got = run(backend, BACKWARD, args).cpu().double().flatten()
    assert torch.allclose(got, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_the_sum_of_gradients_is_conserved(backend: str, deterministic: bool, mode: str) -> None:
    rois, points, features, *rest = samples._random(3, 80, 4, slots=64, mode=mode)(torch.float64)
    _, argmax, lists = run("reference", FORWARD, (rois, points, features, *rest))
    grad = torch.randn(argmax.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = run(backend, BACKWARD, (lists, argmax, grad, 80, mode)).cpu()
    filled = (grad * (lists[..., :1] > 0)).sum((0, 1, 2, 3))
    assert filled.abs().min() > 0
    assert torch.allclose(got.sum(0), filled, rtol=1e-12)


GARBAGE_POINTS = 5


def garbage(mode: str) -> tuple[Any, ...]:
    """Indices and counts of any value: a kernel that believed them would write all over memory."""
    random = torch.Generator().manual_seed(0)
    shape = (3, 3, 2, 2)
    lists = torch.randint(-(2**31), 2**31 - 1, (*shape, 6), generator=random, dtype=torch.int32)
    argmax = torch.randint(-(2**31), 2**31 - 1, (*shape, 4), generator=random, dtype=torch.int32)
    lists[1:, ..., 0] = torch.randint(-1, 7, lists[1:, ..., 0].shape, generator=random, dtype=torch.int32)
    lists[2, ..., 1:] = torch.randint(-2, GARBAGE_POINTS + 2, lists[2, ..., 1:].shape, generator=random).int()
    argmax[1:] = torch.randint(-2, GARBAGE_POINTS + 2, argmax[1:].shape, generator=random, dtype=torch.int32)
    return lists, argmax, torch.randn(argmax.shape, generator=random), GARBAGE_POINTS, mode


@pytest.mark.parametrize("mode", ["max", "avg"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_out_of_range_indices_are_refused_on_a_cpu(backend: str, mode: str) -> None:
    with pytest.raises(IndexError, match="roiaware_pool3d_backward"):
        run(backend, BACKWARD, garbage(mode))


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_out_of_range_indices_are_skipped_on_a_gpu(mode: str, deterministic: bool) -> None:
    pytest.importorskip("triton")
    lists, argmax, grad, points, _ = garbage(mode)
    expected = torch.zeros(points, 4)
    for v, (listed, winner, row) in enumerate(
        zip(lists.view(-1, 6).tolist(), argmax.view(-1, 4).tolist(), grad.view(-1, 4), strict=True)
    ):
        assert v < 36
        if mode == "max":
            for c, p in enumerate(winner):
                if 0 <= p < points:
                    expected[p, c] += row[c]
        elif 0 < listed[0] < 6:
            for p in listed[1 : 1 + listed[0]]:
                if 0 <= p < points:
                    expected[p] += row / listed[0]
    assert expected.abs().sum() > 0
    assert_same(run("gpu", BACKWARD, garbage(mode)), expected, operator=BACKWARD)


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_strict_checks_refuse_out_of_range_indices_on_a_gpu_too(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRIOPS_CHECK", "1")
    with pytest.raises(IndexError, match="roiaware_pool3d_backward"):
        run("gpu", BACKWARD, garbage(mode))


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_several_threads_give_the_same_gradient(mode: str) -> None:
    args = samples._random_lists(12, (12, 12, 12), 8, 5, 300, mode)(torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run("cpu", BACKWARD, args)
        torch.set_num_threads(3)
        first, second = run("cpu", BACKWARD, args), run("cpu", BACKWARD, args)
        lists, argmax, *rest = args
        with pytest.raises(IndexError):
            run("cpu", BACKWARD, (lists, argmax + 300, *rest) if mode == "max" else (lists + 300, argmax, *rest))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(first, second)
    assert_same(first, alone, operator=BACKWARD)


# Through autograd


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["max", "avg"])
def test_the_public_function_is_differentiable_in_the_features_only(mode: str, device: str) -> None:
    rois = torch.tensor([BOX], device=device, requires_grad=True)
    points = torch.tensor([[1.0, 0, 1], [1.5, 0, 1], [9.0, 0, 1]], device=device, requires_grad=True)
    features = torch.tensor([[1.0], [2.0], [3.0]], device=device, requires_grad=True)
    triops.roiaware_pool3d(rois, points, features, (2, 1, 1), mode=mode).sum().backward()
    assert features.grad is not None
    assert features.grad.flatten().tolist() == ([0, 1, 0] if mode == "max" else [0.5, 0.5, 0])
    assert rois.grad is None
    assert points.grad is None


def test_a_second_derivative_is_refused() -> None:
    features = torch.rand(2, 1, requires_grad=True)
    pooled = triops.roiaware_pool3d(torch.tensor([BOX]), torch.tensor([[1.0, 0, 1]] * 2), features, 1)
    (grad,) = torch.autograd.grad(pooled.square().sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        grad.sum().backward()


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_only_what_the_backward_reads_is_kept_for_it(mode: str) -> None:
    rois, points = torch.tensor([BOX]), torch.tensor([[1.0, 0, 1]])
    pooled = triops.roiaware_pool3d(rois, points, torch.rand(1, 3, requires_grad=True), 2, 64, mode)
    assert pooled.grad_fn is not None
    saved = pooled.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert [t.shape[-1] for t in saved] == [3 if mode == "max" else 64]


def test_the_module_is_the_function() -> None:
    rois, points, features, x, y, z, slots, mode, _, _ = samples._random(3, 50, 3, mode="avg")(torch.float32)
    module = triops.nn.RoIAwarePool3d((x, y, z), slots, mode)
    assert torch.equal(
        module(rois, points, features), triops.roiaware_pool3d(rois, points, features, (x, y, z), slots, mode)
    )
    assert repr(module) == "RoIAwarePool3d(out_size=(3, 4, 2), max_points_per_voxel=5, mode='avg')"
    cube = triops.nn.RoIAwarePool3d(2)
    assert cube(rois, points, features).shape == (3, 2, 2, 2, 3)
    assert cube.max_points_per_voxel == 128


def test_a_result_of_more_than_two_to_the_31_elements_has_its_shape() -> None:
    rois, points, features = (torch.empty(n, c, device="meta") for n, c in ((70_000, 7), (10, 3), (10, 16)))
    pooled, argmax, lists = triops.roiaware_pool3d_forward(rois, points, features, 20, 128)
    assert lists.shape == (70_000, 20, 20, 20, 128)
    assert pooled.shape == argmax.shape == (70_000, 20, 20, 20, 16)
