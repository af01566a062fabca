"""Facts about gather_points and group_points: by hand, and against indexing in torch."""

from __future__ import annotations

import pytest
import torch
from support import run

import triops
from triops.compat.mmcv import FUNCTIONS

BACKENDS = ["reference", "cpu", "gpu"]
FEATURES = torch.tensor([[[1.0, 2, 3], [10, 20, 30]]])  # [1, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_are_taken_in_the_order_of_the_indices_and_minus_1_is_0(backend: str) -> None:
    index = torch.tensor([[2, 0, -1, 2]])
    planes = run(backend, "gather_points", (FEATURES, index, False))
    assert planes.tolist() == [[[3, 1, 0, 3], [30, 10, 0, 30]]]
    assert torch.equal(run(backend, "gather_points", (FEATURES.mT, index, True)), planes.mT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_point_is_the_sum_over_its_places(backend: str) -> None:
    index, grad = torch.tensor([[2, 0, -1, 2]]), torch.tensor([[[1.0, 2, 4, 8], [0, 0, 0, 1]]])
    planes = run(backend, "gather_points_backward", (grad, index, 3, False))
    assert planes.tolist() == [[[2, 0, 9], [0, 0, 1]]]
    assert torch.equal(run(backend, "gather_points_backward", (grad.mT, index, 3, True)), planes.mT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_gradients_are_summed_in_float32(backend: str) -> None:
    index, grad = torch.zeros(1, 4096, dtype=torch.int32), torch.ones(1, 1, 4096, dtype=torch.float16)
    assert run(backend, "gather_points_backward", (grad, index, 1, False)).item() == 4096  # 2048 if summed in float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
def test_many_channels_go_through_rows_on_a_gpu_however_they_lie(dtype: torch.dtype, turned: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    features = torch.randint(-8, 9, (2, 70, 12), generator=draw).to(dtype).mT  # rows underneath
    features = features if turned else features.contiguous()
    index = torch.randint(-1, 70, (2, 3000), generator=draw)
    grad = torch.randint(-8, 9, (2, 12, 3000), generator=draw).to(dtype)
    for operator, args in (
        ("gather_points", (features, index, False)),
        ("gather_points_backward", (grad, index, 70, False)),
    ):
        found = run("gpu", operator, args)
        assert found.is_contiguous()
        assert torch.equal(found.cpu(), run("reference", operator, args))  # sums of small integers are exact


def test_indices_out_of_range_are_no_point_in_kernels_of_the_gpu() -> None:
    index = torch.tensor([[3, 1, -2, 2**31 - 1, -(2**31)]], dtype=torch.int32)
    assert run("gpu", "gather_points", (FEATURES, index, False)).tolist() == [[[0, 2, 0, 0, 0], [0, 20, 0, 0, 0]]]
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            grad = run("gpu", "gather_points_backward", (torch.ones(1, 2, 5), index, 3, False))
        finally:
            torch.use_deterministic_algorithms(False)
        assert grad.tolist() == [[[0, 1, 0], [0, 1, 0]]]


def test_group_points_is_indexing() -> None:
    draw = torch.Generator().manual_seed(0)
    features, index = torch.randn(2, 4, 9, generator=draw), torch.randint(0, 9, (2, 5, 3), generator=draw)
    expected = torch.stack([f[:, i] for f, i in zip(features, index, strict=True)])
    assert torch.equal(triops.group_points(features, index), expected)
    assert torch.equal(triops.group_points(features[0].T, index[0]), features[0].T[index[0]])
    assert torch.equal(triops.gather_points(features[0].T, index[0, :, 0]), features[0].T[index[0, :, 0]])


def test_group_points_differentiates_and_compiles() -> None:
    features = torch.randn(2, 4, 9, dtype=torch.float64, requires_grad=True)
    index = torch.randint(-1, 9, (2, 5, 3))
    assert torch.autograd.gradcheck(triops.group_points, (features, index))
    assert torch.autograd.gradcheck(triops.group_points, (features[0].T, index[0]))
    compiled = torch.compile(triops.group_points, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(features, index), triops.group_points(features, index))


def test_stacked_groups_of_mmcv_count_within_their_cloud() -> None:
    features, index = torch.arange(10.0).view(5, 2), torch.tensor([[1, 2], [2, 2], [-1, 0]], dtype=torch.int32)
    points, groups = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    out, grad = torch.empty(3, 2, 2), torch.zeros(5, 2)
    FUNCTIONS["stack_group_points_forward"](features, points, index, groups, out, b=2, c=2, m=3, nsample=2)
    # Point 2 of the first cloud, which has two, is nobody: not the first of the next one.
    assert out.tolist() == [[[2, 0], [3, 0]], [[8, 8], [9, 9]], [[0, 4], [0, 5]]]
    FUNCTIONS["stack_group_points_backward"](
        torch.ones(3, 2, 2), index, groups, points, grad, b=2, c=2, m=3, n=5, nsample=2
    )
    assert grad[:, 0].tolist() == [0, 1, 1, 0, 2]
