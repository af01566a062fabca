"""mmcv's and OpenPCDet's names for searches among points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import triops.compat.mmcv
import triops.compat.pcdet
from triops.compat import _mmcv_search

LINE = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [9, 0, 0]])


@pytest.fixture
def ext() -> Any:
    return triops.compat.mmcv.extension("mmcv._ext")


def test_ball_query_fills_its_indices(ext: Any) -> None:
    indices = torch.zeros(1, 2, 3, dtype=torch.int32)
    ext.ball_query_forward(
        LINE[None, 1:3].contiguous(), LINE[None], indices, b=1, n=4, m=2, min_radius=0.5, max_radius=1.5, nsample=3
    )
    assert indices.tolist() == [[[0, 1, 2], [1, 2, 1]]]


def test_stacked_ball_query_counts_within_each_cloud_and_marks_empty_balls_in_front(ext: Any) -> None:
    indices = torch.zeros(3, 3, dtype=torch.int32)
    centers = torch.tensor([[0.5, 0, 0], [9.5, 0, 0], [5.0, 0, 0]])
    counts = [torch.tensor(c, dtype=torch.int32) for c in ([1, 2], [2, 2])]
    ext.stack_ball_query_forward(centers, counts[0], LINE, counts[1], indices, max_radius=1.0, nsample=3)
    assert indices.tolist() == [[0, 1, 0], [1, 1, 1], [-1, 0, 0]]


def test_knn_and_three_nn_fill_indices_and_squared_distances(ext: Any) -> None:
    indices, squares = torch.zeros(1, 1, 5, dtype=torch.int32), torch.zeros(1, 1, 5)
    ext.knn_forward(LINE[None], LINE[None, 1:2].contiguous(), indices, squares, b=1, n=4, m=1, nsample=5)
    assert indices.tolist() == [[[1, 0, 2, 3, 0]]]
    assert squares.tolist() == [[[0, 1, 1, 64, 1e10]]]
    indices, squares = torch.zeros(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3)
    ext.three_nn_forward(LINE[None, 3:].contiguous(), LINE[None, :3].contiguous(), squares, indices, b=1, n=1, m=3)
    assert (indices.tolist(), squares.tolist()) == ([[[2, 1, 0]]], [[[49, 64, 81]]])


def test_knn_and_three_nn_read_three_numbers_a_point_from_the_front_of_wider_rows_as_mmcv_does(ext: Any) -> None:
    """DGCNN's `F-KNN` of mmdetection3d."""
    features = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    memory = features.flatten().tolist()
    read = torch.tensor([[memory[3 * (8 * b + i) : 3 * (8 * b + i) + 3] for i in range(8)] for b in range(2)])
    expected = torch.cdist(read, read).topk(3, largest=False).indices
    indices, squares = torch.zeros(2, 8, 3, dtype=torch.int32), torch.zeros(2, 8, 3)
    ext.knn_forward(features, features, indices, squares, b=2, n=8, m=8, nsample=3)
    assert torch.equal(indices.long(), expected)
    assert torch.equal(_mmcv_search.knn(3, features).mT, indices)
    assert torch.equal(_mmcv_search.knn(3, features.mT.contiguous(), transposed=True).mT, indices)
    # and SA-SSD of mmdetection3d, whose points begin with their number in the batch
    ext.three_nn_forward(features, features, squares.zero_(), indices.zero_(), b=2, n=8, m=8)
    assert torch.equal(indices.long(), expected)


def test_points_in_polygons_fills_0_and_1(ext: Any) -> None:
    output = torch.full((2, 1), 7.0)
    square = torch.tensor([[0.0, 0, 2, 0, 2, 2, 0, 2]])
    ext.points_in_polygons_forward(torch.tensor([[1.0, 1], [3, 1]]), square, output)
    assert output.tolist() == [[1], [0]]


def test_chamfer_distance_fills_distances_and_indices_and_adds_gradients(ext: Any) -> None:
    one, two = torch.tensor([[[0.0, 0], [3, 0]]]), torch.tensor([[[1.0, 0]]])
    distances = torch.zeros(1, 2), torch.zeros(1, 1)
    indices = torch.ones(1, 2, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
    ext.chamfer_distance_forward(one, two, *distances, *indices)
    assert [t.tolist() for t in (*distances, *indices)] == [[[1, 4]], [[1]], [[0, 0]], [[0]]]
    grads = torch.ones_like(one), torch.zeros_like(two)
    ext.chamfer_distance_backward(one, two, *indices, torch.ones(1, 2), torch.ones(1, 1), *grads)
    assert [g.tolist() for g in grads] == [[[[-3, 1], [5, 1]]], [[[0, 0]]]]


def test_the_batch_module_of_openpcdet_fills_indices_and_squared_distances() -> None:
    module = triops.compat.pcdet.extension("pcdet.ops.pointnet2.pointnet2_batch.pointnet2_batch_cuda")
    indices, squares = torch.zeros(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3)
    module.ball_query_wrapper(1, 4, 1, 1.5, 3, LINE[None, 2:3].contiguous(), LINE[None], indices)
    assert indices.tolist() == [[[1, 2, 1]]]
    module.three_nn_wrapper(1, 1, 4, LINE[None, 3:].contiguous(), LINE[None], squares, indices)
    assert (indices.tolist(), squares.tolist()) == ([[[3, 2, 1]]], [[[0, 49, 64]]])


def test_the_stack_module_of_openpcdet_counts_balls_within_clouds_and_neighbors_over_all() -> None:
    module = triops.compat.pcdet.extension("pcdet.ops.pointnet2.pointnet2_stack.pointnet2_stack_cuda")
    counts, ones = torch.tensor([2, 2], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)
    centers = torch.tensor([[5.0, 0, 0], [8.5, 0, 0]])
    indices, squares = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    module.ball_query_wrapper(2, 2, 1.0, 3, centers, ones, LINE, counts, indices)
    assert indices.tolist() == [[-1, 0, 0], [1, 1, 1]]
    module.three_nn_wrapper(centers, ones, LINE, counts, squares, indices)
    assert indices.tolist() == [[1, 0, 0], [3, 2, 2]]
    assert squares.tolist() == [[16, 25, float("inf")], [0.25, 42.25, float("inf")]]
    voxels = torch.tensor([[[[0, 1, 2, -1, -1, -1, -1, -1, -1, 3]]]], dtype=torch.int32)
    coords = torch.tensor([[0, 0, 0, 5], [0, 0, 0, 8]], dtype=torch.int32)
    module.voxel_query_wrapper(2, 1, 1, 10, 3, 1.0, 0, 0, 1, centers, LINE, coords, voxels, indices)
    assert indices.tolist() == [[-1, 0, 0], [3, 3, 3]]


def test_chamfer_distance_in_float16_rounds_each_operation_as_mmcv(ext: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    g = np.random.default_rng(0)
    one, two = (g.uniform(-10, 10, (2, n, 2)).astype(np.float16) for n in (300, 200))
    two[0, :3], two[1, :, 0] = np.nan, np.inf
    monkeypatch.setattr(_mmcv_search, "PAIRS", 5000)  # in parts
    distances = [torch.zeros(2, n, dtype=torch.float16) for n in (300, 200)]
    indices = [torch.zeros(2, n, dtype=torch.int32) for n in (300, 200)]
    ext.chamfer_distance_forward(torch.from_numpy(one), torch.from_numpy(two), *distances, *indices)
    for b, (own, others) in enumerate([(one, two), (two, one)]):
        terms = np.square(own[:, :, None] - others[:, None])  # NumPy computes in float16
        squares = np.nan_to_num(terms[..., 0] + terms[..., 1], nan=np.inf, posinf=np.inf)
        assert np.array_equal(distances[b].numpy(), squares.min(2))
        assert np.array_equal(indices[b].numpy(), np.where(np.isinf(squares.min(2)), -1, squares.argmin(2)))


@pytest.mark.parametrize(("one", "two"), [(0, 3), (3, 0), (0, 0)])
def test_chamfer_distance_in_float16_of_nothing(ext: Any, one: int, two: int) -> None:
    distances = [torch.zeros(2, n, dtype=torch.float16) for n in (one, two)]
    indices = [torch.zeros(2, n, dtype=torch.int32) for n in (one, two)]
    ext.chamfer_distance_forward(*(torch.zeros(2, n, 2, dtype=torch.float16) for n in (one, two)), *distances, *indices)
    assert all(bool((d == torch.inf).all()) for d in distances)
    assert all(bool((i == -1).all()) for i in indices)
