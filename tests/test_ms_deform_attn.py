"""Facts about ms_deform_attn, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import triops
from triops.ops.ms_deform_attn.samples import _by_grid_sample, attention

SHAPES, STARTS = torch.tensor([[2, 3]]), torch.tensor([0])


def look(value: Tensor, x: float, y: float, weight: float = 1.0) -> float:
    """One query, one head, one channel, one point on a map of 2 x 3 pixels."""
    locations = torch.tensor([x, y], dtype=value.dtype).view(1, 1, 1, 1, 1, 2)
    weights = torch.tensor(weight, dtype=value.dtype).view(1, 1, 1, 1, 1)
    return triops.ms_deform_attn(value.view(1, 6, 1, 1), SHAPES, STARTS, locations, weights).item()


def test_a_pixel_is_read_at_its_centre() -> None:
    value = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert look(value, 0.5, 0.25) == 2.0
    assert look(value, 5 / 6, 0.75) == pytest.approx(6.0)


def test_between_pixels_their_values_are_mixed_by_distance() -> None:
    value = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert look(value, 0.5, 0.5) == 3.5
    assert look(value, 0.5, 0.5, weight=-2.0) == -7.0


def test_off_the_map_is_zero_and_the_border_fades_towards_it() -> None:
    value = torch.full((2, 3), 8.0)
    assert look(value, 0.0, 0.25) == 4.0  # half a pixel beyond the first centre
    assert look(value, 0.0, 0.0) == 2.0
    assert look(value, -1 / 6, 0.25) == 0.0
    assert look(value, 1.2, 0.5) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, -1e30])
def test_a_location_that_is_not_on_any_map_reads_zero(bad: float) -> None:
    assert look(torch.full((2, 3), 8.0), bad, 0.5) == 0.0


def test_a_nan_pixel_beside_the_ones_read_does_not_matter() -> None:
    value = torch.tensor([[float("nan"), 2.0, 3.0], [float("nan"), 5.0, 6.0]])
    assert look(value, 0.6, 0.4) == look(torch.nan_to_num(value), 0.6, 0.4)


def test_levels_points_and_heads_are_summed_by_weight() -> None:
    value = torch.tensor([[10.0, 1.0], [20.0, 2.0], [40.0, 4.0]]).view(1, 3, 2, 1)  # two levels: 1 x 2 and 1 x 1
    shapes, starts = torch.tensor([[1, 2], [1, 1]]), torch.tensor([0, 2])
    locations = torch.tensor([[0.25, 0.5], [0.5, 0.5]]).view(1, 1, 1, 2, 1, 2).expand(1, 1, 2, 2, 1, 2)
    weights = torch.tensor([0.25, 0.5]).view(1, 1, 1, 2, 1).expand(1, 1, 2, 2, 1)
    out = triops.ms_deform_attn(value, shapes, starts, locations, weights)
    assert out.tolist() == [[[22.5, 2.25]]]


def test_the_answer_is_that_of_grid_sample() -> None:
    args = attention(2, [(9, 7), (4, 5), (2, 2)], 4, 8, 3, 21)(torch.float64)
    torch.testing.assert_close(triops.ms_deform_attn(*args), _by_grid_sample(*args))


def test_half_features_are_read_at_float32_places() -> None:
    """A map of 400 columns: a half location is off by up to a tenth of a pixel."""
    ramp = torch.arange(400, dtype=torch.float16).view(1, 400, 1, 1)
    locations = torch.tensor([0.7003, 0.5]).view(1, 1, 1, 1, 1, 2)
    args = torch.tensor([[1, 400]]), torch.tensor([0]), locations, torch.ones(1, 1, 1, 1, 1, dtype=torch.float16)
    assert triops.ms_deform_attn(ramp, *args).item() == pytest.approx(279.62, abs=0.13)  # half of a half ulp
    ulp_off = triops.ms_deform_attn(ramp, args[0], args[1], locations.half(), args[3]).item()
    assert ulp_off == pytest.approx(float(locations.half()[..., 0]) * 400 - 0.5, abs=0.13)


def test_gradients_flow_to_value_locations_and_weights() -> None:
    value = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1).requires_grad_()
    locations = torch.tensor([0.375, 0.5]).view(1, 1, 1, 1, 1, 2).requires_grad_()
    weights = torch.tensor(2.0).view(1, 1, 1, 1, 1).requires_grad_()
    out = triops.ms_deform_attn(value, torch.tensor([[1, 2]]), torch.tensor([0]), locations, weights)
    assert out.item() == 3.0  # 2 * (0.75 * 1 + 0.25 * 3)
    out.backward()
    assert value.grad is not None
    assert value.grad.flatten().tolist() == [1.5, 0.5]
    assert weights.grad is not None
    assert weights.grad.item() == 1.5
    assert locations.grad is not None
    # Along x weight * width * (3 - 1); along y the one row fades towards 0 below it: weight * height * -1.5.
    assert locations.grad.flatten().tolist() == [8.0, -3.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="atomics are a GPU's")
def test_deterministic_gradients_repeat_bit_for_bit() -> None:
    value, shapes, starts, locations, weights = (
        t.cuda() for t in attention(1, [(20, 20)], 4, 32, 8, 4000)(torch.float32)
    )
    grad = torch.randn(1, 4000, 128, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            triops.ms_deform_attn_backward(grad, value, shapes, starts, locations, weights)[0] for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)
