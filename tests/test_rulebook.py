"""Facts about a rulebook's tables and plans on GPU (in Triton's interpreter where there is none)."""

from __future__ import annotations

import pytest
import torch
from support import assert_same, run

from triops.ops.rulebook import plans_gpu
from triops.ops.rulebook.plans import MASK_BITS, Tiles, offset_order


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
