"""Facts about vector_pool: by hand, against a loop, and through OpenPCDet's names."""

from __future__ import annotations

import pytest
import torch
from support import run
from torch import Tensor

import triops
from triops.compat import pcdet
from triops.ops.vector_pool import vector_pool_pairs

BACKENDS = ["reference", "cpu", "gpu"]
stack = pcdet.extension("pcdet.ops.pointnet2.pointnet2_stack_cuda")


def pairs(backend: str, points: Tensor, centers: Tensor, radius: float, grid: list[int], k: int, ball: bool) -> Tensor:
    ends = torch.tensor([0, len(points)]), torch.tensor([0, len(centers)])
    return run(backend, "vector_pool_pairs", (points, centers, *ends, radius, grid, k, ball))  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", BACKENDS)
def test_cells_are_counted_with_z_fastest_and_the_upper_border_falls_into_the_next_row(backend: str) -> None:
    points = torch.tensor([[-1.0, -1, -1], [-1, -1, 0.5], [-1, -1, 1], [1, 1, 1], [0, 0, 1.01]])
    found = pairs(backend, points, torch.zeros(1, 3), 1.0, [2, 2, 2], -1, False)
    # z of 1 is cell 2 of 2 along z: one row of cells further; behind the last cell there is none
    assert found.tolist() == [[0, 0, 0], [1, 0, 1], [2, 0, 2], [3, 0, 7]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ball_is_smaller_than_its_cube_and_k_takes_the_lowest(backend: str) -> None:
    points = torch.tensor([[0.9, 0.9, 0.0], [1, 0, 0], [0, 0, 0], [0, 0.5, 0]])
    assert pairs(backend, points, torch.zeros(1, 3), 1.0, [1, 1, 1], -1, True)[:, 0].tolist() == [1, 2, 3]
    assert pairs(backend, points, torch.zeros(1, 3), 1.0, [1, 1, 1], 2, False)[:, 0].tolist() == [0, 1]


def test_offsets_that_lie_touch_nothing_out_of_bounds_on_gpu() -> None:
    points, right = torch.rand(4, 3), torch.tensor([0, 2, 4])
    for wrong in ([-9, 2, 900], [4, 1, 0], [2**31 - 1, -(2**31), 3]):
        for ends in ((torch.tensor(wrong), right), (right, torch.tensor(wrong))):
            found = run("gpu", "vector_pool_pairs", (points, points, *ends, 2.0, [1, 1, 1], -1, False))
            assert ((found[:, :2] >= 0) & (found[:, :2] < 4)).all()


def by_loop(points: Tensor, features: Tensor, centers: Tensor, channels: int, found: Tensor, cells: int) -> Tensor:
    pooled = torch.zeros(len(centers), cells, channels, dtype=features.dtype)
    counts = torch.zeros(len(centers), cells, 1, dtype=features.dtype)
    for p, m, cell in found.tolist():
        counts[m, cell] += 1
        for i in range(features.shape[1]):
            pooled[m, cell, i % channels] += features[p, i]
    return (pooled / counts.clamp(min=1)).flatten(1)


def test_features_are_folded_and_averaged_by_cell() -> None:
    draw = torch.Generator().manual_seed(0)
    points, centers = torch.rand(40, 3, generator=draw), torch.rand(3, 3, generator=draw)
    features = torch.randn(40, 6, generator=draw)
    found = vector_pool_pairs(points, centers, 0.4, (2, 1, 2))
    pooled, local, counts = triops.vector_pool(points, features, centers, 0.4, (2, 1, 2), 3)
    torch.testing.assert_close(pooled, by_loop(points, features, centers, 3, found, 4))
    assert int(counts.sum()) == len(found)
    sums = (local.view(3, 4, 3) * counts[..., None]).sum(1)
    for m in range(3):
        own = points[found[found[:, 1] == m, 0].long()]
        torch.testing.assert_close(sums[m], (own - centers[m]).sum(0), atol=1e-5, rtol=1e-5)


def test_the_first_point_of_a_cell_stands_for_it() -> None:
    points = torch.tensor([[0.5, 0.0, 0.0], [0.6, 0, 0], [-0.5, 0, 0]])
    features = torch.tensor([[1.0], [2], [4]])
    pooled, _, counts = triops.vector_pool(points, features, torch.zeros(1, 3), 1.0, (2, 1, 1), 1, pool="first")
    assert (pooled.tolist(), counts.tolist()) == ([[4, 1]], [[1, 1]])
    pooled, _, counts = triops.vector_pool(points, features, torch.zeros(1, 3), 1.0, (2, 1, 1), 1, pool="first", k=1)
    assert (pooled.tolist(), counts.tolist()) == ([[0, 1]], [[0, 1]])


@pytest.mark.parametrize("pool", ["avg", "first"])
def test_gradcheck(pool: str) -> None:
    draw = torch.Generator().manual_seed(0)
    points = torch.rand(12, 3, generator=draw, dtype=torch.float64)
    features = torch.randn(12, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda f: triops.vector_pool(points, f, points[:3], 0.5, (2, 2, 1), 2, pool=pool)[0], (features,)
    )


def test_openpcdets_names_compute_the_same_sums_and_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    points, features = torch.rand(30, 3, generator=draw), torch.randn(30, 4, generator=draw, requires_grad=True)
    centers, counts = points[::6].contiguous(), torch.tensor([12, 18], dtype=torch.int32)
    of_centers = torch.tensor([2, 3], dtype=torch.int32)
    sums, local = torch.zeros(5, 8 * 2), torch.zeros(5, 8 * 3)
    number, listed = torch.zeros(5, 8, dtype=torch.int32), torch.zeros(100, 3, dtype=torch.int32)
    total = stack.vector_pool_wrapper(
        points, counts, features.detach(), centers, of_centers, sums, local, number, listed, 2, 2, 2, 0.4, True, 100,
        -1, 0, 0,
    )  # fmt: skip
    pooled, means, expected_number = triops.vector_pool(
        points, features, centers, 0.4, (2, 2, 2), 2, offsets=torch.tensor([0, 12, 30]),
        center_offsets=torch.tensor([0, 2, 5]),
    )  # fmt: skip
    assert torch.equal(number, expected_number)
    divisor = number.clamp(min=1)[..., None]
    torch.testing.assert_close((sums.view(5, 8, 2) / divisor).flatten(1), pooled.detach())
    torch.testing.assert_close((local.view(5, 8, 3) / divisor).flatten(1), means)
    grad_out, grad = torch.randn(5, 16, generator=draw), torch.zeros(30, 4)
    stack.vector_pool_grad_wrapper(grad_out, number, listed[:total], grad)
    torch.testing.assert_close(grad, torch.autograd.grad(pooled, features, grad_out)[0])


def test_openpcdet_finds_the_three_nearest_of_a_list_for_every_cell() -> None:
    line = torch.tensor([[x, 0.0, 0.0] for x in (0, 1, 2, 3, 50)])
    counts, one = torch.tensor([5], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    centers = torch.tensor([[1.0, 0, 0], [50.4, 0, 0]])
    listed, start_len = torch.zeros(20, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    stack.query_stacked_local_neighbor_idxs_wrapper_stack(
        line, counts, centers, one, listed, start_len, total, 10, 2.0, -1, 0
    )
    assert start_len.tolist() == [[0, 4], [4, 1]]
    assert listed[: int(total)].tolist() == [0, 1, 2, 3, 4]
    cells = centers[:, None] + torch.tensor([[-1.0, 0, 0], [1.6, 0, 0]])
    index, squares = torch.zeros(2, 2, 3, dtype=torch.int32), torch.zeros(2, 2, 3)
    stack.query_three_nn_by_stacked_local_idxs_wrapper_stack(
        line, centers, cells, index, squares, listed[: int(total)], start_len, 2, 2
    )
    assert index.tolist() == [[[0, 1, 2], [3, 2, 1]], [[4, 4, 4], [4, 4, 4]]]
    assert squares[0, 0].tolist() == [0, 1, 4]
