"""Facts about the supplied package `torch_cluster`: neighbours by loops, batches, samples."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import triops.compat.torch_cluster as tc
from triops.compat.torch_cluster import _neighbors

SQUARE = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])


def cloud(count: int, seed: int = 0, lattice: bool = False) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (count, 3), generator=g).float() if lattice else torch.rand(count, 3, generator=g)


def nearest_by_loop(x, y, k):
    """Of equal distances the lower index first."""
    rows = []
    for j, q in enumerate(y):
        ranked = sorted(range(len(x)), key=lambda i: (float((x[i] - q).square().sum()), i))
        rows += [(j, i) for i in ranked[:k]]
    return torch.tensor(rows).t()


@pytest.mark.parametrize("lattice", [False, True])
@pytest.mark.parametrize("k", [1, 5, 60])
def test_nearest_points_are_those_of_a_loop(lattice, k):
    x, y = cloud(40, 0, lattice), cloud(7, 1, lattice)
    assert torch.equal(tc.knn(x, y, k), nearest_by_loop(x, y, k))
    assert torch.equal(tc.knn(x.double(), y.double(), k), nearest_by_loop(x.double(), y.double(), k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_fourth_axis_of_zeros_changes_nothing(axes, dtype):
    """Up to three are searched by `triops.knn`, more by all distances."""
    x, y = (cloud(n, n, lattice)[:, :axes].to(dtype) for n, lattice in ((90, True), (30, False)))
    x[3] = torch.nan
    wide = (torch.cat([t, t.new_zeros(len(t), 4 - axes)], 1) for t in (x, y))
    assert torch.equal(tc.knn(x, y, 100), tc.knn(*wide, 100))


def test_work_in_parts_changes_nothing(monkeypatch):
    x, y = torch.nn.functional.pad(cloud(40, 0, True), (0, 1)), torch.nn.functional.pad(cloud(17, 1, True), (0, 1))
    whole = tc.knn(x, y, 5), tc.radius(x, y, 1.5)
    monkeypatch.setattr(_neighbors, "DISTANCES", 100)
    assert torch.equal(tc.knn(x, y, 5), whole[0])
    assert torch.equal(tc.radius(x, y, 1.5), whole[1])


def test_neighbours_are_looked_for_within_the_same_element():
    x, y = torch.tensor([[0.0], [1.0], [0.1], [5.0]]), torch.tensor([[0.0], [0.0], [9.0]])
    pairs = tc.knn(x, y, 1, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1]))
    assert pairs.tolist() == [[0, 1, 2], [0, 2, 3]]
    assert tc.radius(x, y, 0.5, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1])).tolist() == [[0, 1], [0, 2]]
    with pytest.raises(ValueError, match="batch_x must ascend"):
        tc.knn(x, y, 1, torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="batch_y must have 3 entries, got 2"):
        tc.knn(x, y, 1, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1]))


def test_a_radius_is_exclusive_and_the_lowest_indices_are_kept():
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    assert tc.radius(x, torch.tensor([[1.0]]), 1.0).tolist() == [[0], [1]]
    assert tc.radius(x, torch.tensor([[1.0]]), 1.001).tolist() == [[0, 0, 0], [0, 1, 2]]
    assert tc.radius(x, torch.tensor([[1.0]]), 5.0, max_num_neighbors=2).tolist() == [[0, 0], [0, 1]]


def test_graphs_lead_from_neighbours_to_points():
    assert tc.knn_graph(SQUARE, 2).tolist() == [[1, 2, 0, 3, 0, 3, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3]]
    assert tc.knn_graph(SQUARE, 1, loop=True).tolist() == [[0, 1, 2, 3]] * 2
    forth, back = (tc.radius_graph(SQUARE, 2.5, flow=flow) for flow in ("source_to_target", "target_to_source"))
    assert torch.equal(forth, back.flip(0))
    assert forth.shape == (2, 8)
    batch = torch.tensor([0, 0, 1, 1])
    assert tc.radius_graph(SQUARE, 2.5, batch).tolist() == [[1, 0, 3, 2], [0, 1, 2, 3]]
    with pytest.raises(ValueError, match="flow must be"):
        tc.knn_graph(SQUARE, 2, flow="up")


def test_cosine_looks_at_directions():
    x = torch.tensor([[10.0, 0.0], [0.0, 0.1]])
    assert tc.knn(x, torch.tensor([[0.1, 0.9]]), 1, cosine=True).tolist() == [[0], [1]]


def test_points_that_are_not_finite_are_nobodys_neighbours():
    x = torch.tensor([[float("nan")], [0.0], [float("inf")]])
    assert tc.knn(x, torch.tensor([[1.0]]), 3).tolist() == [[0], [1]]
    assert tc.radius(x, torch.tensor([[1.0]]), 1e9).tolist() == [[0], [1]]


def test_samples_are_as_far_apart_as_can_be():
    line = torch.tensor([0.0, 1.0, 5.0, 2.0, 9.0])
    assert tc.fps(line, ratio=1.0, random_start=False).tolist() == [0, 4, 2, 3, 1]
    two = torch.cat([line, line + 100])
    batch = torch.arange(2).repeat_interleave(5)
    assert tc.fps(two, batch, 0.4, random_start=False).tolist() == [0, 4, 5, 9]
    assert tc.fps(two, ptr=[0, 5, 10], ratio=torch.tensor([0.2, 0.6]), random_start=False).tolist() == [0, 5, 9, 7]
    torch.manual_seed(0)
    assert sorted(tc.fps(line, ratio=1.0).tolist()) == [0, 1, 2, 3, 4]


def test_uneven_elements_are_sampled_by_their_own_length():
    src = torch.tensor([0.0, 3.0, 0.0, 1.0, 7.0, 2.0])
    assert tc.fps(src, torch.tensor([0, 0, 1, 1, 1, 1]), 0.75, random_start=False).tolist() == [0, 1, 2, 4, 5]
    assert tc.fps(src[:1], random_start=True).tolist() == [0]
    assert tc.fps(src[:0]).shape == (0,)


def test_equal_points_are_not_sampled_twice_before_others():
    assert tc.fps(torch.zeros(4), ratio=1.0, random_start=False)[0] == 0
    assert sorted(tc.fps(torch.tensor([0.0, 0.0, 4.0]), ratio=0.6, random_start=False).tolist()) == [0, 2]


def test_cells_of_a_grid_count_from_the_lowest_coordinates():
    pos = torch.tensor([[0.0, 0.0], [11.0, 9.0], [2.0, 8.0], [2.0, 2.0], [8.0, 3.0]])
    size = torch.tensor([5.0, 5.0])
    assert tc.grid_cluster(pos, size).tolist() == [0, 5, 3, 0, 1]
    assert tc.grid_cluster(pos[:0], size).shape == (0,)
    assert tc.grid_cluster(pos, size, torch.tensor([-5.0, 0.0]), torch.tensor([14.0, 9.0])).tolist() == [1, 7, 5, 1, 2]


def test_the_nearest_row_of_the_same_element():
    assert tc.nearest(SQUARE, torch.tensor([[-1.0, 0.0], [1.0, 0.0]])).tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="same elements"):
        tc.nearest(SQUARE, SQUARE, torch.tensor([0, 0, 1, 1]), torch.zeros(4, dtype=torch.int64))


def test_what_is_missing_raises_by_name():
    for name in ("graclus_cluster", "random_walk", "neighbor_sampler"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(tc, name)(SQUARE)


# torch_geometric from 2.8 on, in miniature: its flags are False where it finds no pyg-lib
TYPING = """
WITH_PYG_LIB = WITH_GRID_CLUSTER = WITH_FPS = WITH_KNN = WITH_RADIUS = WITH_NEAREST = WITH_GRACLUS = {found}
"""
ASK = """
import torch
{imports}
import torch_geometric.typing as typing

x, y = torch.tensor([0.0, 1.0, 5.0, 6.0]), torch.tensor([0.9, 5.2])
ptr_x, ptr_y = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 2])
{lines}
"""


def with_torch_geometric(folder, imports, *lines, found=False):
    """What a fresh program prints."""
    (folder / "torch_geometric").mkdir()
    (folder / "torch_geometric" / "__init__.py").touch()
    (folder / "torch_geometric" / "typing.py").write_text(TYPING.format(found=found))
    code = ASK.format(imports=imports, lines="\n".join(f"print({line})" for line in lines))
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_geometric_without_pyg_lib_gets_its_operators(tmp_path):
    imports = "import triops.compat.torch_cluster"
    assert with_torch_geometric(
        tmp_path, imports,
        "typing.WITH_GRID_CLUSTER, typing.WITH_PYG_LIB, typing.WITH_GRACLUS",
        "torch.ops.pyg.grid_cluster(x[:, None], torch.tensor([2.0])).tolist()",
        "torch.ops.pyg.grid_cluster(x[:, None], torch.tensor([2.0]), torch.tensor([-1.0]), None).tolist()",
        "torch.ops.pyg.fps(x, ptr_x, 0.5, False).tolist()",
        "torch.ops.pyg.knn(x, y, ptr_x, ptr_y, 2, False, 1).tolist()",
        "torch.ops.pyg.knn(x, y, None, None, 1, False, 1).tolist()",
        "torch.ops.pyg.radius(x, y, ptr_x, ptr_y, 0.5, 32, 1, False).tolist()",
        "torch.ops.pyg.radius(x, x, None, None, 1.5, 32, 1, True).tolist()",
        "torch.ops.pyg.nearest(x, y, ptr_x, ptr_y).tolist()",
    ) == [
        "True False False",
        "[0, 0, 2, 3]",
        "[0, 1, 3, 3]",
        "[0, 2]",
        "[[0, 0, 1, 1], [1, 0, 2, 3]]",
        "[[0, 1], [1, 2]]",
        "[[0, 1], [1, 2]]",
        "[[0, 1, 2, 3], [1, 0, 3, 2]]",
        "[0, 0, 1, 1]",
    ]  # fmt: skip


@pytest.mark.parametrize(("imports", "found"), [("", False), ("import triops.compat.torch_cluster", True)])
def test_torch_geometric_is_left_alone_when_nobody_asked_or_pyg_lib_is_there(tmp_path, imports, found):
    lines = "typing.WITH_GRID_CLUSTER", "hasattr(torch.ops.pyg, 'grid_cluster')"
    assert with_torch_geometric(tmp_path, imports, *lines, found=found) == [str(found), "False"]
