"""Facts about the rulebook, worked out by hand or by a dense convolution."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import GPU, assert_same, device_of

import triops
from triops import scenes
from triops._gpu import pinned
from triops._op import OPERATORS
from triops.ops.rulebook import compact_indice_pairs, sparse_neighbors, strided_cpu, strided_gpu, submanifold_neighbors

BACKENDS = ["reference", "cpu", "gpu"]


def rulebook(backend: str, sites: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """get_indice_pairs through one backend's kernel, results on the CPU."""
    if not isinstance(sites, torch.Tensor):
        sites = torch.tensor(sites, dtype=torch.int32)
    sites = sites.to(device_of(backend))
    op = OPERATORS["get_indice_pairs"]
    shape, kernel = args[1], args[2]
    axes = sites.shape[1] - 1
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "out_padding": 0}
    values = [shape, kernel, *(options.get(name, value) for name, value in defaults.items())]
    lists = [[v] * axes if isinstance(v, int) else list(v) for v in values]
    arguments = (sites, args[0], *lists, options.get("subm", False), options.get("transpose", False))
    op.check(*arguments)
    return tuple(t.cpu() for t in op.kernel(backend)(*arguments))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pairs_of(pairs: torch.Tensor, num: torch.Tensor, k: int) -> list[list[int]]:
    return pairs[k, :, : int(num[k])].T.tolist()


def test_two_adjacent_interior_points_give_36_sites(backend: str) -> None:
    out, pairs, num = rulebook(backend, [[0, 4, 4, 4], [0, 4, 4, 5]], 1, [9, 9, 9], 3, padding=1)
    expected = list(itertools.product([0], [3, 4, 5], [3, 4, 5], [3, 4, 5, 6]))
    assert len(expected) == 36
    assert out.tolist() == [list(site) for site in expected], "ascending by batch and position"
    assert num.tolist() == [2] * 27
    # Offset 0 leads one step up on every axis: from (4, 4, 4) to (5, 5, 5), which is row 34 of the 36.
    assert pairs_of(pairs, num, 0) == [[0, 34], [1, 35]]
    assert pairs_of(pairs, num, 13) == [[0, expected.index((0, 4, 4, 4))], [1, expected.index((0, 4, 4, 5))]]
    assert pairs_of(pairs, num, 26) == [[0, 0], [1, 1]]


def test_one_point_in_a_corner_reaches_eight_sites(backend: str) -> None:
    out, pairs, num = rulebook(backend, [[0, 0, 0, 0]], 1, [5, 5, 5], 3, padding=1)
    assert out.tolist() == [[0, *site] for site in itertools.product((0, 1), repeat=3)]
    reached = [k for k in range(27) if num[k]]
    assert reached == [0, 1, 3, 4, 9, 10, 12, 13], "offsets of at most 1 on every axis"
    assert [pairs_of(pairs, num, k) for k in reached] == [[[0, row]] for row in range(7, -1, -1)]
    assert (pairs[num == 0] == -1).all()


def test_one_point_in_a_corner_without_padding_reaches_one_site(backend: str) -> None:
    out, _, num = rulebook(backend, [[0, 0, 0, 0]], 1, [5, 5, 5], 3)
    assert out.tolist() == [[0, 0, 0, 0]]
    assert num.tolist() == [1] + [0] * 26


def test_submanifold_pairs_of_three_points_on_a_line(backend: str) -> None:
    out, pairs, num = rulebook(backend, [[0, 5], [0, 3], [0, 4]], 1, [8], 3, subm=True)
    assert out.tolist() == [[0, 5], [0, 3], [0, 4]], "the rows as they are"
    assert num.tolist() == [2, 3, 2]
    assert pairs_of(pairs, num, 0) == [[1, 2], [2, 0]], "offset 0: the output lies one to the right"
    assert pairs_of(pairs, num, 1) == [[0, 0], [1, 1], [2, 2]]
    assert pairs_of(pairs, num, 2) == [[0, 2], [2, 1]]
    assert (pairs[0, :, 2] == -1).all()


def test_submanifold_ignores_padding_and_keeps_the_centre_for_every_site(backend: str) -> None:
    sites = scenes.lidar_sites(500, (6, 40, 40), 2)
    first = rulebook(backend, sites, 2, [6, 40, 40], 3, subm=True)
    second = rulebook(backend, sites, 2, [6, 40, 40], 3, subm=True, padding=1)
    assert_same(first, second)
    assert first[2][13] == 500
    assert torch.equal(first[1][13, 0], torch.arange(500, dtype=torch.int32))
    assert torch.equal(first[2], first[2].flip(0)), "offset k and its mirror have equally many pairs"


def test_lowest_of_several_rows_stands_for_a_site(backend: str) -> None:
    sites = [[0, 2], [0, 3], [0, 2], [0, 3], [0, 3]]
    out, pairs, num = rulebook(backend, sites, 1, [8], 3, subm=True)
    assert out.tolist() == sites
    assert num.tolist() == [1, 2, 1]
    assert [pairs_of(pairs, num, k) for k in range(3)] == [[[0, 1]], [[0, 0], [1, 1]], [[1, 0]]]
    out, pairs, num = rulebook(backend, sites, 1, [8], 3, padding=1)
    assert out.tolist() == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert [pairs_of(pairs, num, k) for k in range(3)] == [[[0, 2], [1, 3]], [[0, 1], [1, 2]], [[0, 0], [1, 1]]]


@pytest.mark.parametrize("subm", [False, True])
def test_sites_outside_the_grid_or_the_batch_are_dropped(backend: str, subm: bool) -> None:
    inside, outside = [1, 2, 3], [[1, -1, 3], [1, 5, 3], [1, 2, -1], [1, 2, 4], [-1, 2, 3], [2, 2, 3]]
    out, pairs, num = rulebook(backend, [*outside, inside], 2, [5, 4], 3, padding=1, subm=subm)
    expected = rulebook("reference", [inside], 2, [5, 4], 3, padding=1, subm=subm)
    assert torch.equal(num, expected[2])
    kept = pairs[pairs[:, 0, 0] >= 0][:, 0, 0]
    assert (kept == 6).all()
    if not subm:
        assert torch.equal(out, expected[0])


@pytest.mark.parametrize("subm", [False, True])
def test_a_site_far_outside_int32_is_dropped(backend: str, subm: bool) -> None:
    sites = torch.tensor([[0, 2], [0, 2**32 + 3], [2**33, 2]])
    _, _, num = rulebook(backend, sites, 1, [8], 3, padding=1, subm=subm)
    assert num.tolist() == ([0, 1, 0] if subm else [1, 1, 1])


@pytest.mark.parametrize("subm", [False, True])
def test_strict_mode_refuses_sites_outside(backend: str, subm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOPS_CHECK", "1")
    with pytest.raises(IndexError, match=r"indices\[1\] = \[0, 9\] is outside the grid \[1, 8\] \(1 of 2"):
        rulebook(backend, [[0, 1], [0, 9]], 1, [8], 3, subm=subm)
    rulebook(backend, [[0, 1], [0, 7]], 1, [8], 3, subm=subm)


@pytest.mark.parametrize("subm", [False, True])
def test_no_sites(backend: str, subm: bool) -> None:
    out, pairs, num = rulebook(backend, torch.empty(0, 4, dtype=torch.int32), 2, [5, 6, 7], 3, subm=subm)
    assert (out.shape, pairs.shape, num.tolist()) == ((0, 4), (27, 2, 0), [0] * 27)


def test_a_stride_that_no_site_meets_gives_no_output(backend: str) -> None:
    out, pairs, num = rulebook(backend, [[0, 1, 1, 1]], 1, [3, 3, 3], 1, stride=2)
    assert out.shape == (0, 4)
    assert num.tolist() == [0]
    assert (pairs == -1).all()


def test_flat_indices_beyond_int32(backend: str) -> None:
    shape = [64, 20_000, 20_000]
    far = [7, 63, 19_999, 19_998]
    sites = [far, [7, 63, 19_999, 19_999], [0, 0, 0, 0], [7, 63, 19_998, 19_999]]
    _, pairs, num = rulebook(backend, sites, 8, shape, 3, subm=True)
    assert int(num.sum()) == 10, "three sites that all touch, and one alone"
    assert pairs_of(pairs, num, 12) == [[0, 1]], "offset (1, 1, 0): the output lies one to the right"
    out, _, num = rulebook(backend, sites, 8, shape, 3, stride=2, padding=1)
    assert out.tolist()[0] == [0, 0, 0, 0]
    assert out.tolist()[1:] == sorted(
        [7, *place]
        for place in {
            tuple((c + 1 - k) // 2 for c, k in zip(site[1:], offset, strict=True))
            for site in (sites[0], sites[1], sites[3])
            for offset in itertools.product(range(3), repeat=3)
            if all((c + 1 - k) % 2 == 0 and (c + 1 - k) // 2 < n for c, k, n in
                   zip(site[1:], offset, (32, 10_000, 10_000), strict=True))
        }
    )  # fmt: skip


@pytest.mark.parametrize(("size", "step"), [(3, 2**31 - 1), (5, 2**31 - 1), (9, 2**30), (9, 2**29)])
def test_a_dilation_beyond_the_grid_leaves_every_site_alone(backend: str, size: int, step: int) -> None:
    """Offsets of 2**32 would come round to the site itself in 32 bits."""
    sites = [[0, 0, 0, 0], [0, 3, 5, 6], [0, 2, 5, 6], [0, 3, 5, 5]]
    for axes in [(1, 1, size), (1, size, 1), (size, 1, 1)]:
        dilation = [step if n > 1 else 1 for n in axes]
        _, pairs, num = rulebook(backend, sites, 1, [4, 6, 7], list(axes), dilation=dilation, subm=True)
        middle = len(num) // 2
        assert num.tolist() == [4 if k == middle else 0 for k in range(len(num))]
        assert pairs_of(pairs, num, middle) == [[i, i] for i in range(4)]


def test_every_site_of_a_grid_meets_every_other(backend: str) -> None:
    shape = [3, 4, 33]
    sites = torch.cartesian_prod(torch.arange(1), *(torch.arange(n) for n in shape)).int()
    _, _, num = rulebook(backend, sites, 1, shape, 3, subm=True)
    along = [[n - 1, n, n - 1] for n in shape]
    assert num.tolist() == [a * b * c for a in along[0] for b in along[1] for c in along[2]]
    out, _, num = rulebook(backend, sites, 1, shape, 3, padding=1)
    assert torch.equal(out, sites)
    assert num.tolist() == [a * b * c for a in along[0] for b in along[1] for c in along[2]]


def test_a_kernel_of_4096_offsets(backend: str) -> None:
    size = 16 if (backend, GPU) != ("gpu", "cpu") else 5  # the interpreter pays by the program
    sites = torch.tensor([[0, 0, 0, 0], [0, size + 4, size + 4, size + 4]], dtype=torch.int32)
    out, _, num = rulebook(backend, sites, 1, [2 * size - 1] * 3, size)
    # The first site meets the output in the corner under offset 0; the second all outputs from 5 on.
    reached = sum(5 <= o < size for o in range(2 * size))
    assert num.shape == (size**3,)
    assert len(out) == int(num.sum()) == 1 + reached**3


def test_sites_in_input_order_give_the_pairs_of_sorted_sites(backend: str) -> None:
    shape = [5, 9, 65]
    sites = torch.stack(
        [torch.randint(0, n, (300,), generator=torch.Generator().manual_seed(n)) for n in [2, *shape]], 1
    )
    sites = sites.unique(dim=0).int()
    shuffle = torch.randperm(len(sites), generator=torch.Generator().manual_seed(1))
    _, pairs, num = rulebook(backend, sites, 2, shape, 3, subm=True)
    _, shuffled, shuffled_num = rulebook(backend, sites[shuffle], 2, shape, 3, subm=True)
    assert torch.equal(num, shuffled_num)
    for k in range(27):
        renamed = {(int(shuffle[i]), int(shuffle[o])) for i, o in pairs_of(shuffled, num, k)}
        assert renamed == {(i, o) for i, o in pairs_of(pairs, num, k)}


# A dense convolution as an independent oracle -------------------------------------------------------------------------


def dense_answer(
    sites: torch.Tensor, out: torch.Tensor, pairs: torch.Tensor, num: torch.Tensor, shape: list[int], batch: int,
    kernel: list[int], **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Convolution of random integer features, once over the dense grid and once by the pairs; exact in float64."""
    g = torch.Generator().manual_seed(0)
    features = torch.randint(1, 50, (len(sites),), generator=g).double()
    weight = torch.randint(1, 1000, (len(num),), generator=g).double()
    grid = torch.zeros(batch, *shape, dtype=torch.float64)
    grid[tuple(sites.long().T)] = features
    by_pairs = torch.zeros(len(out), dtype=torch.float64)
    for k in range(len(num)):
        i, o = pairs[k, :, : num[k]].long()
        by_pairs.index_add_(0, o, features[i] * weight[k])
    transpose = options.pop("transpose", False)
    if len(shape) == 3:
        convolve = F.conv_transpose3d if transpose else F.conv3d
    else:
        convolve = F.conv_transpose2d if transpose else F.conv2d
    # The rulebook's offset k of an ordinary convolution is the tap of torch's cross-correlation.
    dense = convolve(grid[:, None], weight.view(1, 1, *kernel), **options)[:, 0]
    return dense, by_pairs


axis = st.tuples(
    st.integers(3, 7), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.integers(0, 1)
)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=30, deadline=None)
@given(axes=st.lists(axis, min_size=2, max_size=3), transpose=st.booleans(), seed=st.integers(0, 2**20))
def test_pairs_say_what_a_dense_convolution_computes(name: str, axes: list[Any], transpose: bool, seed: int) -> None:
    shape, kernel, stride, padding, dilation, extra = (list(v) for v in zip(*axes, strict=True))
    extra = (
        [min(e, max(s, d) - 1) for e, s, d in zip(extra, stride, dilation, strict=True)]
        if transpose
        else [0] * len(axes)
    )
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    try:
        grid = triops.sparse_output_shape(shape, kernel, **options, out_padding=extra, transpose=transpose)
    except ValueError:
        return
    g = torch.Generator().manual_seed(seed)
    occupied = torch.rand(2, *shape, generator=g) < 0.3
    sites = occupied.nonzero().int()
    sites = sites[torch.randperm(len(sites), generator=g)]
    out, pairs, num = rulebook(name, sites, 2, shape, kernel, **options, out_padding=extra, transpose=transpose)
    if transpose:
        options |= {"output_padding": extra, "transpose": True}
    dense, by_pairs = dense_answer(sites, out, pairs, num, shape, 2, kernel, **options)
    assert list(dense.shape[1:]) == grid
    assert torch.equal(dense.nonzero().int(), out), "exactly the outputs that the occupancy reaches"
    assert torch.equal(dense[tuple(out.long().T)], by_pairs)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1, 3, 5]), st.integers(1, 2)), min_size=2, max_size=3),
       st.integers(0, 2**20))  # fmt: skip
def test_submanifold_pairs_say_what_a_dense_convolution_computes(name: str, axes: list[Any], seed: int) -> None:
    shape, kernel, dilation = (list(v) for v in zip(*axes, strict=True))
    g = torch.Generator().manual_seed(seed)
    sites = (torch.rand(2, *shape, generator=g) < 0.4).nonzero().int()
    sites = sites[torch.randperm(len(sites), generator=g)]
    out, pairs, num = rulebook(name, sites, 2, shape, kernel, dilation=dilation, subm=True)
    padding = [k // 2 * d for k, d in zip(kernel, dilation, strict=True)]
    dense, by_pairs = dense_answer(sites, out, pairs, num, shape, 2, kernel, padding=padding, dilation=dilation)
    assert torch.equal(dense[tuple(out.long().T)], by_pairs)


# The seed's network cases ---------------------------------------------------------------------------------------------


def test_submanifold_network_case_counts_what_a_dense_convolution_of_the_occupancy_counts() -> None:
    shape = [41, 1440, 1440]
    sites = scenes.lidar_sites(248_636, (41, 1440, 1440), 4)
    sites = sites[sites[:, 0] == 0]
    _, _, num = triops.get_indice_pairs(sites, 4, shape, 3, padding=1, subm=True)
    occupied = torch.zeros(1, 1, *shape)
    position = tuple(sites[:, 1:].long().T)
    occupied[0, 0][position] = 1
    for axis in range(3):  # a box filter is three short ones
        window = [1, 1, 1]
        window[axis] = 3
        occupied = F.avg_pool3d(occupied, window, 1, [w // 2 for w in window], divisor_override=1)
    total = int(occupied[0, 0][position].sum(dtype=torch.float64))
    assert int(num.sum()) == total
    assert 3.3 < total / len(sites) < 4.0, "LiDAR-like: about 3.7 active neighbours of 27"


def test_stride_2_network_case_has_the_outputs_of_a_dense_pooling_of_the_occupancy() -> None:
    sites = scenes.lidar_sites(149_100, (11, 360, 360), 4, reach=0.22, roughness=0.1)
    out, _, num = triops.get_indice_pairs(sites, 4, [11, 360, 360], 3, stride=2, padding=[0, 1, 1])
    occupied = torch.zeros(4, 1, 11, 360, 360)
    occupied[:, 0][tuple(sites.long().T)] = 1
    dense = F.conv3d(occupied, torch.ones(1, 1, 3, 3, 3), stride=2, padding=(0, 1, 1))[:, 0]
    assert torch.equal(dense.nonzero().int(), out)
    assert int(num.sum()) == int(dense.sum(dtype=torch.float64))
    assert 50_000 < len(out) < 60_000


# Compact forms --------------------------------------------------------------------------------------------------------


def test_compact_pairs_are_the_pairs_without_the_filling() -> None:
    sites = scenes.lidar_sites(300, (6, 40, 40), 2)
    out, pairs, num = triops.get_indice_pairs(sites, 2, [6, 40, 40], 3, stride=2, padding=1)
    compact_out, compact, offsets = compact_indice_pairs(sites, 2, [6, 40, 40], 3, stride=2, padding=1)
    assert torch.equal(out, compact_out)
    assert torch.equal(offsets.diff().int(), num)
    assert torch.equal(compact, torch.cat([pairs[k, :, : num[k]] for k in range(27)], 1))


def test_neighbour_tables_are_inverse_to_each_other() -> None:
    sites = scenes.lidar_sites(300, (6, 40, 40), 2)
    out, inputs, outputs = sparse_neighbors(sites, 2, [6, 40, 40], 3, stride=2, padding=1)
    _, pairs, num = triops.get_indice_pairs(sites, 2, [6, 40, 40], 3, stride=2, padding=1)
    assert inputs.shape == (27, len(out))
    for k in range(27):
        i, o = pairs[k, :, : num[k]].long()
        assert torch.equal(outputs[k, i].long(), o)
        assert torch.equal(inputs[k, o].long(), i)
        assert int((inputs[k] >= 0).sum()) == int((outputs[k] >= 0).sum()) == int(num[k])


def test_submanifold_table_flipped_is_the_table_of_the_backward_pass() -> None:
    sites = scenes.lidar_sites(300, (6, 40, 40), 2)
    table = submanifold_neighbors(sites, 2, [6, 40, 40], 3)
    _, pairs, num = triops.get_indice_pairs(sites, 2, [6, 40, 40], 3, subm=True)
    for k in range(27):
        i, o = pairs[k, :, : num[k]].long()
        assert torch.equal(table[k, o].long(), i)
        assert torch.equal(table.flip(0)[k, i].long(), o)


# The mechanism --------------------------------------------------------------------------------------------------------


@pytest.mark.versions
@pytest.mark.parametrize("subm", [False, True])
def test_compiles_in_a_function_that_uses_the_result(subm: bool) -> None:
    def weighted(sites: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        out, pairs, num = triops.get_indice_pairs(sites, 2, [6, 40, 40], 3, padding=1, subm=subm)
        result = torch.zeros(out.shape[0], dtype=features.dtype)
        for k in range(27):
            inputs, outputs = pairs[k, 0].long(), pairs[k, 1].long()
            present = (inputs >= 0).to(features.dtype)
            result = result.index_add(0, outputs.clamp(min=0), features[inputs.clamp(min=0)] * present * (k + 1))
        return result + num.sum()

    compiled = torch.compile(weighted, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        sites = scenes.lidar_sites(200, (6, 40, 40), 2, seed=seed)
        features = torch.rand(200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(compiled(sites, features), weighted(sites, features))


def test_output_shapes() -> None:
    assert triops.sparse_output_shape([41, 1440, 1440], 3, padding=1, subm=True) == [41, 1440, 1440]
    assert triops.sparse_output_shape([11, 360, 360], [3, 3, 3], [2, 2, 2], [0, 1, 1]) == [5, 180, 180]
    assert triops.sparse_output_shape(10, 3, dilation=4) == [2]


def test_results_do_not_hang_on_the_number_of_threads() -> None:
    sites = scenes.lidar_sites(60_000, (41, 400, 400), 2)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(
                [
                    *triops.get_indice_pairs(sites, 2, [41, 400, 400], 3, subm=True),
                    *triops.get_indice_pairs(sites, 2, [41, 400, 400], 3, stride=2, padding=1),
                ]
            )
    finally:
        torch.set_num_threads(before)
    assert_same(tuple(results[1]), tuple(results[0]))
    assert_same(tuple(results[2]), tuple(results[0]))


def test_a_number_that_a_failed_call_left_behind_is_not_waited_for_again() -> None:
    device = torch.device("cpu")
    left_behind = pinned.pinned_counter(device)
    left_behind.expect()
    assert pinned.pinned_counter(device) is not left_behind
    assert pinned.pinned_counter(device) is pinned.pinned_counter(device)


HUGE = [2**20, 2**20, 2**20]  # outputs are sorted there, not marked


@pytest.mark.parametrize("shape", [[9, 9, 9], HUGE], ids=["marked", "sorted"])
def test_more_pairs_than_int32_numbers(shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The 54 pairs of two adjacent sites, where 40 is as far as the kernel counts in int32."""
    sites = [[0, 4, 4, 4], [0, 4, 4, 5]]
    expected = rulebook("reference", sites, 1, shape, 3, padding=1)
    monkeypatch.setattr(strided_cpu, "MAX_INT32", 40)
    assert_same(rulebook("cpu", sites, 1, shape, 3, padding=1), expected)
    monkeypatch.setattr(strided_cpu, "MAX_INT32", 35)
    with pytest.raises(ValueError, match=r"output sites must be at most .* got 36"):
        rulebook("cpu", sites, 1, shape, 3, padding=1)


def test_output_sites_are_counted_first_where_the_worst_case_would_take_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sites = torch.tensor([[0, 4, 4, 4], [0, 4, 4, 5]], dtype=torch.int32, device=GPU)
    ones, zeros = (1, 1, 1), (0, 0, 0)
    convolution = strided_gpu.plan(1, (9, 9, 9), (3, 3, 3), ones, ones, ones, zeros, False)
    total = torch.empty(1, dtype=torch.int32, device=GPU)
    assert len(strided_gpu.output_sites(sites, convolution).list_most_sites(total)) == 54
    monkeypatch.setattr(strided_gpu, "MAX_UNCOUNTED", 54 * 16 - 1)
    assert len(strided_gpu.output_sites(sites, convolution).list_most_sites(total)) == 36
    assert total.tolist() == [36]
    expected = rulebook("reference", sites.cpu(), 1, [9, 9, 9], 3, padding=1)
    assert_same(rulebook("gpu", sites, 1, [9, 9, 9], 3, padding=1), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU is waited for")
def test_a_number_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "SPINS", 0)
    sites = torch.tensor([[0, 2], [0, 3]], dtype=torch.int32, device="cuda")
    assert triops.get_indice_pairs(sites, 1, 8, 3, padding=1)[0].tolist() == [[0, 1], [0, 2], [0, 3], [0, 4]]
