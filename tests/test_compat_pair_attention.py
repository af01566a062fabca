"""Facts about `pointops2_cuda` of Stratified Transformer and `sptr_cuda` of SphereFormer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triops.compat import _pair_attention, pointops

POINTOPS2, SPTR = pointops.extension("pointops2_cuda"), pointops.extension("sptr_cuda")
N, HEADS, CHANNELS, LENGTH = 7, 2, 4, 5


@pytest.fixture(params=[2**24, 3 * HEADS * CHANNELS], ids=["at once", "in parts"])
def operands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Pairs of points in windows of 3, 1 and 3, as SphereFormer has them, which suit all functions."""
    monkeypatch.setattr(_pair_attention, "AT_ONCE", request.param)
    g = torch.Generator().manual_seed(0)
    counts = torch.tensor([3, 1, 3], dtype=torch.int32)
    offsets, squares = (torch.cat([c.new_zeros(1), c.cumsum(0)]).int() for c in (counts, counts**2))
    pairs = int(squares[-1])
    found = [torch.zeros(size, dtype=torch.int32) for size in (N, N, pairs, pairs)]
    SPTR.precompute_all_cuda(N, 3, 3, counts, offsets, squares, *found)
    assert found[2].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]
    assert found[3].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]
    assert found[0].tolist() == [0, 3, 6, 9, 10, 13, 16]
    assert found[1].tolist() == [0, 1, 2, 9, 10, 11, 12]
    rows = {name: torch.randn(N, HEADS, CHANNELS, generator=g).double() for name in "qkv"}
    tables = {name: torch.randn(LENGTH, 3, HEADS, CHANNELS, generator=g).double() for name in ("tq", "tk")}
    weights = torch.randn(pairs, HEADS, generator=g).double()
    return rows | tables | {
        "attn": weights, "first": torch.cat([found[0], squares[-1:]]), "last": found[1], "i": found[2], "j": found[3],
        "rel": torch.randint(0, LENGTH, (pairs, 3), generator=g).int(), "pairs": pairs,
    }  # fmt: skip


def row(table: Tensor, rel: Tensor, m: int) -> Tensor:
    return sum(table[int(rel[m, axis]), axis] for axis in range(3))


def plain_scores(o: dict[str, Any], parts: str) -> Tensor:
    """[M, h], pair by pair: "a" query times key, "q" query times table, "k" key times table."""
    result = []
    for m, (i, j) in enumerate(zip(o["i"].tolist(), o["j"].tolist(), strict=True)):
        total = torch.zeros(HEADS, dtype=torch.float64)
        total = total + ((o["q"][i] * o["k"][j]).sum(-1) if "a" in parts else 0)
        total = total + ((o["q"][i] * row(o["tq"], o["rel"], m)).sum(-1) if "q" in parts else 0)
        total = total + ((o["k"][j] * row(o["tk"], o["rel"], m)).sum(-1) if "k" in parts else 0)
        result.append(total)
    return torch.stack(result)


def plain_sums(o: dict[str, Any], with_table: bool) -> Tensor:
    """[N, h, d]"""
    result = [torch.zeros(HEADS, CHANNELS, dtype=torch.float64) for _ in range(N)]
    for m, (i, j) in enumerate(zip(o["i"].tolist(), o["j"].tolist(), strict=True)):
        value = o["v"][j] + (row(o["tk"], o["rel"], m) if with_table else 0)
        result[i] = result[i] + o["attn"][m][:, None] * value
    return torch.stack(result)


def with_gradients(function: Any, o: dict[str, Any], names: list[str]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The function's value, a gradient of it, and those of the operands."""
    leaves = o | {name: o[name].clone().requires_grad_() for name in names}
    value = function(leaves)
    grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).double()
    grads = torch.autograd.grad(value, [leaves[name] for name in names], grad)
    return value.detach(), grad, dict(zip(names, grads, strict=True))


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad)


def last(table: Tensor) -> Tensor:
    """As pointops2 has it: [L, h, d, 3]."""
    return table.permute(0, 2, 3, 1).contiguous()


def zeros(o: dict[str, Any], *names: str) -> dict[str, Tensor]:
    return {name: torch.zeros_like(o[name]) for name in names}


def test_pointops2_scores_pairs(operands: dict[str, Any]) -> None:
    o, sizes = operands, (N, operands["pairs"], HEADS, HEADS * CHANNELS)
    expected, grad, wanted = with_gradients(lambda o: plain_scores(o, "a"), o, ["q", "k"])
    for version, extra, index in (("", (), "i"), ("_v2", (3,), "first")):
        out = torch.zeros_like(expected)
        forward = getattr(POINTOPS2, f"attention_step1_forward_cuda{version}")
        if version:
            forward(*sizes, *extra, o["q"], o["k"], o[index], o["j"], out)
        else:
            forward(*sizes, o["q"], o["k"], o[index], o["j"], out)
        torch.testing.assert_close(out, expected)
        found = zeros(o, "q", "k")
        backward = getattr(POINTOPS2, f"attention_step1_backward_cuda{version}")
        backward(*sizes, *extra, grad, o[index], o["j"], o["q"], o["k"], *found.values())
        check(found, wanted)


def test_pointops2_scores_pairs_by_tables(operands: dict[str, Any]) -> None:
    o, sizes = operands, (N, operands["pairs"], HEADS, CHANNELS)
    tables = last(o["tq"]), last(o["tk"])
    expected, grad, wanted = with_gradients(lambda o: plain_scores(o, "q"), o, ["q", "tq"])
    out, found = torch.zeros_like(expected), zeros(o, "q") | {"tq": torch.zeros_like(tables[0])}
    POINTOPS2.dot_prod_with_idx_forward_cuda(*sizes, o["q"], o["i"], tables[0], o["rel"], out)
    torch.testing.assert_close(out, expected)
    inputs = o["q"], o["i"], tables[0], o["rel"]
    POINTOPS2.dot_prod_with_idx_backward_cuda(*sizes, grad, *inputs, *found.values())
    check(found, wanted | {"tq": last(wanted["tq"])})

    names = ["q", "k", "tq", "tk"]
    expected, grad, wanted = with_gradients(lambda o: plain_scores(o, "qk"), o, names)
    wanted |= {name: last(wanted[name]) for name in ("tq", "tk")}
    none = torch.empty(0, dtype=torch.int32)  # the order that the compiled function takes pairs in
    for version, extra, index, order in (("v2", (3, 1), "i", (none, none)), ("v3", (3,), "first", ())):
        inputs = o["q"], o[index], o["k"], o["j"], *tables, o["rel"], *order
        out = torch.zeros_like(expected)
        getattr(POINTOPS2, f"dot_prod_with_idx_forward_cuda_{version}")(*sizes, *extra, *inputs, out)
        torch.testing.assert_close(out, expected)
        found = zeros(o, "q", "k") | dict(zip(names[2:], map(torch.zeros_like, tables), strict=True))
        backward = getattr(POINTOPS2, f"dot_prod_with_idx_backward_cuda_{version}")
        backward(*sizes, *extra, grad, *inputs, *found.values())
        check(found, wanted)


def test_pointops2_sums_values(operands: dict[str, Any]) -> None:
    o, sizes = operands, (N, operands["pairs"], HEADS, CHANNELS)
    expected, grad, wanted = with_gradients(lambda o: plain_sums(o, False), o, ["attn", "v"])
    out, found = torch.zeros_like(expected), zeros(o, "attn", "v")
    POINTOPS2.attention_step2_forward_cuda(*sizes, o["attn"], o["v"], o["i"], o["j"], out)
    torch.testing.assert_close(out, expected)
    POINTOPS2.attention_step2_backward_cuda(*sizes, grad, o["i"], o["j"], o["attn"], o["v"], *found.values())
    check(found, wanted)
    assert POINTOPS2.attention_step2_forward_cuda_v2.__wrapped__ is POINTOPS2.attention_step2_forward_cuda.__wrapped__

    table = last(o["tk"])
    expected, grad, wanted = with_gradients(lambda o: plain_sums(o, True), o, ["attn", "v", "tk"])
    wanted["tk"] = last(wanted["tk"])
    for version, extra, index in (("", (), "i"), ("_v2", (3,), "first")):
        name = "attention_step2_with_rel_pos_value_{}_cuda" + version
        out = torch.zeros_like(expected)
        inputs = o["attn"], o["v"], o[index], o["j"], table, o["rel"]
        getattr(POINTOPS2, name.format("forward"))(*sizes, *extra, *inputs, out)
        torch.testing.assert_close(out, expected)
        found = zeros(o, "attn", "v") | {"tk": torch.zeros_like(table)}
        inputs = grad, o[index], o["j"], o["attn"], o["v"], table, o["rel"]
        getattr(POINTOPS2, name.format("backward"))(*sizes, *extra, *inputs, *found.values())
        check(found, wanted)


def test_sptr_scores_pairs(operands: dict[str, Any]) -> None:
    o, pairs = operands, operands["pairs"]
    points_last = {name: o[name].permute(1, 2, 0).contiguous() for name in "qk"}
    tables_last = [o[name].permute(2, 3, 1, 0).contiguous() for name in ("tq", "tk")]
    expected, grad, wanted = with_gradients(lambda o: plain_scores(o, "a"), o, ["q", "k"])
    out, found = torch.zeros_like(expected).t().contiguous(), zeros(o, "q", "k")
    SPTR.attention_step1_forward_cuda(N, N, pairs, HEADS, CHANNELS, 3, *points_last.values(), o["i"], o["j"], out)
    torch.testing.assert_close(out.t(), expected)
    indices = o["i"], o["first"], o["j"], o["last"]
    sizes = N, pairs, HEADS, CHANNELS, 3
    SPTR.attention_step1_backward_cuda(*sizes, grad, *indices, o["q"], o["k"], *found.values())
    check(found, wanted)

    for function, parts in (("dot_prod_with_idx", "qk"), ("dot_prod_with_idx_all", "aqk")):
        expected = plain_scores(o, parts)
        inputs = points_last["q"], o["i"], o["first"], points_last["k"], o["j"], *tables_last, o["rel"].t().contiguous()
        getattr(SPTR, f"{function}_forward_cuda")(*sizes, LENGTH, *inputs, out)
        torch.testing.assert_close(out.t(), expected)
    names = ["q", "k", "tq", "tk"]
    _, grad, wanted = with_gradients(lambda o: plain_scores(o, "qk"), o, names)
    found = zeros(o, *names)
    inputs = o["q"], o["first"], o["k"], o["last"], o["j"], o["tq"], o["tk"], o["rel"]
    SPTR.dot_prod_with_idx_backward_cuda(*sizes, LENGTH, grad, *inputs, *found.values())
    check(found, wanted)


def test_sptr_sums_values(operands: dict[str, Any]) -> None:
    o, sizes = operands, (N, operands["pairs"], HEADS, CHANNELS, 3)
    value_last = o["v"].permute(1, 2, 0).contiguous()
    indices = o["i"], o["first"], o["j"], o["last"]
    expected, grad, wanted = with_gradients(lambda o: plain_sums(o, False), o, ["attn", "v"])
    out, found = torch.zeros_like(expected), zeros(o, "attn", "v")
    SPTR.attention_step2_forward_cuda(*sizes, o["attn"], o["v"], o["first"], o["j"], out)
    torch.testing.assert_close(out, expected)
    SPTR.attention_step2_backward_cuda(*sizes, grad, *indices, o["attn"], value_last, *found.values())
    check(found, wanted)

    expected, grad, wanted = with_gradients(lambda o: plain_sums(o, True), o, ["attn", "v", "tk"])
    name = "attention_step2_with_rel_pos_value_{}_cuda"
    inputs = o["attn"], o["v"], o["first"], o["j"], o["tk"], o["rel"]
    getattr(SPTR, name.format("forward"))(*sizes, *inputs, out)
    torch.testing.assert_close(out, expected)
    table_last, found = o["tk"].permute(2, 3, 1, 0).contiguous(), zeros(o, "attn", "v", "tk")
    inputs = grad, *indices, o["attn"], value_last, table_last, o["rel"].t().contiguous()
    getattr(SPTR, name.format("backward"))(*sizes[:4], LENGTH, 3, *inputs, *found.values())
    check(found, wanted)


def test_a_missing_neighbor_of_pointops2_is_the_first_point_of_its_cloud_far_away() -> None:
    points = torch.tensor([[0.0, 0, 0], [5, 0, 0], [6, 0, 0], [8, 0, 0]])
    idx, squares = torch.zeros(2, 2).int(), torch.zeros(2, 2)
    queries, ends, last = torch.tensor([[1.0, 0, 0], [7.5, 0, 0]]), torch.tensor([1, 4]), torch.tensor([1, 2])
    POINTOPS2.knnquery_cuda(2, 2, points, queries, ends.int(), last.int(), idx, squares)
    assert idx.tolist() == [[0, 0], [3, 2]]
    assert squares.tolist() == [[1, 1e10], [0.25, 2.25]]
    sampled = torch.zeros(3).int()
    POINTOPS2.furthestsampling_cuda(2, 3, points, ends.int(), torch.tensor([1, 3]).int(), torch.zeros(4), sampled)
    assert sampled.tolist() == [0, 1, 3]


def test_half_types_are_summed_in_float32() -> None:
    index = torch.zeros(3000, dtype=torch.int32)
    attn, v, out = torch.ones(3000, 1).half(), torch.ones(1, 1, 1).half(), torch.zeros(1, 1, 1).half()
    POINTOPS2.attention_step2_forward_cuda(1, 3000, 1, 1, attn, v, index, index, out)
    assert out.item() == 3000
