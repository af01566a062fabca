"""Facts about sparse_conv: it is the dense convolution, looked at where sites are active."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, run
from torch import Tensor

from triops import Rulebook, scenes, sparse_conv
from triops.ops.sparse_conv.plans import cached
from triops.ops.sparse_conv.samples import hand_made, lidar, random_sites, sparse, submanifold

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def dense(features: Tensor, indices: Tensor, batch_size: int, shape: list[int]) -> Tensor:
    """[N, C] at sites -> [B, C, *shape], zero elsewhere."""
    grid = features.new_zeros(batch_size, *shape, features.shape[1])
    return grid.index_put(tuple(indices.long().t()), features).movedim(-1, 1)


def at_sites(grid: Tensor, indices: Tensor) -> Tensor:
    return grid.movedim(1, -1)[tuple(indices.long().t())]


def assert_equal_with_gradients(got: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(got)
    for g, e in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(g, e)


def parameters(kernel: list[int], channels_in: int, channels_out: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    features = torch.randn(rows, channels_in, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels_out, *kernel, channels_in, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(channels_out, dtype=torch.float64, requires_grad=True)
    return features, weight, bias


@st.composite
def geometries(draw: Any) -> dict[str, Any]:
    axes = draw(st.integers(1, 3))
    per_axis = lambda low, high: draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))  # noqa: E731
    kernel, stride, padding = per_axis(1, 4), per_axis(1, 3), per_axis(0, 2)
    dilation = per_axis(1, 2)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    shape = [n + extra for n, extra in zip(least, per_axis(0, 4), strict=True)]
    return {
        "shape": shape, "kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation,
        "batch": draw(st.integers(1, 2)), "fill": draw(st.floats(0, 1)),
        "channels": (draw(st.integers(1, 5)), draw(st.integers(1, 5))), "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


def sites_of(case: dict[str, Any]) -> Tensor:
    volume = case["batch"] * torch.Size(case["shape"]).numel()
    return random_sites(int(case["fill"] * volume), case["batch"], case["shape"], case["seed"])


@settings(max_examples=40, deadline=None)
@given(geometries())
def test_a_sparse_convolution_is_the_dense_one_where_it_can_be_other_than_the_bias(case: dict[str, Any]) -> None:
    sites = sites_of(case)
    features, weight, bias = parameters(case["kernel"], *case["channels"], len(sites))
    options = {name: case[name] for name in ("stride", "padding", "dilation")}
    rulebook = Rulebook.sparse(sites, case["batch"], case["shape"], case["kernel"], **options)
    grid = CONV[len(case["shape"])](
        dense(features, sites, case["batch"], case["shape"]), weight.movedim(-1, 1), bias, **options
    )
    assert list(grid.shape[2:]) == rulebook.out_shape
    assert_equal_with_gradients(
        sparse_conv(features, weight, rulebook, bias), at_sites(grid, rulebook.out_indices), (features, weight, bias)
    )
    elsewhere = grid.detach() - bias.detach().view(1, -1, *[1] * len(case["shape"]))
    elsewhere.movedim(1, -1)[tuple(rulebook.out_indices.long().t())] = 0
    assert elsewhere.abs().max().item() < 1e-12, "no output site is missing"


@settings(max_examples=25, deadline=None)
@given(geometries())
def test_a_transposed_convolution_is_the_dense_one(case: dict[str, Any]) -> None:
    sites = sites_of(case)
    options = {name: case[name] for name in ("stride", "padding", "dilation")}
    sizes = zip(case["shape"], case["kernel"], *options.values(), strict=True)
    if any((n - 1) * s - 2 * p + d * (k - 1) + 1 < 1 for n, k, s, p, d in sizes):
        return
    features, weight, bias = parameters(case["kernel"], *case["channels"], len(sites))
    rulebook = Rulebook.sparse(sites, case["batch"], case["shape"], case["kernel"], **options, transpose=True)
    grid = TRANSPOSED[len(case["shape"])](
        dense(features, sites, case["batch"], case["shape"]), weight.movedim(-1, 0), bias, **options
    )
    assert list(grid.shape[2:]) == rulebook.out_shape
    assert_equal_with_gradients(
        sparse_conv(features, weight, rulebook, bias), at_sites(grid, rulebook.out_indices), (features, weight, bias)
    )


@settings(max_examples=25, deadline=None)
@given(geometries())
def test_a_submanifold_convolution_is_the_dense_one_at_its_own_sites(case: dict[str, Any]) -> None:
    kernel = [k - 1 + k % 2 for k in case["kernel"]]
    padding = [k // 2 * d for k, d in zip(kernel, case["dilation"], strict=True)]
    sites = sites_of(case)
    features, weight, bias = parameters(kernel, *case["channels"], len(sites))
    rulebook = Rulebook.submanifold(sites, case["batch"], case["shape"], kernel, case["dilation"])
    grid = CONV[len(case["shape"])](
        dense(features, sites, case["batch"], case["shape"]), weight.movedim(-1, 1), bias, padding=padding,
        dilation=case["dilation"],
    )  # fmt: skip
    assert_equal_with_gradients(
        sparse_conv(features, weight, rulebook, bias), at_sites(grid, sites), (features, weight, bias)
    )


def test_an_inverse_convolution_is_the_transposed_one_at_the_sites_it_came_from() -> None:
    shape, sites = [5, 7, 9], random_sites(60, 2, [5, 7, 9])
    down = Rulebook.sparse(sites, 2, shape, 3, stride=2, padding=1)
    features, weight, bias = parameters([3, 3, 3], 4, 6, len(down.out_indices))
    grid = F.conv_transpose3d(
        dense(features, down.out_indices, 2, down.out_shape), weight.movedim(-1, 0), bias, stride=2, padding=1
    )
    assert list(grid.shape[2:]) == shape
    assert_equal_with_gradients(
        sparse_conv(features, weight, down.inverse(), bias), at_sites(grid, sites), (features, weight, bias)
    )


def test_by_hand() -> None:
    rulebook = hand_made([0, 1], [-1, 0], [-1, -1], rows=2)()
    features = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    weight = torch.tensor([[[1.0, 1.0], [0.0, 3.0]]])  # [Cout 1, K 2, Cin 2]
    out = sparse_conv(features, weight, rulebook, torch.tensor([0.5]))
    assert out.tolist() == [[1 + 2 + 60 + 0.5], [6.5], [0.5]]


@pytest.mark.parametrize("rulebook", [submanifold(12, 1, [3, 4]), sparse(9, 1, [3, 4], padding=1)])
def test_it_can_be_differentiated_twice(rulebook: Any) -> None:
    book = rulebook()
    features, weight, bias = parameters([3, 3], 2, 3, len(book.in_indices))
    torch.autograd.gradgradcheck(lambda f, w, b: sparse_conv(f, w, book, b) ** 2, (features, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_as_good_as_one_rounding_at_the_end(dtype: torch.dtype) -> None:
    book = submanifold(300, 1, [8, 9, 10])()
    features, weight = torch.randn(300, 32).to(dtype), (torch.randn(16, 3, 3, 3, 32) * 0.05).to(dtype)
    exact = sparse_conv(features.double(), weight.double(), book)
    error = (sparse_conv(features, weight, book).double() - exact).norm() / exact.norm()
    once = (exact.to(dtype).double() - exact).norm() / exact.norm()
    assert error < 1.05 * once


def test_weights_in_the_layout_of_mmcv_are_read_as_they_lie() -> None:
    book = submanifold(40, 1, [4, 5, 6])()
    features, stored = torch.randn(40, 6), torch.randn(3, 3, 3, 6, 8)
    weight = stored.permute(4, 0, 1, 2, 3)
    assert weight.flatten(1, -2).data_ptr() == stored.data_ptr()
    torch.testing.assert_close(
        sparse_conv(features, weight, book), sparse_conv(features, weight.contiguous(), book), rtol=1e-5, atol=1e-5
    )


def test_a_network_whose_sites_all_vanish_gives_an_empty_tensor() -> None:
    sites = torch.ones(3, 4, dtype=torch.int32)
    book = Rulebook.sparse(sites, 2, [3, 3, 3], 1, stride=2)
    features = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(5, 1, 1, 1, 4, requires_grad=True)
    out = sparse_conv(features, weight, book)
    assert out.shape == (0, 5)
    following = Rulebook.submanifold(book.out_indices, 2, book.out_shape, 3)
    out = sparse_conv(out, torch.randn(2, 3, 3, 3, 5), following, torch.ones(2))
    assert out.shape == (0, 2)
    out.sum().backward()
    assert features.grad is not None
    assert weight.grad is not None
    assert not features.grad.any()
    assert not weight.grad.any()


def test_autocast_casts_features_weight_and_bias() -> None:
    book = submanifold(20, 1, [4, 5, 6])()
    features, weight, bias = torch.randn(20, 3), torch.randn(5, 3, 3, 3, 3, requires_grad=True), torch.randn(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sparse_conv(features, weight, book, bias)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    """As `F.linear` and `F.conv3d` do."""
    book = submanifold(20, 1, [4, 5, 6])()
    features, weight, bias = torch.randn(20, 3).double(), torch.randn(5, 3, 3, 3, 3).double(), torch.randn(5).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = sparse_conv(features, weight, book, bias)
        assert torch.nn.functional.linear(features, weight[:, 0, 0, 0]).dtype == torch.float64
    assert torch.equal(inside, sparse_conv(features, weight, book, bias))


def test_every_run_gives_the_same_bits_with_any_number_of_threads() -> None:
    book = lidar()
    scatter = book.gather.flip(0)
    part = Rulebook(
        book.in_indices, book.out_indices[:60_000], book.in_shape, book.out_shape, 4, [3, 3, 3],
        book.gather[:, :60_000].contiguous(), torch.where(scatter < 60_000, scatter, -1),
    )  # fmt: skip
    features, weight = torch.randn(len(book.in_indices), 8), torch.randn(8, 3, 3, 3, 8)
    features.requires_grad_()
    weight.requires_grad_()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            out = sparse_conv(features, weight, part)
            results.append((out, *torch.autograd.grad(out, (features, weight), out.detach())))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("channels", [(1, 1), (3, 5), (15, 17), (16, 16), (33, 4), (2, 50)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_number_of_channels_is_special(channels: tuple[int, int], dtype: torch.dtype) -> None:
    book = submanifold(1300, 2, [6, 16, 16])()  # more than two blocks of outputs on a CPU, the last not full
    inputs, outputs = channels
    features, grad = torch.randn(1300, inputs).to(dtype), torch.randn(1300, outputs).to(dtype)
    weight, bias = torch.randn(outputs, 27, inputs).to(dtype), torch.randn(outputs).to(dtype)
    tables = book.gather, book.scatter, book.mirrored
    for flip in (False, True):
        for name, args in (
            ("sparse_conv", (features, weight, bias, *tables, flip)),
            ("sparse_conv_backward_weight", (features, grad, *tables, flip)),
        ):
            expected = run("reference", name, args)
            largest = expected.abs().max()
            assert_same(run("cpu", name, args) / largest, expected / largest, name)


@pytest.mark.parametrize("operator", ["sparse_conv", "sparse_conv_backward_weight"])
def test_on_a_gpu_entries_that_are_no_rows_are_skipped(operator: str) -> None:
    book = sparse(40, 2, [5, 6, 7], padding=1)()
    wild, tame = book.gather.clone(), book.gather.clone()
    values = torch.tensor([2**31 - 1, -(2**31), 40, -2, 1 << 20], dtype=torch.int32)
    wild.view(-1)[::7] = values.repeat(wild.numel())[: len(wild.view(-1)[::7])]
    tame.view(-1)[::7] = -1
    features, other = torch.randn(40, 4), torch.randn(6, 27, 4)
    if operator == "sparse_conv":
        rest: tuple[Any, ...] = (other, None)
    else:
        rest = (torch.randn(wild.shape[1], 6),)
    got = run("gpu", operator, (features, *rest, wild, book.scatter, False, False))
    assert_same(got, run("reference", operator, (features, *rest, tame, book.scatter, False, False)))


def test_with_triops_check_a_gpu_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOPS_CHECK", "1")
    book = sparse(40, 2, [5, 6, 7], padding=1)()
    book.gather[2, 1] = 40
    with pytest.raises(IndexError, match=r"gather\[2, 1\] = 40"):
        run("gpu", "sparse_conv", (torch.zeros(40, 4), torch.zeros(6, 27, 4), None, book.gather, book.scatter, False,
                                   False))  # fmt: skip


@pytest.mark.parametrize("special", [False, True])
def test_float32_in_six_tensor_core_products(special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies exactly what the tensor cores would get, so the splitting shows here too."""
    from triops.ops.sparse_conv import gpu

    monkeypatch.setattr(gpu, "_precision", lambda dtype: "split")
    book = submanifold(50, 1, [4, 5, 6])()
    features, weight = torch.randn(50, 20), torch.randn(9, 27, 20) * 0.1
    if special:
        features[::9, ::5], features[1::9, ::7] = float("inf"), float("nan")
        weight[2, 13, 4], weight[3, 5, 6] = 0.0, float("inf")
    for flip in (False, True):
        args = (features, weight, None, book.gather, book.gather, True, flip)
        assert_same(run("gpu", "sparse_conv", args), run("reference", "sparse_conv", args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_an_infinite_weight_reaches_only_the_outputs_that_meet_it(dtype: torch.dtype) -> None:
    book = sparse(40, 2, [5, 6, 7], padding=1)()
    features, weight = torch.randn(40, 4).to(dtype), torch.randn(6, 27, 4).to(dtype)
    weight[1, 3, 2], weight[4, 20, 0] = float("inf"), float("nan")
    args = (features, weight, None, book.gather, book.scatter, False, False)
    expected = run("reference", "sparse_conv", args)
    assert expected.isfinite().any(0).all()
    assert_same(run("cpu", "sparse_conv", args), expected)
    if dtype != torch.float16:  # tensor cores multiply the missing rows too, as zeros
        assert_same(run("gpu", "sparse_conv", args), expected)


@pytest.mark.parametrize("flip", [False, True])
def test_the_deterministic_weight_gradient_is_the_same_sum(flip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.ops.sparse_conv import gpu

    monkeypatch.setattr(gpu, "CHUNK", 16)  # several parts an offset
    book = submanifold(600, 1, [9, 10, 11])()
    args = (torch.randn(600, 5), torch.randn(600, 3) * 0.1, book.gather, book.gather, True, flip)
    torch.use_deterministic_algorithms(True)
    try:
        got = run("gpu", "sparse_conv_backward_weight", args)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(got, run("reference", "sparse_conv_backward_weight", args))


def test_a_plan_is_made_once_a_table_and_again_when_the_table_changes() -> None:
    table, made = torch.zeros(2, 3, dtype=torch.int32), []
    for _ in range(2):
        cached(table, "key", lambda: made.append(1))
    assert len(made) == 1
    table[0, 0] = 1
    cached(table, "key", lambda: made.append(1))
    assert len(made) == 2
    book = submanifold(20, 1, [4, 5, 6])()
    features, weight = torch.randn(20, 3), torch.randn(5, 3, 3, 3, 3)
    sparse_conv(features, weight, book)
    book.gather.fill_(-1)
    assert not sparse_conv(features, weight, book).any()


def test_a_small_network_compiles_without_a_graph_break_forward_and_backward() -> None:
    sites = random_sites(60, 2, [5, 6, 7])
    features = torch.randn(60, 3, dtype=torch.float64, requires_grad=True)
    first = torch.randn(5, 3, 3, 3, 3, dtype=torch.float64)
    second = torch.randn(4, 3, 3, 3, 5, dtype=torch.float64)
    third = torch.randn(2, 3, 3, 3, 4, dtype=torch.float64)

    def network(sites: Tensor, features: Tensor) -> Tensor:
        same = Rulebook.submanifold(sites, 2, [5, 6, 7], 3)
        features = sparse_conv(features, first, same).relu()
        down = Rulebook.sparse(sites, 2, [5, 6, 7], 3, stride=2, padding=1)
        features = sparse_conv(features, second, down).relu()
        return sparse_conv(features, third, down.inverse())

    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_equal_with_gradients(compiled(sites, features), network(sites, features), (features,))


def masks_of(table: Tensor) -> Tensor:
    """Of each column, its offsets as bits, the rarest on top."""
    has = table >= 0
    bit = torch.argsort(torch.argsort(has.sum(1), descending=True, stable=True))
    return (has.long() << bit[:, None]).sum(0)


def gray_rank(masks: Tensor) -> Tensor:
    for shift in (1, 2, 4, 8, 16):
        masks = masks ^ (masks >> shift)
    return masks


def test_tiles_hold_every_pair_once_and_sort_almost_as_well_as_a_whole_sort_would() -> None:
    pytest.importorskip("triton")
    from triops.ops.rulebook.tiles_gpu import make_tiles

    sites = scenes.lidar_sites(8_000, (11, 360, 360), 1, reach=0.22, roughness=0.1)
    table = Rulebook.submanifold(sites, 1, [11, 360, 360], 3).gather
    taps, count = table.shape
    tiles = make_tiles(table.to("cuda" if torch.cuda.is_available() else "cpu"), count, 64)

    found = torch.full_like(table, -1)
    for tile, visits in enumerate(tiles.counts.tolist()):
        rows = tiles.rows[tile * 64 : (tile + 1) * 64].long().cpu()
        for visit in range(visits):
            neighbors = tiles.neighbors[tile, visit].cpu()
            assert (neighbors[rows < 0] == -1).all()
            assert (neighbors >= 0).any()
            assert (found[tiles.taps[tile, visit].cpu(), rows[rows >= 0]] == -1).all()
            found[tiles.taps[tile, visit].cpu(), rows[rows >= 0]] = neighbors[rows >= 0]
    assert torch.equal(found, table)

    order = torch.argsort(gray_rank(masks_of(table)), stable=True)
    padded = F.pad((table >= 0)[:, order], (0, -count % 64)).view(taps, -1, 64)
    best = int(padded.any(2).sum())
    assert int(tiles.counts.sum()) <= 1.03 * best
