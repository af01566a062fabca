"""Facts about bev_pool, by hand and by loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import GPU, assert_same, device_of, run

import triops
from triops.ops.bev_pool.samples import lifted_cells

BACKENDS = ["reference", "cpu", "gpu"]


def pool(backend: str, features, cells, num_cells, depth=None):
    """bev_pool by the kernels of one backend."""
    index = run(backend, "bev_pool_index", (cells.flatten(), num_cells))
    if depth is not None:
        features, depth = features.flatten(0, 2), depth.flatten(2)
    return run(backend, "bev_pool_forward", (features, depth, cells.flatten(), *index)).cpu()


@pytest.mark.parametrize("backend", BACKENDS)
def test_points_of_a_cell_are_summed_and_those_of_none_left_out(backend: str) -> None:
    features = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0], [16.0, 160.0]])
    cells = torch.tensor([3, -1, 0, 3, 4])
    assert pool(backend, features, cells, 4).tolist() == [[4, 40], [0, 0], [0, 0], [9, 90]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pixel_counts_at_each_depth_by_its_weight(backend: str) -> None:
    """Two images of two pixels, at three depths."""
    image = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(2, 1, 2, 1)
    depth = torch.arange(1.0, 13.0).view(2, 3, 1, 2)
    cells = torch.tensor([0, 1, 0, 2, 5, 2, 1, 1, 0, -1, 2, 0]).view(2, 3, 1, 2)
    # cell 0: 1*1 + 3*1 + 9*4 + 12*8; cell 1: 2*2 + 7*4 + 8*8; cell 2: 4*2 + 6*2 + 11*4; in cell 5 there is one pixel
    assert pool(backend, image, cells, 3, depth).flatten().tolist() == [136, 96, 64]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_index_is_stable_and_tells_where_cells_begin(backend: str) -> None:
    order, starts = run(backend, "bev_pool_index", (torch.tensor([2, 7, 0, 2, -5, 0, 2]), 4))
    assert order.tolist() == [2, 5, 0, 3, 6, 1, 4]
    assert starts.tolist() == [0, 2, 2, 5, 5]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(-1, 6), max_size=40),
    st.integers(0, 5),
    st.integers(1, 5),
)
def test_sums_are_those_of_a_loop(backend: str, cells: list[int], num_cells: int, channels: int) -> None:
    features = torch.arange(1.0, 1 + len(cells) * channels).view(len(cells), channels)
    expected = torch.zeros(num_cells, channels)
    for row, cell in zip(features, cells, strict=True):
        if 0 <= cell < num_cells:
            expected[cell] += row
    assert torch.equal(pool(backend, features, torch.tensor(cells, dtype=torch.int64), num_cells), expected)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_lifting_is_the_outer_product_pooled(device: str) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 4, 5, 7, dtype=torch.float64, device=device, requires_grad=True)
    depth = torch.rand(2, 6, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    cells = lifted_cells(2, 6, 4, 5, 9, 10.0).to(device)
    points = (depth[..., None] * image[:, None]).flatten(0, 3)
    expected = triops.bev_pool(points, cells.flatten(), 81)
    got = triops.bev_pool(image, cells, 81, depth)
    torch.testing.assert_close(got, expected)
    weights = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, (image, depth), weights), torch.autograd.grad(expected, (image, depth), weights),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_an_index_that_was_kept_gives_the_same_answer() -> None:
    cells, features = torch.randint(-1, 30, (500,)), torch.randn(500, 8)
    index = triops.bev_pool_index(cells, 30)
    assert torch.equal(triops.bev_pool(features, cells, 30, index=index), triops.bev_pool(features, cells, 30))


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_halves_are_summed_in_float32(backend: str) -> None:
    """In float16 the sum would stop at 2048."""
    assert pool(backend, torch.ones(5000, 1, dtype=torch.float16), torch.zeros(5000).int(), 1).item() == 5000


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    torch.manual_seed(1)
    cells = lifted_cells(2, 20, 8, 22, 40, 2.0).int()
    image, depth = torch.randn(2, 8, 22, 64), torch.rand(2, 20, 8, 22)
    results = []
    before = torch.get_num_threads()
    for count in (1, threads):
        torch.set_num_threads(count)
        leaves = image.clone().requires_grad_(), depth.clone().requires_grad_()
        pooled = triops.bev_pool(leaves[0], cells, 1600, leaves[1])
        pooled.square().sum().backward()
        results.append((pooled.detach(), leaves[0].grad, leaves[1].grad))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_garbage_in_an_index_on_gpu_is_skipped() -> None:
    """On CPU it is an IndexError, in the bad calls. Here kernels must read and write nothing outside."""
    features, cells = torch.ones(600, 8, device=GPU), torch.randint(0, 9, (600,), device=GPU).int()
    order, starts = (t.to(GPU) for t in run("gpu", "bev_pool_index", (cells, 9)))
    garbage = torch.tensor([2**31 - 1, -(2**31), -1, 600, 599], dtype=torch.int32, device=GPU)
    for wrong in (order.clone(), starts.clone()):
        wrong[1:6] = garbage[: len(wrong[1:6])]
        index = (wrong, starts) if len(wrong) == len(order) else (order, wrong)
        out = run("gpu", "bev_pool_forward", (features, None, cells, *index))
        assert out.shape == (9, 8)
        assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_cells_of_the_backward_may_be_any_integers(backend: str) -> None:
    grad, features = torch.ones(2, 3), torch.ones(4, 3)
    cells = torch.tensor([2**62, 1, -(2**62), 2])
    got = run(backend, "bev_pool_backward", (grad, features, None, cells))
    assert got[0].tolist() == [[0] * 3, [1] * 3, [0] * 3, [0] * 3]
    depth = torch.full((1, 2, 2), 0.5)
    got = run(backend, "bev_pool_backward", (grad, features[:2], depth, cells))
    assert_same(got, run("reference", "bev_pool_backward", (grad, features[:2], depth, cells)))
    assert device_of(backend) == GPU or got[1].shape == depth.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_point_of_no_cell_gives_and_gets_no_gradient_even_where_it_is_not_finite(backend: str) -> None:
    nan, inf = float("nan"), float("inf")
    depth = torch.tensor([[[2.0, nan], [inf, 3.0]]])  # one image, two depths, two pixels
    cells = torch.tensor([0, -1, 7, 1])
    features = torch.tensor([[5.0], [nan]])
    grad = torch.tensor([[10.0], [100.0]])
    grad_features, grad_depth = run(backend, "bev_pool_backward", (grad, features, depth, cells))
    assert grad_features.flatten().tolist() == [20.0, 300.0]
    assert grad_depth.flatten().tolist()[:3] == [50.0, 0.0, 0.0]
    assert grad_depth.flatten()[3].isnan()
