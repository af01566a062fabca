"""Facts about sparse_max_pool and sparse_avg_pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import assert_same, run
from torch.fx.experimental.proxy_tensor import make_fx

from triops import Rulebook, sparse_avg_pool, sparse_max_pool
from triops.ops.sparse_conv.samples import hand_made, random_sites, sparse
from triops.ops.sparse_pool import sparse_avg_pool_times_count, sparse_max_pool_from_zero

PAIRS = Rulebook.sparse(torch.tensor([[0, 0], [0, 1], [0, 4], [0, 5]]), 1, 6, kernel_size=2, stride=2)


def test_negative_features_survive() -> None:
    out = sparse_max_pool(torch.tensor([[-3.0], [-1.0], [-2.0], [-5.0]]), PAIRS)
    assert out.tolist() == [[-1.0], [-2.0]]


def test_ties_give_the_gradient_to_the_lowest_offset() -> None:
    features = torch.tensor([[2.0], [2.0], [1.0], [1.0]], requires_grad=True)
    sparse_max_pool(features, PAIRS).sum().backward()
    assert features.grad is not None
    assert features.grad.tolist() == [[1.0], [0.0], [1.0], [0.0]]


def test_a_maximum_from_zero_is_never_below_it_and_gives_every_equal_input_the_gradient() -> None:
    features = torch.tensor([[2.0, 0.0], [2.0, -1.0], [-1.0, -4.0], [-3.0, 5.0]], requires_grad=True)
    out = sparse_max_pool_from_zero(features, PAIRS)
    assert out.tolist() == [[2, 0], [0, 5]]
    out.backward(torch.tensor([[1.0, 10.0], [100.0, 1000.0]]))
    assert features.grad is not None
    assert features.grad.tolist() == [[1, 10], [1, 0], [0, 0], [0, 1000]]


def test_minus_infinity_is_a_maximum_and_nan_the_largest() -> None:
    inf, nan = float("inf"), float("nan")
    out = sparse_max_pool(torch.tensor([[-inf], [-inf], [nan], [inf]]), PAIRS)
    assert out[0].item() == -inf
    assert out[1].isnan()


def test_the_mean_is_over_the_sites_that_exist() -> None:
    book = Rulebook.sparse(torch.tensor([[0, 0], [0, 1], [0, 4]]), 1, 6, kernel_size=2, stride=2)
    features = torch.tensor([[2.0], [4.0], [7.0]], requires_grad=True)
    out = sparse_avg_pool(features, book)
    assert out.tolist() == [[3.0], [7.0]]
    out.sum().backward()
    assert features.grad is not None
    assert features.grad.tolist() == [[0.5], [0.5], [1.0]]


@pytest.mark.parametrize("pool", [sparse_max_pool, sparse_avg_pool])
def test_an_output_without_inputs_is_zero(pool: Any) -> None:
    book = hand_made([-1, -1], [0, 1], rows=2)()
    assert pool(torch.tensor([[-1.0], [-1.0]]), book).tolist() == [[0.0], [-1.0]]


@pytest.mark.parametrize("pool", [sparse_max_pool, sparse_avg_pool])
def test_no_sites_give_an_empty_tensor(pool: Any) -> None:
    features = torch.zeros(0, 4, requires_grad=True)
    out = pool(features, sparse(0, 1, [5, 6, 7])())
    assert out.shape == (0, 4)
    out.sum().backward()


def test_the_maximum_is_the_dense_one_over_minus_infinity() -> None:
    sites = random_sites(60, 2, [5, 6, 7])
    features = torch.randn(60, 3, dtype=torch.float64, requires_grad=True)
    book = Rulebook.sparse(sites, 2, [5, 6, 7], 3, stride=2, padding=1)
    grid = torch.full((2, 5, 6, 7, 3), -float("inf"), dtype=torch.float64)
    grid = grid.index_put(tuple(sites.long().t()), features).movedim(-1, 1)
    pooled = F.max_pool3d(grid, 3, 2, 1).movedim(1, -1)[tuple(book.out_indices.long().t())]
    out = sparse_max_pool(features, book)
    assert torch.equal(out, pooled)
    grad = torch.randn_like(out)
    got, expected = (torch.autograd.grad(o, features, grad, retain_graph=True)[0] for o in (out, pooled))
    torch.testing.assert_close(got, expected)


def test_the_gradient_cannot_be_differentiated_again() -> None:
    features = torch.randn(4, 1, requires_grad=True)
    (grad,) = torch.autograd.grad(sparse_avg_pool(features, PAIRS).square().sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        grad.sum().backward()


@pytest.mark.parametrize("operator", ["sparse_max_pool", "sparse_avg_pool"])
def test_on_a_gpu_entries_that_are_no_rows_are_skipped(operator: str) -> None:
    book = sparse(40, 2, [5, 6, 7], padding=1)()
    wild, tame = book.gather.clone(), book.gather.clone()
    values = torch.tensor([2**31 - 1, -(2**31), 40, -2, 1 << 20], dtype=torch.int32)
    wild.view(-1)[::7] = values.repeat(wild.numel())[: len(wild.view(-1)[::7])]
    tame.view(-1)[::7] = -1
    features = torch.randn(40, 4)
    got = run("gpu", operator, (features, wild, book.scatter))
    assert_same(got, run("reference", operator, (features, tame, book.scatter)))


POOLS = [sparse_max_pool, sparse_max_pool_from_zero, sparse_avg_pool, sparse_avg_pool_times_count]


@pytest.mark.parametrize("pool", POOLS)
def test_the_transposed_table_is_made_for_a_gradient_alone(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.ops import sparse_pool

    made: list[Any] = []
    scatter_of = sparse_pool.scatter_of
    monkeypatch.setattr(sparse_pool, "scatter_of", lambda tables: made.append(tables) or scatter_of(tables))
    rulebook, features = Rulebook.sparse(random_sites(20, 1, [5, 5], 0), 1, [5, 5], 2, 2), torch.randn(20, 3)
    with torch.no_grad():
        expected = pool(features.requires_grad_(), rulebook)
    assert not made
    assert torch.equal(pool(features, rulebook), expected)
    assert len(made) == 1


@pytest.mark.parametrize("sites", [1, 20])
@pytest.mark.parametrize("pool", POOLS)
def test_features_that_do_not_say_that_they_need_a_gradient_get_it(pool: Any, sites: int) -> None:
    """As inside of vmap, and in a graph that was made without one and is trained."""
    size = 1 if sites == 1 else 2
    rulebook = Rulebook.sparse(random_sites(sites, 1, [5, 5], 0), 1, [5, 5], size, size)
    rows = len(rulebook.in_indices)
    features = torch.randn(rows, 3).abs().requires_grad_()
    given = torch.randn(len(rulebook.out_indices), 3)
    (expected,) = torch.autograd.grad((pool(features, rulebook) * given).sum(), features)

    def loss(features: torch.Tensor) -> torch.Tensor:
        return (torch.func.vmap(lambda f: pool(f, rulebook))(features[None]) * given).sum()

    graph = make_fx(lambda f: pool(f, rulebook))(features.detach())
    assert expected.any()
    for found in (loss(features), (graph(features) * given).sum()):
        assert torch.equal(torch.autograd.grad(found, features)[0], expected)
    assert torch.equal(torch.func.grad(loss)(features.detach()), expected)
