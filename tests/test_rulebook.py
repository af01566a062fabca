"""Facts about a rulebook's tables and plans on GPU (in Triton's interpreter where there is none)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import assert_same, run

from triops import Rulebook
from triops.ops.rulebook import plans_gpu, strided_gpu
from triops.ops.rulebook.plans import MASK_BITS, Tiles, offset_order
from triops.ops.rulebook.reference import ranked_bitmap
from triops.ops.rulebook.rulebook import Tables, scatter_of


def random_table(offsets: int, columns: int, rows: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    entries = torch.randint(0, rows, (offsets, columns), generator=g, dtype=torch.int32)
    return torch.where(torch.rand(offsets, columns, generator=g) < 0.4, entries, -1)


def test_offsets_are_ordered_from_the_corners_to_the_centre_of_a_cube() -> None:
    order = offset_order(27)
    assert order[:8] == (0, 2, 6, 8, 18, 20, 24, 26)
    assert order[-1] == 13
    assert sorted(order) == list(range(27))


def test_of_many_offsets_the_nearest_to_the_centre_count() -> None:
    order = offset_order(125)
    assert len(order) == MASK_BITS
    assert order[-1] == 62
    assert {61, 63, 57, 67, 37, 87} <= set(order)


def test_a_number_that_is_no_cube_and_no_square_counts_as_a_line() -> None:
    assert offset_order(5) == (0, 4, 1, 3, 2)
    assert offset_order(1) == (0,)
    assert offset_order(0) == ()


@pytest.mark.parametrize("most_blocks", [1, 256])
def test_rows_of_equal_codes_keep_their_order_however_many_blocks_there_are(
    most_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few offsets make few codes, each shared by rows of all blocks."""
    table = random_table(3, 5000, 700)
    monkeypatch.setattr(plans_gpu, "MOST_BLOCKS", most_blocks)
    assert_same(run("gpu", "row_tiles", (table, 700, 64)), run("reference", "row_tiles", (table, 700, 64)))


def test_rows_of_a_tile_ascend_where_their_offsets_are_the_same() -> None:
    table = torch.full((27, 300), -1, dtype=torch.int32)
    table[13] = torch.arange(300)
    tiles = Tiles.of(run("gpu", "row_tiles", (table, 300, 64)), 27, 300, 64)
    assert tiles.rows.cpu().view(-1)[:300].tolist() == list(range(300))
    assert tiles.counts.tolist() == [1] * 5


def sites_of(count: int, batch_size: int, shape: list[int], seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    columns = [torch.randint(-1, size + 1, (count,), generator=g, dtype=torch.int32) for size in [batch_size, *shape]]
    return torch.stack(columns, 1)


SHAPE = [5, 11, 37]


@pytest.mark.parametrize("capacity", [None, 100, 4000])
@pytest.mark.parametrize("kernel", [[3, 3, 3], [1, 3, 5], [1, 1, 11]])
def test_the_index_of_a_convolutions_outputs_answers_the_look_ups_of_the_next(
    capacity: int | None, kernel: list[int]
) -> None:
    window = [3, 3, 3], [2, 1, 2], [1, 1, 1], [1, 1, 1], [0, 0, 0]
    args = sites_of(300, 2, SHAPE), 2, SHAPE, *window, False
    if capacity is None:
        out, _, _, index = run("gpu", "sparse_neighbors", (*args, None, True, True))
    else:
        out, _, _, _, index = run("gpu", "capped_neighbors", (*args, capacity, None, True, True))
    call = out, 2, [3, 11, 19], kernel, [1, 2, 1]
    assert_same(
        run("gpu", "submanifold_neighbors", (*call, index)), run("reference", "submanifold_neighbors", (*call, None))
    )


@pytest.mark.parametrize(("size", "step"), [(3, 2**31 - 1), (5, 2**31 - 1), (9, 2**30)])
def test_an_index_finds_nothing_beyond_the_grid(size: int, step: int) -> None:
    window = [3, 3, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]
    out, _, _, index = run(
        "gpu", "sparse_neighbors", (sites_of(9, 2, SHAPE), 2, SHAPE, *window, False, None, True, True)
    )
    for axis in range(3):
        kernel, dilation = ([n if a == axis else 1 for a in range(3)] for n in (size, step))
        table = run("gpu", "submanifold_neighbors", (out, 2, SHAPE, kernel, dilation, index))
        assert table[size // 2].tolist() == list(range(len(out)))
        assert (table[torch.arange(size) != size // 2] == -1).all()


@pytest.mark.parametrize("seed", range(3))
def test_an_index_of_other_sites_gives_rows_that_exist(seed: int) -> None:
    sites = sites_of(90, 2, SHAPE)
    words = -(-2 * 5 * 11 * 37 // 32)
    index = torch.randint(-(2**63), 2**63 - 1, (words,), generator=torch.Generator().manual_seed(seed))
    table = run("gpu", "submanifold_neighbors", (sites, 2, SHAPE, [3, 3, 3], [1, 1, 1], index))
    assert table.shape == (27, 90)
    assert table.min() >= -1
    assert table.max() < 90


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """Limits that a test changes hold for plans made from now on, and no longer than the test."""
    strided_gpu.plan.cache_clear()
    yield
    strided_gpu.plan.cache_clear()


@pytest.mark.parametrize("limits", [{}, {"MAX_OWNERS": 1}, {"MAX_BITMAP": 1}], ids=["small", "hashed", "sorted"])
def test_owners_that_the_caller_knows_give_the_same_tables(
    limits: dict[str, int], fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(strided_gpu, name, value)
    sites = sites_of(300, 2, SHAPE)  # some twice, some outside
    sites[sites[:, 0] == 1] = sites[0].clone()
    lists = [3, 3, 3], [2, 1, 2], [1, 1, 1], [1, 1, 1], [0, 0, 0]
    owners = run("gpu", "submanifold_neighbors", (sites, 2, SHAPE, [1, 1, 1], [1, 1, 1], None))[0]
    expected = run("reference", "sparse_neighbors", (sites, 2, SHAPE, *lists, False, None, False, True))
    for known in (owners, None):
        assert_same(run("gpu", "sparse_neighbors", (sites, 2, SHAPE, *lists, False, known, False, True)), expected)


def test_every_operator_of_a_convolution_passes_index_and_owners_on() -> None:
    sites = torch.tensor([[0, 2], [0, 3], [0, 9]], dtype=torch.int32)
    first = Rulebook.submanifold(sites, 1, 16, 3)
    assert first.owners is not None
    assert first.owners.tolist() == [0, 1, 2]
    down = Rulebook.sparse(sites, 1, 16, 3, stride=2, padding=1, owners=first.owners)
    assert down.owners is None
    assert down.out_index is None  # no CPU kernel would read it
    index = ranked_bitmap(down.out_indices, 1, down.out_shape)
    assert index.tolist() == [sum(1 << x for x in down.out_indices[:, 1].tolist())]
    below = Rulebook.submanifold(down.out_indices, 1, down.out_shape, 3, index=index)
    assert torch.equal(below.gather, Rulebook.submanifold(down.out_indices, 1, down.out_shape, 3).gather)


def test_entries_that_are_no_row_are_left_out_of_the_transposed_table() -> None:
    """As while kernels are only compiled: the table then holds whatever lay in its memory."""
    gather = torch.tensor([[1, -1, 3], [2**30, -(2**31), 0]], dtype=torch.int32)
    assert scatter_of(Tables(gather, 3)).tolist() == [[-1, 0, -1], [2, -1, -1]]
