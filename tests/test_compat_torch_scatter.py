"""Facts about the supplied package `torch_scatter`: reductions by loops, gradients, `out=`, and who wins."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import triops.compat.torch_scatter as ts
from triops.compat import _finder, _startup

SRC = torch.tensor([[2.0, -1.0], [5.0, 4.0], [2.0, 7.0], [-3.0, 0.0], [5.0, 4.0]])
INDEX = torch.tensor([1, 0, 1, 3, 0])
POINTERS = torch.tensor([0, 2, 2, 5])
FUNCTIONS = {
    "sum": lambda rows: sum(rows),
    "mul": lambda rows: torch.stack(rows).prod(0),
    "mean": lambda rows: sum(rows) / len(rows),
    "min": lambda rows: torch.stack(rows).min(0).values,
    "max": lambda rows: torch.stack(rows).max(0).values,
}


def by_loop(reduce: str, size: int) -> torch.Tensor:
    empty = torch.full((2,), 1.0 if reduce == "mul" else 0.0)
    rows = [[row for row, i in zip(SRC, INDEX.tolist(), strict=True) if i == n] for n in range(size)]
    return torch.stack([FUNCTIONS[reduce](group) if group else empty for group in rows])


@pytest.mark.parametrize("reduce", FUNCTIONS)
@pytest.mark.parametrize("size", [None, 6])
def test_reductions_are_those_of_a_loop(reduce, size):
    expected = by_loop(reduce, 4 if size is None else size)
    assert torch.equal(ts.scatter(SRC, INDEX, dim=0, dim_size=size, reduce=reduce), expected)
    across = ts.scatter(SRC.t().contiguous(), INDEX, dim=-1, dim_size=size, reduce=reduce)
    assert torch.equal(across, expected.t())
    full = INDEX[:, None].expand(-1, 2).contiguous()
    assert torch.equal(ts.scatter(SRC, full, dim=0, dim_size=size, reduce=reduce), expected)


def test_an_index_per_element_may_differ_from_column_to_column():
    index = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [1, 1]])
    assert ts.scatter_sum(SRC, index, dim=0).tolist() == [[4, 7], [7, 7]]
    values, places = ts.scatter_max(SRC, index, dim=0)
    assert values.tolist() == [[2, 7], [5, 4]]
    assert places.tolist() == [[0, 2], [1, 1]], "the first of equals"


def test_an_index_without_elements_points_behind_the_last():
    values, places = ts.scatter_min(SRC, INDEX, dim=0)
    assert values[2].tolist() == [0, 0]
    assert places[2].tolist() == [5, 5]
    assert places[0].tolist() == [1, 1]


def test_out_is_written_to_and_takes_part():
    out = torch.ones(4, 2)
    assert ts.scatter_sum(SRC, INDEX, dim=0, out=out) is out
    assert torch.equal(out, 1 + by_loop("sum", 4))
    out = torch.full((4, 2), 4.0)
    values, places = ts.scatter_max(SRC, INDEX, dim=0, out=out)
    assert values is out
    assert out.tolist() == [[5, 4], [4, 7], [4, 4], [4, 4]]
    assert places.tolist() == [[1, 5], [5, 2], [5, 5], [5, 5]], "what stays in out has no place"
    out = torch.full((4, 2), 2.0)
    assert torch.equal(ts.scatter_mul(SRC, INDEX, dim=0, out=out), 2 * by_loop("mul", 4))


def test_integers_are_reduced_too():
    src = torch.tensor([7, -2, 4, 4])
    index = torch.tensor([0, 0, 2, 2])
    assert ts.scatter_mean(src, index).tolist() == [2, 0, 4]
    assert ts.scatter_max(src, index)[0].tolist() == [7, 0, 4]
    assert ts.segment_csr(src, torch.tensor([0, 2, 2, 4]), reduce="sum").tolist() == [5, 0, 8]
    assert ts.segment_csr(src, torch.tensor([0, 2, 2, 4]), reduce="mean").tolist() == [2, 0, 4]


@pytest.mark.parametrize("reduce", FUNCTIONS)
def test_gradients_of_scatter(reduce):
    src = (torch.randperm(12).double() / 7 + 0.3).view(6, 2).requires_grad_()
    index = torch.tensor([1, 0, 1, 3, 0, 1])
    assert torch.autograd.gradcheck(lambda s: ts.scatter(s, index, dim=0, reduce=reduce), (src,))


@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("form", ["csr", "coo"])
def test_gradients_of_segments(reduce, form):
    src = (torch.randperm(12).double() / 7 + 0.3).view(6, 2).requires_grad_()
    if form == "csr":
        assert torch.autograd.gradcheck(lambda s: ts.segment_csr(s, torch.tensor([0, 2, 2, 6]), reduce=reduce), (src,))
    else:
        index = torch.tensor([0, 0, 1, 1, 1, 4])
        assert torch.autograd.gradcheck(lambda s: ts.segment_coo(s, index, reduce=reduce), (src,))


def test_of_equal_maxima_the_first_gets_the_gradient():
    src = torch.zeros(4, requires_grad=True)
    ts.segment_csr(src, torch.tensor([0, 3, 4]), reduce="max").sum().backward()
    assert src.grad.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max"])
def test_segments_by_pointers_and_by_a_sorted_index_are_the_same(reduce):
    got = ts.segment_csr(SRC, POINTERS, reduce=reduce)
    index = torch.tensor([0, 0, 2, 2, 2])
    torch.testing.assert_close(got, ts.segment_coo(SRC, index, reduce=reduce))
    torch.testing.assert_close(got, ts.scatter(SRC, index, dim=0, reduce=reduce))
    out = torch.full((3, 2), 9.0)
    assert ts.segment_csr(SRC, POINTERS, out, reduce) is out
    assert torch.equal(out, got), "what out held is gone"


def test_pointers_may_leave_elements_out_and_differ_from_row_to_row():
    assert ts.segment_csr(SRC[:, 0], torch.tensor([1, 2, 4]), reduce="sum").tolist() == [5, -1]
    both = torch.stack([SRC[:, 0], SRC[:, 1]])
    pointers = torch.tensor([[0, 1, 5], [2, 2, 4]])
    assert ts.segment_csr(both, pointers, reduce="sum").tolist() == [[2, 9], [0, 7]]
    assert ts.segment_csr(both, torch.tensor([[0, 1, 5]]), reduce="max").tolist() == [[2, 5], [-1, 7]]


def test_halves_are_summed_in_float32():
    ones = torch.ones(5000, 1, dtype=torch.float16)
    assert ts.segment_csr(ones, torch.tensor([0, 5000]), reduce="sum").item() == 5000


def test_gathering_undoes_a_segmentation():
    means = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    spread = ts.gather_csr(means, POINTERS)
    assert spread.flatten().tolist() == [1, 1, 3, 3, 3]
    spread.sum().backward()
    assert means.grad.flatten().tolist() == [2, 0, 3]
    assert ts.gather_coo(means, torch.tensor([0, 0, 2])).flatten().tolist() == [1, 1, 3]


def test_softmax_by_index_is_softmax_of_each_group():
    torch.manual_seed(0)
    src, index = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 2, 2, 0, 2, 1, 2])
    soft = ts.scatter_softmax(src, index, dim=0)
    for group in range(3):
        torch.testing.assert_close(soft[index == group], src[index == group].softmax(0))
    torch.testing.assert_close(ts.scatter_log_softmax(src, index, dim=0), soft.log())
    torch.testing.assert_close(ts.scatter_logsumexp(src, index, dim=0)[2], src[index == 2].logsumexp(0))
    assert torch.autograd.gradcheck(lambda s: ts.scatter_softmax(s, index, dim=0), (src,))
    spread = ts.scatter_std(src, index, dim=0)
    torch.testing.assert_close(spread[2], src[index == 2].std(0), rtol=1e-5, atol=1e-6)


def test_nothing_gives_nothing():
    assert ts.scatter_sum(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), dim=0).shape == (0, 3)
    assert (
        ts.scatter_max(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), dim=0, dim_size=2)[1].tolist()
        == [[0, 0, 0]] * 2
    )
    assert ts.segment_csr(torch.zeros(0, 3), torch.zeros(1, dtype=torch.int64)).shape == (0, 3)


def test_an_unknown_reduction_is_refused_by_name():
    for function, where in ((ts.scatter, INDEX), (ts.segment_csr, POINTERS), (ts.segment_coo, INDEX.sort().values)):
        with pytest.raises(ValueError, match=r"reduce must be .* got 'median'"):
            function(SRC, where, reduce="median")


@pytest.mark.parametrize("name", ["torch_scatter", "torch_cluster", "torchsparse", "MinkowskiEngine"])
def test_the_package_is_supplied_only_where_nothing_else_does(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    _finder.uninstall()
    for loaded in [n for n in sys.modules if n.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    _finder.install(name)
    supplied = importlib.import_module(name)
    assert repr(supplied) == f"<module '{name}' (triops)>"
    assert supplied.__version__
    assert f"{name}: of triops" in _startup.status()
    del sys.modules[name]
    (tmp_path / f"{name}.py").write_text("__version__ = 'real'")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module(name).__version__ == "real"
    assert any(line.startswith(f"{name}: {name}'s own") for line in _startup.status())
    del sys.modules[name]
