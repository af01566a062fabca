"""border_align: hand-computed facts, the worked example first."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, device_of, run
from torch import Tensor

import triops
import triops.nn
from triops import _sample
from triops._op import OPERATORS, reference_backend
from triops.ops.border_align import samples

FORWARD, BACKWARD = "border_align_forward", "border_align_backward"
BACKENDS = OPERATORS[FORWARD].backends
LAYOUTS = [torch.contiguous_format, torch.channels_last]

# output and argmax of the worked example, [top, left, bottom, right] of its 12 boxes
SEED_OUTPUT = [
    [3.0, 6.0, 1.0, 2.0], [4.0, 7.0, -1.0, 1.0], [3.0, 7.0, 1.0, 2.0], [4.0, 6.0, -1.0, 1.0],
    [2.0, 12.0, -1.0, -1.0], [3.0, 12.0, -1.0, 2.0], [3.0, 7.0, 1.0, 2.0], [4.0, 7.0, -1.0, 1.0],
    [6.0, 12.0, -1.0, -2.0], [4.0, 12.0, -1.0, 1.0], [4.0, 9.0, -1.0, 1.0], [4.0, 11.0, -1.0, 1.0],
]  # fmt: skip
SEED_ARGMAX = [
    [1, 0, 0, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 0, 1],
    [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 0, 1],
]  # fmt: skip

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def align(backend: str, features: Tensor, boxes: Any, pool_size: int) -> tuple[Tensor, Tensor]:
    boxes = torch.as_tensor(boxes, dtype=features.dtype)
    output, argmax = run(backend, FORWARD, (features, boxes.reshape(len(features), -1, 4), pool_size))
    return output.cpu(), argmax.cpu()


def constant_groups(*values: float, height: int = 4, width: int = 5) -> Tensor:
    """A map of one channel per edge, each of one value."""
    return torch.tensor(values, dtype=torch.float32).view(1, 4, 1, 1).expand(1, 4, height, width).contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_worked_example_of_the_design_document(backend: str, dtype: torch.dtype, layout: Any) -> None:
    features = torch.tensor([samples.SEED_INPUT], dtype=dtype).contiguous(memory_format=layout)
    output, argmax = align(backend, features, samples.SEED_BOXES, 1)
    assert output.tolist() == [[SEED_OUTPUT]]
    assert argmax.tolist() == [[SEED_ARGMAX]]
    assert argmax.dtype == torch.int32


def test_the_worked_example_in_its_own_order_of_memory(backend: str) -> None:
    nhwc = torch.tensor([samples.SEED_INPUT]).permute(0, 2, 3, 1).contiguous()  # [N, H, W, 4C]
    output, _ = align(backend, nhwc.permute(0, 3, 1, 2), samples.SEED_BOXES, 1)
    assert output.permute(0, 2, 3, 1).tolist() == [[[[v] for v in row] for row in SEED_OUTPUT]]  # [N, K, 4, C]


def test_each_edge_reads_its_own_quarter_of_the_channels(backend: str) -> None:
    output, argmax = align(backend, constant_groups(1, 2, 3, 4), [1, 1, 3, 2], 2)
    assert output.tolist() == [[[[1, 2, 3, 4]]]]
    assert argmax.tolist() == [[[[0, 0, 0, 0]]]]


def test_top_and_left_walk_from_the_first_corner_and_bottom_and_right_from_the_second(backend: str) -> None:
    x, y = torch.arange(6.0).expand(5, 6), torch.arange(5.0)[:, None].expand(5, 6)
    output, argmax = align(backend, torch.stack([x, y, x, y])[None], [1, 1, 4, 3], 3)
    assert output.tolist() == [[[[4, 3, 4, 3]]]]
    assert argmax.tolist() == [[[[3, 3, 0, 0]]]]


def test_samples_between_pixels_are_bilinear(backend: str) -> None:
    plane = torch.tensor([[0.0, 1.0], [10.0, 11.0]])
    output, _ = align(backend, plane.expand(1, 4, 2, 2).contiguous(), [0.25, 0.5, 0.25, 0.5], 1)
    assert output.tolist() == [[[[5.25] * 4]]]


def test_the_first_of_equal_maxima_wins(backend: str) -> None:
    features = constant_groups(0, 0, 0, 0, width=9)
    features[..., 2] = features[..., 6] = 5
    _, argmax = align(backend, features, [0, 1, 8, 1], 8)
    assert argmax[0, 0, 0].tolist() == [2, 0, 2, 0]


def test_a_sample_off_the_map_is_a_zero_that_competes(backend: str) -> None:
    # from x = 3 to x = 7 on a map 5 wide: 3, 4, 5 are on it (5 is clamped to 4), 6 and 7 are off
    output, argmax = align(backend, constant_groups(-1, -1, -1, -1), [3, 1, 7, 2], 4)
    assert output.tolist() == [[[[0, -1, 0, 0]]]]
    assert argmax.tolist() == [[[[3, 0, 0, 0]]]]


def test_one_pixel_beyond_the_map_still_counts_as_its_border(backend: str) -> None:
    on, _ = align(backend, constant_groups(7, 7, 7, 7), [-1, -1, 5, 4], 1)
    assert on.tolist() == [[[[7, 7, 7, 7]]]]
    off, _ = align(backend, constant_groups(7, 7, 7, 7), [-1.001, -1.001, 5.001, 4.001], 1)
    assert off.tolist() == [[[[0, 0, 0, 0]]]]


def test_a_box_without_size_gives_its_one_point_and_step_zero(backend: str) -> None:
    features = torch.arange(4 * 12.0).view(1, 4, 3, 4)
    output, argmax = align(backend, features, [2, 1, 2, 1], 5)
    assert output.tolist() == [[[[6, 18, 30, 42]]]]
    assert argmax.tolist() == [[[[0, 0, 0, 0]]]]


def test_an_inverted_box_is_walked_backwards(backend: str) -> None:
    x = torch.arange(6.0).expand(1, 4, 5, 6).contiguous()
    output, argmax = align(backend, x, [4, 3, 1, 1], 3)
    assert output.tolist() == [[[[4, 4, 4, 1]]]]
    assert argmax.tolist() == [[[[0, 0, 3, 0]]]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_box_that_is_not_finite_samples_nothing(backend: str, value: float) -> None:
    boxes = torch.tensor([1.0, 1.0, 3.0, 2.0]).repeat(4, 1)
    boxes.fill_diagonal_(value)
    output, argmax = align(backend, constant_groups(-7, -7, -7, -7), boxes, 2)
    assert output.tolist() == [[[[0, 0, 0, 0]] * 4]]
    assert not argmax.any()


def test_a_nan_feature_stays_where_it_is_the_first_sample_and_never_wins_later(backend: str) -> None:
    features = constant_groups(1, 1, 1, 1, width=3)
    features[..., 0] = float("nan")
    output, argmax = align(backend, features, [[0, 0, 2, 0], [2, 0, 0, 0]], 1)
    assert output[0, 0, 0].isnan().tolist() == [True, True, False, False]
    assert output[0, 0, 1].isnan().tolist() == [False, False, True, True]
    assert not argmax.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_map_of_one_pixel_or_of_none(backend: str, layout: Any) -> None:
    one, _ = align(backend, constant_groups(1, 2, 3, 4, height=1, width=1), [0, 0, 0, 0], 1)
    assert one.tolist() == [[[[1, 2, 3, 4]]]]
    none, argmax = align(backend, torch.ones(1, 8, 0, 3).contiguous(memory_format=layout), [0, 0, 0, 0], 2)
    assert none.shape == (1, 2, 1, 4)
    assert not none.any()
    assert not argmax.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradient_lie_in_memory_as_the_input_does(backend: str, layout: Any) -> None:
    features = torch.randn(2, 12, 4, 5).contiguous(memory_format=layout)
    output, argmax = align(backend, features, torch.rand(2, 7, 4) * 3, 2)
    assert output.is_contiguous(memory_format=layout)
    assert argmax.is_contiguous(memory_format=layout)
    grad = run(backend, BACKWARD, (torch.ones_like(output), torch.rand(2, 7, 4), argmax, 4, 5, 2))
    assert grad.is_contiguous(memory_format=layout)


def test_float32_boxes_place_samples_of_half_features_exactly(backend: str) -> None:
    features = torch.tensor([0.0, 1024.0]).expand(1, 4, 1, 2).half()
    x = 0.25 + 2**-12  # float16 would round it to 0.25
    output, _ = run(backend, FORWARD, (features, torch.tensor([[[x, 0.0, x, 0.0]]]), 1))
    assert output.flatten().tolist() == [256.25] * 4


def test_positions_are_multiplied_and_divided_as_ieee_says(backend: str) -> None:
    """Ten steps of a tenth of 3.3: accumulating, or a reciprocal, ends beside the pixel."""
    g = torch.Generator().manual_seed(5)
    features, boxes = torch.randn(1, 4, 9, 11, generator=g), torch.rand(1, 300, 4, generator=g) * 9
    expected = run("reference", FORWARD, (features, boxes, 10))
    got = run(backend, FORWARD, (features, boxes, 10))
    assert torch.equal(got[0].cpu(), expected[0])
    assert torch.equal(got[1].cpu(), expected[1])


@given(
    channels=st.integers(1, 5), height=st.integers(1, 5), width=st.integers(1, 5), boxes=st.integers(1, 4),
    pool_size=st.integers(1, 4), scale=st.sampled_from([0.3, 3.0, 30.0]), layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_call_equals_the_reference_bit_for_bit(
    backend: str, channels: int, height: int, width: int, boxes: int, pool_size: int, scale: float, layout: Any,
    seed: int,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(1, 4 * channels, height, width, generator=g).contiguous(memory_format=layout)
    corners = torch.randn(1, boxes, 4, generator=g) * scale
    expected = run("reference", FORWARD, (features, corners, pool_size))
    output, argmax = run(backend, FORWARD, (features, corners, pool_size))
    assert torch.equal(output.cpu(), expected[0])
    assert torch.equal(argmax.cpu(), expected[1])
    args = (torch.randn(expected[0].shape, generator=g), corners, expected[1], height, width, pool_size)
    assert_same(run(backend, BACKWARD, args), run("reference", BACKWARD, args), operator=BACKWARD)


@given(seed=st.integers(0, 10**6), shift=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_shifting_map_and_boxes_together_changes_nothing(backend: str, seed: int, shift: int) -> None:
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(1, 8, 6, 6, generator=g)
    boxes = torch.randint(0, 24, (1, 5, 4), generator=g) / 4  # quarters: a shift is exact
    boxes = boxes.clamp(max=5)
    moved = torch.nn.functional.pad(features, (shift, 1, shift, 1))
    expected, got = align(backend, features, boxes, 4), align(backend, moved, boxes + shift, 4)
    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])


def test_the_gradient_goes_to_the_four_pixels_around_the_winning_sample(backend: str) -> None:
    argmax = torch.tensor([1, 0, 0, 0], dtype=torch.int32).view(1, 1, 1, 4)
    boxes = torch.tensor([[[0.0, 0.5, 1.5, 1.0]]])
    grad = run(backend, BACKWARD, (torch.ones(1, 1, 1, 4), boxes, argmax, 3, 3, 2)).cpu()
    assert grad[0, 0].tolist() == [[0.125, 0.375, 0], [0.125, 0.375, 0], [0, 0, 0]]  # top at (0.75, 0.5)
    assert grad[0, 1].tolist() == [[0.5, 0, 0], [0.5, 0, 0], [0, 0, 0]]  # left at (0, 0.5)
    assert grad[0, 2].tolist() == [[0, 0, 0], [0, 0.5, 0.5], [0, 0, 0]]  # bottom at (1.5, 1)
    assert torch.equal(grad[0, 2], grad[0, 3])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_conserved_over_boxes_on_the_map_and_lost_off_it(backend: str, layout: Any) -> None:
    features = torch.ones(1, 8, 5, 6).contiguous(memory_format=layout)
    boxes = torch.rand(1, 20, 4, generator=torch.Generator().manual_seed(0)) * 4
    boxes[:, 15:] += 100
    _, argmax = align(backend, features, boxes, 3)
    grad = run(backend, BACKWARD, (torch.ones(1, 2, 20, 4), boxes, argmax, 5, 6, 3))
    torch.testing.assert_close(grad.sum((2, 3)).cpu(), torch.full((1, 8), 15.0))


def test_steps_out_of_range_are_an_index_error_on_cpu_and_skipped_on_gpu(backend: str, monkeypatch: Any) -> None:
    boxes, grad_output = torch.ones(1, 3, 4), torch.ones(1, 1, 3, 4)
    argmax = torch.tensor([0, 2**31 - 1, -(2**31)], dtype=torch.int32).view(1, 1, 3, 1).repeat(1, 1, 1, 4)
    if backend == "gpu":
        grad = run(backend, BACKWARD, (grad_output, boxes, argmax, 3, 3, 2)).cpu()
        assert grad.sum() == 4
    else:
        with pytest.raises(IndexError, match="argmax must hold steps from 0 to pool_size = 2"):
            run(backend, BACKWARD, (grad_output, boxes, argmax, 3, 3, 2))


def test_gradcheck_away_from_ties(backend: str) -> None:
    if backend == "gpu" and device_of(backend) == "cpu":
        pytest.skip("autograd reaches the GPU kernels on a GPU only")
    g = torch.Generator().manual_seed(1)
    for layout in LAYOUTS:
        features = torch.randn(1, 8, 3, 4, generator=g, dtype=torch.float64).contiguous(memory_format=layout)
        features = features.to(device_of(backend)).requires_grad_()
        boxes = (torch.rand(1, 3, 4, generator=g, dtype=torch.float64) * 4 - 0.5).to(features.device)
        with reference_backend() if backend == "reference" else nullcontext():
            assert torch.autograd.gradcheck(lambda x, b=boxes: triops.border_align(x, b, 3), features, nondet_tol=1e-12)


def test_a_second_derivative_is_refused(backend: str) -> None:
    features = torch.randn(1, 4, 3, 3, requires_grad=True)
    output = triops.border_align(features, torch.ones(1, 1, 4), 1)
    (grad,) = torch.autograd.grad((output**2).sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        grad.sum().backward()


def test_the_module_is_the_function(backend: str) -> None:
    features, boxes = torch.randn(1, 8, 4, 4), torch.rand(1, 3, 4) * 3
    assert torch.equal(triops.nn.BorderAlign(5)(features, boxes), triops.border_align(features, boxes, 5))


def test_paths_that_small_samples_do_not_reach(backend: str, monkeypatch: Any) -> None:
    """Boxes in order of their fixed coordinate, steps beyond a byte, 64-bit offsets, the scratch split up."""
    if backend != "gpu":
        pytest.skip("of the GPU launcher")
    from triops.ops.border_align import gpu

    for name in ("L2_CACHE", "MANY_BOXES", "BYTE_STEPS", "SCRATCH", "NEEDS_INT64"):
        monkeypatch.setattr(gpu, name, 0)
    monkeypatch.setattr(gpu, "BINS", 4)
    for sample in samples.SAMPLES:
        if "[2, 20, 6, 7]" in sample.name or "degenerate" in sample.name:
            args = sample.make(torch.float32)
            got, expected = (run(b, sample.operator, args) for b in (backend, "reference"))
            assert_same(got, expected, str(sample), operator=sample.operator)


@pytest.mark.parametrize(("samples_", "outputs"), [(0, 0), (0, 2**40), (2**40, 2**40)])
def test_planes_are_read_and_written_in_every_way(samples_: int, outputs: int, backend: str, monkeypatch: Any) -> None:
    if backend != "gpu":
        pytest.skip("of the GPU launcher")
    from triops.ops.border_align import gpu

    monkeypatch.setattr(gpu, "FEW_SAMPLES", samples_)
    monkeypatch.setattr(gpu, "FEW_OUTPUTS", outputs)
    for sample in samples.SAMPLES:
        if sample.operator == "border_align_forward" and "[2, 20, 6, 7]" in sample.name:
            args = sample.make(torch.float32)
            got, expected = (run(b, sample.operator, args) for b in ("gpu", "reference"))
            assert_same(got, expected, str(sample), operator=sample.operator)


def test_the_scratch_of_the_gradient_stays_below_256_mib(backend: str) -> None:
    if backend != "gpu":
        pytest.skip("of the GPU launcher")
    from triops.ops.border_align import gpu

    for batch, channels, pixels in ((2, 256, 15200), (64, 256, 90000), (1, 1, 10**6), (3, 7, 10), (8, 100, 5000)):
        for block in (1, 32):
            images, group = gpu._split(batch, channels, 64 * pixels, block)
            assert 1 <= images <= batch
            assert 1 <= group <= channels
            assert images * group * 64 * pixels <= 256 * 2**20


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cpu_vectors_tiles_and_tables_of_any_size_equal_the_reference_bit_for_bit(
    backend: str, layout: str, dtype: torch.dtype, monkeypatch: Any
) -> None:
    """Channels around a vector, four of them and a tile; boxes around a strip and a table; steps beyond a table."""
    if backend != "cpu":
        pytest.skip("of the CPU kernels")
    from triops.ops.border_align import cpu

    monkeypatch.setattr(cpu, "LOCATED", 400)
    shapes = [(channels, boxes, 2) for channels in (1, 15, 16, 17, 31, 63, 64, 65, 81, 130) for boxes in (3, 37)]
    shapes += [(15, 2, cpu.STEPS - 1), (17, 2, cpu.STEPS), (70, 18, cpu.STEPS + 3)]
    for channels, boxes, pool_size in shapes:
        args = samples._maps((2, channels, 5, 7, boxes, pool_size), layout, "around", seed=channels)(dtype)
        got, expected = run(backend, FORWARD, args), run("reference", FORWARD, args)
        for g, e in zip(got, expected, strict=True):
            assert torch.equal(g, e), (channels, boxes, pool_size)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("placed", ["inside", "around"])
def test_grid_sample_which_the_benchmark_compares_with_gives_the_same_values(
    backend: str, layout: str, placed: str
) -> None:
    if backend != "reference":
        pytest.skip("of the baseline")
    args = samples._maps((2, 5, 6, 7, 30, 4), layout, placed, seed=5)(torch.float32)
    torch.testing.assert_close(samples.grid_sampled(*args), run(backend, FORWARD, args)[0], atol=2e-5, rtol=1e-5)


def test_threads_do_not_change_the_gradient(backend: str) -> None:
    if backend != "cpu":
        pytest.skip("of the CPU launcher")
    sample = next(s for s in samples.SAMPLES if s.operator == BACKWARD and s.scale == "network")
    args, threads = sample.make(torch.float32), torch.get_num_threads()
    results = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            results.append(run(backend, BACKWARD, args))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*_sample.tensors_of(results))
