"""Facts about site_neighbors, by hand and against the tables of convolutions, and about rulebooks made of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from triops import Rulebook, site_neighbors, sparse_avg_pool, sparse_conv, sparse_max_pool


def random_sites(count: int, span: int, axes: int = 3, batches: int = 2, seed: int = 0) -> Tensor:
    """Sites of positions from -span to span, some equal, some of a negative batch."""
    g = torch.Generator().manual_seed(seed)
    batch = torch.randint(-1, batches, (count, 1), generator=g)
    return torch.cat((batch, torch.randint(-span, span + 1, (count, axes), generator=g)), 1)


def cube(axes: int, reach: int = 1) -> Tensor:
    return torch.tensor(list(itertools.product(range(-reach, reach + 1), repeat=axes)))


def pairs_by_search(indices: Tensor, centers: Tensor, offsets: Tensor) -> list[tuple[int, int, int]]:
    """(offset, center, row) of a rulebook: of equal sites and of equal centers the lowest row counts."""
    lowest: dict[tuple[int, ...], int] = {}
    for row, site in enumerate(indices.tolist()):
        if site[0] >= 0:
            lowest.setdefault(tuple(site), row)
    pairs, seen = [], set()
    for a, (batch, *position) in enumerate(centers.tolist()):
        if (batch, *position) in seen:
            continue
        seen.add((batch, *position))
        for k, offset in enumerate(offsets.tolist()):
            site = batch, *(p + o for p, o in zip(position, offset, strict=True))
            if batch >= 0 and site in lowest:
                pairs.append((k, a, lowest[site]))
    return pairs


def convolved(features: Tensor, weight: Tensor, pairs: list[tuple[int, int, int]], outputs: int) -> Tensor:
    """weight [Cout, K, Cin]: gather, multiply, add up, in plain torch."""
    k, a, row = torch.tensor(pairs).view(-1, 3).unbind(1)
    products = torch.einsum("pc,pdc->pd", features[row], weight[:, k].movedim(1, 0))
    return features.new_zeros(outputs, weight.shape[0]).index_add(0, a, products)


def book_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return random_sites(60, 2, seed=seed), random_sites(40, 3, seed=seed + 1), cube(3)


def test_a_rulebook_between_given_sites_convolves_as_plain_torch_does() -> None:
    indices, centers, offsets = book_case()
    pairs = pairs_by_search(indices, centers, offsets)
    assert len(pairs) > 50
    g = torch.Generator().manual_seed(0)
    features = torch.randn(60, 5, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 27, 5, generator=g, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(40, 4, generator=g, dtype=torch.float64)
    got = sparse_conv(features, weight, Rulebook.between(indices, centers, offsets))
    expected = convolved(features, weight, pairs, 40)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, (features, weight), grad), torch.autograd.grad(expected, (features, weight), grad)
    )


def test_its_inverse_leads_back() -> None:
    indices, centers, offsets = book_case(2)
    back = [(k, row, a) for k, a, row in pairs_by_search(indices, centers, offsets)]
    g = torch.Generator().manual_seed(0)
    features = torch.randn(40, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, 3, generator=g, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(60, 4, generator=g, dtype=torch.float64)
    book = Rulebook.between(indices, centers, offsets, kernel_size=3).inverse()
    assert book.out_indices is indices
    got = sparse_conv(features, weight, book)
    expected = convolved(features, weight.flatten(1, 3), back, 60)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, (features, weight), grad), torch.autograd.grad(expected, (features, weight), grad)
    )


def test_pools_over_it_are_those_of_plain_torch() -> None:
    indices, centers, offsets = book_case(4)
    book = Rulebook.between(indices, centers, offsets)
    _, a, row = torch.tensor(pairs_by_search(indices, centers, offsets)).unbind(1)
    features = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    index = a[:, None].expand(-1, 3)
    for pool, reduction in ((sparse_max_pool, "amax"), (sparse_avg_pool, "mean")):
        expected = features.new_zeros(40, 3).scatter_reduce(0, index, features[row], reduction, include_self=False)
        got = pool(features, book)
        torch.testing.assert_close(got, expected)
        grads = [torch.autograd.grad((out * out).sum(), features)[0] for out in (got, expected)]
        torch.testing.assert_close(*grads)


def test_a_rulebook_between_sites_is_in_no_grid() -> None:
    sites = torch.tensor([[0, -2], [0, 3]])
    book = Rulebook.between(sites, sites[:1], torch.tensor([[0], [5]]))
    assert (book.in_shape, book.out_shape, book.batch_size, book.kernel_size) == ([], [], 0, [2])
    assert book.gather.tolist() == [[0], [1]]
    assert book.scatter.tolist() == [[0, -1], [-1, 0]]
    assert repr(book) == "<sparse rulebook, kernel [2], 2 sites -> 1>"


@pytest.mark.parametrize("kernel_size", [3, [2, 2], [-1, -2]])
def test_its_kernel_size_must_fit_its_offsets(kernel_size: Any) -> None:
    sites = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="kernel_size must have as many places as there are offsets, 2"):
        Rulebook.between(sites, sites, torch.zeros(2, 2, dtype=torch.int32), kernel_size)


def test_of_equal_centers_the_lowest_meets_what_is_there() -> None:
    sites, centers = torch.tensor([[0, 4]]), torch.tensor([[0, 4], [0, 4]])
    zero = torch.tensor([[0]])
    assert site_neighbors(sites, centers, zero).tolist() == [[0, 0]]
    assert Rulebook.between(sites, centers, zero).gather.tolist() == [[0, -1]]
    assert Rulebook.between(sites, centers[:1], zero, distinct=True).gather.tolist() == [[0]]
