"""Facts about site_neighbors, by hand and against the tables of convolutions, and about rulebooks made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import GPU, assert_same, run
from torch import Tensor

from triops import Rulebook, site_neighbors, sparse_avg_pool, sparse_conv, sparse_max_pool
from triops.ops.rulebook import sparse_neighbors, submanifold_neighbors
from triops.ops.site_neighbors.samples import cube, random_sites

BACKENDS = ["reference", "cpu", "gpu"]


def found(
    backend: str, sites: list[list[int]], centers: list[list[int]], offsets: list[list[int]], dtype: Any = torch.int64
) -> Any:
    args = (torch.tensor(rows, dtype=dtype) for rows in (sites, centers, offsets))
    return run(backend, "site_neighbors", tuple(args)).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_for_each_offset_and_a_column_for_each_center(backend: str) -> None:
    sites = [[0, -4, 5], [0, -3, 5], [1, -4, 5]]
    assert found(backend, sites, [[0, -4, 4], [1, -4, 4], [2, -4, 4]], [[0, 1], [1, 1]]) == [[0, 2, -1], [1, -1, -1]]
    assert found(backend, sites, sites, [[0, 0], [-1, 0], [0, 0]]) == [[0, 1, 2], [-1, 0, -1], [0, 1, 2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_sites_the_lowest_row_is_found_from_each_of_equal_centers(backend: str) -> None:
    assert found(backend, [[-1, 7], [0, 7], [0, 7]], [[0, 5], [0, 5]], [[2]]) == [[1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_negative_batch_are_no_sites_and_find_none(backend: str) -> None:
    assert found(backend, [[-1, 0], [-1, 1]], [[-1, 0], [0, 0]], [[0], [1]]) == [[-1, -1], [-1, -1]]
    assert found(backend, [[-1, 0], [0, 1]], [[-1, 0], [0, 0]], [[0], [1]]) == [[-1, -1], [-1, 1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_do_not_wrap_around(backend: str, dtype: torch.dtype) -> None:
    end = torch.iinfo(dtype)
    sites = [[0, end.min, 0], [0, end.max, 0], [0, 0, end.min], [0, -1, end.max], [end.max, end.max, 1]]
    steps = [[1, 0], [-1, 0], [0, 1], [0, -1], [0, 0], [end.min, 0], [end.max, 0]]
    table = found(backend, sites, sites, steps, dtype)
    assert table[:4] == [[-1] * 5] * 4
    assert table[4] == [0, 1, 2, 3, 4]
    assert table[5:] == [[-1] * 5, [-1] * 5]
    assert found(backend, sites, [[0, -1, 0], [0, 0, 0]], [[end.min, 0], [end.max, 0]], dtype) == [[-1, 0], [-1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_line_of_sites_does_not_lead_into_the_next(backend: str) -> None:
    """Behind the end of a line in a box around the sites lies nothing, and not the begin of the next line."""
    sites = [[b, y, x] for b in range(2) for y in range(3) for x in range(3)]
    table = found(backend, sites, sites, [[0, 1], [0, 3], [1, 0], [3, 0], [0, -9], [-1, 2]])
    expected = [
        [sites.index([b, y + dy, x + dx]) if [b, y + dy, x + dx] in sites else -1 for b, y, x in sites]
        for dy, dx in ([0, 1], [0, 3], [1, 0], [3, 0], [0, -9], [-1, 2])
    ]
    assert table == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", [[3, 3, 3], [1, 3, 5]])
def test_it_is_the_table_of_a_submanifold_convolution(backend: str, kernel: list[int]) -> None:
    sites = random_sites(300, 0, 6, outside=True)
    expected = submanifold_neighbors(sites, 2, [7, 7, 7], kernel, [1, 2, 1])
    offsets = torch.cartesian_prod(*(torch.arange(k) - k // 2 for k in kernel)) * torch.tensor([1, 2, 1])
    distinct = torch.arange(300) == expected[len(expected) // 2]  # it has rows for the lowest of equal sites alone
    table = run(backend, "site_neighbors", (sites, sites, offsets)).cpu()
    assert torch.equal(table[:, distinct], expected[:, distinct])
    assert torch.equal(Rulebook.between(sites, sites, offsets).gather, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "padding"), [(2, 0), (3, 1)])
def test_it_is_the_tables_of_a_convolution_with_a_stride(backend: str, size: int, padding: int) -> None:
    sites = random_sites(200, 0, 9, outside=True).int()
    coarse, inputs, outputs = sparse_neighbors(sites, 2, [10, 10, 10], size, stride=2, padding=padding)
    offsets = torch.cartesian_prod(*(torch.arange(size),) * 3).int()
    first = torch.cat((coarse[:, :1], coarse[:, 1:] * 2 - padding), 1)
    assert torch.equal(run(backend, "site_neighbors", (sites, first, offsets)).cpu(), inputs)
    assert torch.equal(Rulebook.between(sites, first, offsets, distinct=True).scatter, outputs)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_moved_sites_and_centers_have_the_same_table(data: Any) -> None:
    """Out of the corner of int64, where flat indices do not fit, and back."""
    axes, span = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    sites = random_sites(data.draw(st.integers(0, 60)), -span, span, axes, outside=True)
    centers = random_sites(data.draw(st.integers(0, 60)), -span - 1, span + 1, axes, outside=True, seed=1)
    offsets = torch.randint(-2, 3, (data.draw(st.integers(0, 9)), axes), generator=torch.Generator().manual_seed(0))
    table = run("reference", "site_neighbors", (sites, centers, offsets))
    moves = data.draw(st.lists(st.integers(-(2**63) + 9, 2**63 - 9), min_size=axes, max_size=axes))
    moved = (rows + torch.tensor([0, *moves]) for rows in (sites, centers))
    for args in ((sites, centers, offsets), (*moved, offsets)):
        assert_same(run("cpu", "site_neighbors", args), table)
    far = torch.tensor([[0, *moves]])
    with_far = torch.cat((sites, far)), centers, offsets
    assert_same(run("cpu", "site_neighbors", with_far), run("reference", "site_neighbors", with_far))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("hashed", [False, True])
def test_every_number_of_threads_gives_the_same_table(
    threads: int, hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more centers than one block, in order and not, and more sites than a sweep steps over one by one."""
    from triops.ops.site_neighbors import cpu

    if hashed:
        monkeypatch.setattr(cpu, "_grid", lambda *_: None)
    sites = random_sites(30_000, -25, 25)
    ascending = sites.unique(dim=0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for args in (
            (sites, ascending, cube(3)),
            (ascending, ascending, cube(3)[:5]),
            (ascending, sites[:40], cube(3)),
        ):
            assert_same(run("cpu", "site_neighbors", args), run("reference", "site_neighbors", args))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(GPU != "cpu", reason="replaces a function of the kernels, which a GPU has compiled")
def test_sites_of_one_hash_are_told_apart_by_their_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.ops.site_neighbors import gpu

    monkeypatch.setattr(gpu, "_mixed", lambda hashed, value: hashed)
    sites = random_sites(40, -2, 2, 2, outside=True)
    args = sites, random_sites(30, -3, 3, 2, seed=1), cube(2)
    assert_same(run("gpu", "site_neighbors", args), run("reference", "site_neighbors", args))


def test_as_many_offsets_as_a_kernel_may_have() -> None:
    sites, offsets = random_sites(500, -9, 9), cube(3, tuple(range(-8, 8)))
    assert len(offsets) == 4096
    args = sites, sites[:3], offsets
    assert_same(run("cpu", "site_neighbors", args), run("reference", "site_neighbors", args))


def test_the_table_is_traced_with_any_number_of_sites() -> None:
    compiled = torch.compile(
        lambda *args: Rulebook.between(*args).gather, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for count in (20, 31):
        args = random_sites(count, -2, 2), random_sites(count + 3, -2, 2, seed=1), cube(3)
        assert torch.equal(compiled(*args), Rulebook.between(*args).gather)


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
    return (
        random_sites(60, -2, 2, outside=True, seed=seed),
        random_sites(40, -3, 3, outside=True, seed=seed + 1),
        cube(3),
    )


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
