"""Facts about sparse_conv: it is the dense convolution, looked at where sites are active."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, run
from torch import Tensor

import triops
from triops import Rulebook, scenes, sparse_conv
from triops.ops.rulebook import row_tiles
from triops.ops.rulebook.plans import Tiles
from triops.ops.sparse_conv.samples import (
    convolution_arguments,
    hand_made,
    lidar,
    prepared,
    random_sites,
    sparse,
    submanifold,
    with_gather,
)

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


def gradient_arguments(features: Tensor, grad: Tensor, book: Rulebook, flip: bool = False) -> tuple[Any, ...]:
    tables = book.tables
    return features, grad, tables.gather, tables.scatter, tables.mirrored, flip, tables.pairs, False


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


@pytest.mark.versions
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
    for flip in (False, True):
        for name, args in (
            ("sparse_conv", convolution_arguments(features, weight, bias, book, flip)),
            ("sparse_conv_backward_weight", gradient_arguments(features, grad, book, flip)),
        ):
            assert_same(run("cpu", name, args), run("reference", name, args), operator=name)


@pytest.mark.parametrize("operator", ["sparse_conv", "sparse_conv_backward_weight"])
def test_on_a_gpu_entries_that_are_no_rows_are_skipped(operator: str) -> None:
    book = sparse(40, 2, [5, 6, 7], padding=1)()
    wild, tame = book.gather.clone(), book.gather.clone()
    values = torch.tensor([2**31 - 1, -(2**31), 40, -2, 1 << 20], dtype=torch.int32)
    wild.view(-1)[::7] = values.repeat(wild.numel())[: len(wild.view(-1)[::7])]
    tame.view(-1)[::7] = -1
    features, other = torch.randn(40, 4), torch.randn(6, 27, 4)
    books = [with_gather(book, table) for table in (wild, tame)]
    if operator == "sparse_conv":
        args = [convolution_arguments(features, other, None, b) for b in books]
    else:
        grad = torch.randn(wild.shape[1], 6)
        args = [gradient_arguments(features, grad, b) for b in books]
    assert_same(run("gpu", operator, args[0]), run("reference", operator, args[1]), operator=operator)


def test_with_triops_check_a_gpu_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOPS_CHECK", "1")
    book = sparse(40, 2, [5, 6, 7], padding=1)()
    table = book.gather
    table[2, 1] = 40
    args = convolution_arguments(torch.zeros(40, 4), torch.zeros(6, 27, 4), None, with_gather(book, table))
    with pytest.raises(IndexError, match=r"gather\[2, 1\] = 40"):
        run("gpu", "sparse_conv", args)


@pytest.mark.parametrize("special", [False, True])
def test_float32_in_six_tensor_core_products(special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies exactly what the tensor cores would get, so the splitting shows here too."""
    from triops.ops.sparse_conv import gpu

    monkeypatch.setattr(gpu, "precision_of", lambda dtype: "split")
    book = submanifold(50, 1, [4, 5, 6])()
    features, weight = torch.randn(50, 20), torch.randn(9, 27, 20) * 0.1
    if special:
        features[::9, ::5], features[1::9, ::7] = float("inf"), float("nan")
        weight[2, 13, 4], weight[3, 5, 6] = 0.0, float("inf")
    for flip in (False, True):
        args = convolution_arguments(features, weight, None, book, flip)
        assert_same(run("gpu", "sparse_conv", args), run("reference", "sparse_conv", args), operator="sparse_conv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_an_infinite_weight_reaches_only_the_outputs_that_meet_it(dtype: torch.dtype) -> None:
    book = sparse(40, 2, [5, 6, 7], padding=1)()
    features, weight = torch.randn(40, 4).to(dtype), torch.randn(6, 27, 4).to(dtype)
    weight[1, 3, 2], weight[4, 20, 0] = float("inf"), float("nan")
    args = convolution_arguments(features, weight, None, book)
    expected = run("reference", "sparse_conv", args)
    assert expected.isfinite().any(0).all()
    assert_same(run("cpu", "sparse_conv", args), expected, operator="sparse_conv")
    if dtype != torch.float16:  # tensor cores multiply the missing rows too, as zeros
        assert_same(run("gpu", "sparse_conv", args), expected, operator="sparse_conv")


@pytest.mark.parametrize("flip", [False, True])
def test_the_deterministic_weight_gradient_is_the_same_sum(flip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from triops.ops.sparse_conv import gpu

    monkeypatch.setattr(gpu, "CHUNK", 16)  # several parts an offset
    book = submanifold(600, 1, [9, 10, 11])()
    args = gradient_arguments(torch.randn(600, 5), torch.randn(600, 3) * 0.1, book, flip)
    torch.use_deterministic_algorithms(True)
    try:
        got = run("gpu", "sparse_conv_backward_weight", args)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = run("reference", "sparse_conv_backward_weight", args)
    assert_same(got, expected, operator="sparse_conv_backward_weight")


def test_a_prepared_rulebook_gives_the_same_bits_forward_and_backward() -> None:
    for book in (submanifold(70, 1, [4, 5, 6])(), sparse(70, 2, [5, 6, 7], padding=1)()):
        features, weight, bias = parameters([3, 3, 3], 4, 5, 70)
        results = []
        for made in (book, book.prepared(), book.prepared(backward=True)):
            out = sparse_conv(features, weight, made, bias)
            results.append((out, *torch.autograd.grad(out.square().sum(), (features, weight, bias))))
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_preparing_twice_does_nothing_and_a_rulebook_never_prepares_itself() -> None:
    book = sparse(70, 2, [5, 6, 7], padding=1)()
    sparse_conv(torch.randn(70, 4, requires_grad=True), torch.randn(5, 3, 3, 3, 4), book).sum().backward()
    assert book.tables[5:] == (None,) * 4
    ready = book.prepared(backward=True)
    assert ready.prepared() is ready
    assert ready.prepared(backward=True) is ready
    assert ready.inverse().prepared(backward=True).tables.pairs is ready.tables.transposed_pairs


def test_a_rulebook_with_one_table_works_the_other_out_when_it_is_asked_for() -> None:
    sites, rules = sparse(70, 2, [5, 6, 7])().in_indices, {"stride": 2, "padding": 1}
    whole = Rulebook.sparse(sites, 2, [5, 6, 7], 3, **rules)
    half = Rulebook.sparse(sites, 2, [5, 6, 7], 3, **rules, both=False)
    assert half.tables.scatter is None
    assert torch.equal(half.scatter, whole.scatter)
    assert torch.equal(half.inverse().gather, whole.inverse().gather)
    features, weight = torch.randn(70, 4), torch.randn(5, 3, 3, 3, 4)
    gradients = []
    for book in (whole, half, whole.prepared(backward=True), half.prepared(backward=True)):
        leaf = features.clone().requires_grad_()
        sparse_conv(leaf, weight, book).square().sum().backward()
        gradients.append(leaf.grad)
    assert all(torch.equal(g, gradients[0]) for g in gradients[1:])


def test_a_rulebook_is_a_value_whose_tables_are_handed_out_as_copies() -> None:
    table = submanifold(20, 1, [4, 5, 6])().gather
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            made = submanifold(20, 1, [4, 5, 6])().prepared()
            by_hand = with_gather(made, table)
            features, weight = torch.randn(20, 3), torch.randn(5, 3, 3, 3, 3)
            expected = sparse_conv(features, weight, made)
            for book in (made, by_hand):
                book.gather.fill_(-1)
                book.scatter.fill_(-1)
                assert torch.equal(sparse_conv(features, weight, book), expected)
            table.fill_(-1)
            assert torch.equal(sparse_conv(features, weight, by_hand), expected)
        table = made.gather


@pytest.mark.parametrize("backward", [False, True])
def test_copy_takes_over_tables_and_plans(backward: bool) -> None:
    book = submanifold(40, 1, [4, 5, 6], seed=1)().prepared(backward=backward)
    other = submanifold(40, 1, [4, 5, 6], seed=2)()
    addresses = [t.data_ptr() for t in book.tables if isinstance(t, Tensor)]
    features, weight = torch.randn(40, 3), torch.randn(5, 3, 3, 3, 3)
    assert not torch.equal(sparse_conv(features, weight, book), sparse_conv(features, weight, other))
    book.copy_(other)
    assert [t.data_ptr() for t in book.tables if isinstance(t, Tensor)] == addresses
    assert torch.equal(book.out_indices, other.out_indices)
    assert torch.equal(sparse_conv(features, weight, book), sparse_conv(features, weight, other))
    with pytest.raises(ValueError, match="same shapes"):
        book.copy_(submanifold(41, 1, [4, 5, 6])())


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_plan_that_belongs_to_no_table_touches_no_memory_outside(backend: str) -> None:
    """Kernels read plans, and any operator can be called with any tensors."""
    book = prepared(sparse(40, 2, [5, 6, 7], padding=1))()
    values = torch.tensor([2**31 - 1, -(2**31), 40, -2, 1 << 20, 3], dtype=torch.int32)
    wild = {
        name: values.repeat(len(plan) // 6 + 1)[: len(plan)].roll(3)
        for name, plan in book.tables._asdict().items()
        if isinstance(plan, Tensor) and plan.dim() == 1
    }
    book.tables = book.tables._replace(**wild)
    features, weight = torch.randn(40, 4), torch.randn(6, 27, 4)
    grad = torch.randn(book.tables.gather.shape[1], 6)
    for operator, args in (
        ("sparse_conv", convolution_arguments(features, weight, None, book)),
        ("sparse_conv_backward_weight", gradient_arguments(features, grad, book)),
    ):
        if backend == "cpu":
            with pytest.raises(IndexError, match="pairs holds rows that do not exist"):
                run(backend, operator, args)
        else:
            run(backend, operator, args)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and graphs are a GPU's")


def gpu_case(seed: int = 0) -> tuple[Rulebook, Tensor, Tensor]:
    sites = scenes.lidar_sites(20_000, (11, 360, 360), 1, reach=0.22, roughness=0.1).cuda()
    if seed:
        sites = sites[torch.randperm(len(sites), generator=torch.Generator().manual_seed(seed)).cuda()]
    book = Rulebook.submanifold(sites, 1, [11, 360, 360], 3)
    return book, torch.randn(len(sites), 32, device="cuda"), torch.randn(32, 3, 3, 3, 32, device="cuda") * 0.1


@needs_gpu
def test_convolutions_of_one_rulebook_on_two_streams_are_right() -> None:
    book, features, weight = gpu_case()
    expected = sparse_conv(features, weight, book)
    for made in (book, book.prepared()):
        torch.cuda.synchronize()
        streams, results = [torch.cuda.Stream() for _ in range(2)], []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                results.append(sparse_conv(features, weight, made))
        torch.cuda.synchronize()
        assert all(torch.equal(result, expected) for result in results)


@needs_gpu
def test_tf32_rounds_its_factors_to_the_nearest_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.hip:
        pytest.skip("TF32 is NVIDIA's")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    book, features, weight = gpu_case()
    exact = sparse_conv(features.double(), weight.double(), book)

    def error(got: Tensor, expected: Tensor) -> float:
        return float((got - expected).norm() / expected.norm())

    a, b = torch.randn(2, 1024, 864, device="cuda")
    torchs_own = error(a @ b.t(), a.double() @ b.double().t())
    assert error(sparse_conv(features, weight, book), exact) < 1.1 * torchs_own


@needs_gpu
def test_a_first_use_inside_a_capture_leaves_nothing_behind() -> None:
    warm, features, weight = gpu_case()
    expected = sparse_conv(features, weight, warm)
    book, _, _ = gpu_case()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse_conv(features, weight, book)
    assert torch.equal(sparse_conv(features, weight, book), expected)
    graph.replay()
    assert torch.equal(captured, expected)


@needs_gpu
def test_a_captured_convolution_follows_its_rulebook() -> None:
    book, features, weight = gpu_case()
    book = book.prepared()
    other = gpu_case(seed=1)[0]
    expected = sparse_conv(features, weight, other)
    before = sparse_conv(features, weight, book)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse_conv(features, weight, book)
    book.gather.copy_(other.gather)  # a copy of the table: nothing happens
    graph.replay()
    assert torch.equal(captured, before)
    book.copy_(other)
    graph.replay()
    assert torch.equal(captured, expected)
    assert torch.equal(sparse_conv(features, weight, book), expected)


def test_no_module_keeps_results_keyed_by_tensors() -> None:
    for source in Path(triops.__file__).parent.rglob("*.py"):
        assert "WeakTensorKey" not in source.read_text(), source


@pytest.mark.versions
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
    sites = scenes.lidar_sites(8_000, (11, 360, 360), 1, reach=0.22, roughness=0.1)
    table = Rulebook.submanifold(sites, 1, [11, 360, 360], 3).gather
    taps, count = table.shape
    plan = row_tiles(table.to("cuda" if torch.cuda.is_available() else "cpu"), count, 64)
    tiles = Tiles.of(plan.cpu(), taps, count, 64)

    found = torch.full_like(table, -1)
    for tile, visits in enumerate(tiles.counts.tolist()):
        rows = tiles.rows[tile].long()
        for visit in range(visits):
            neighbors, offset = tiles.neighbors[tile, visit], tiles.offsets[tile, visit]
            assert (neighbors[rows < 0] == -1).all()
            assert (neighbors >= 0).any()
            assert (found[offset, rows[rows >= 0]] == -1).all()
            found[offset, rows[rows >= 0]] = neighbors[rows >= 0]
    assert torch.equal(found, table)

    order = torch.argsort(gray_rank(masks_of(table)), stable=True)
    padded = F.pad((table >= 0)[:, order], (0, -count % 64)).view(taps, -1, 64)
    best = int(padded.any(2).sum())
    assert int(tiles.counts.sum()) <= 1.03 * best
