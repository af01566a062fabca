"""Facts about the way between rows and dense grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import run

from triops.nn import SparseConvTensor
from triops.ops.sparse_dense import site_rows, sparse_to_dense

BACKENDS = ["reference", "cpu", "gpu"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_several_rows_at_a_site_the_lowest_stands_for_it_and_rows_outside_for_none(backend: str) -> None:
    indices = torch.tensor([[0, 3], [0, 1], [1, 0], [0, 1], [1, 0], [-1, 0], [2, 0], [0, 4], [0, -1]])
    for dtype in (torch.int32, torch.int64):
        rows = run(backend, "site_rows", (indices.to(dtype), 2, [4]))
        assert rows.tolist() == [[-1, 1, -1, 0], [2, -1, -1, -1]]
        assert rows.dtype == torch.int32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool], ids=str
)
def test_features_of_any_real_dtype_come_through_bit_for_bit(backend: str, dtype: torch.dtype) -> None:
    features = torch.tensor([[1, 0, 3], [4, 5, 6]]).to(dtype)
    rows = torch.tensor([[[-1, 1], [0, -1]]], dtype=torch.int32)
    first = run(backend, "sparse_to_dense", (features, rows, True)).cpu()
    assert first.dtype == dtype
    assert first.tolist() == torch.tensor([[[[0, 4], [1, 0]], [[0, 5], [0, 0]], [[0, 6], [3, 0]]]]).to(dtype).tolist()
    last = run(backend, "sparse_to_dense", (features, rows, False)).cpu()
    assert torch.equal(last, first.movedim(1, -1))
    assert torch.equal(run(backend, "sparse_from_dense", (last, rows, 2, False)).cpu(), features)


def test_a_dense_grid_can_be_differentiated_twice() -> None:
    indices = torch.tensor([[0, 2], [0, 2], [1, 0], [-1, 0]])
    rows = site_rows(indices, 2, [3])
    features = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x: sparse_to_dense(x, rows).square(), (features,))


def test_a_row_that_is_not_seen_gets_no_gradient() -> None:
    indices = torch.tensor([[0, 2], [0, 2], [1, 0], [-1, 0]], dtype=torch.int32)
    features = torch.ones(4, 1, requires_grad=True)
    for first in (True, False):
        features.grad = None
        SparseConvTensor(features, indices, [3], 2).dense(first).sum().backward()
        assert features.grad is not None
        assert features.grad.flatten().tolist() == [1, 0, 1, 0]


def test_dense_compiles_without_a_graph_break() -> None:
    def grid(features: torch.Tensor, indices: torch.Tensor) -> Any:
        return SparseConvTensor(features, indices, [4, 5], 2).dense()

    torch._dynamo.reset()
    compiled = torch.compile(grid, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (3, 8):
        indices = torch.randint(0, 4, (count, 3), dtype=torch.int32)
        features = torch.randn(count, 6)
        assert torch.equal(compiled(features, indices), grid(features, indices))
