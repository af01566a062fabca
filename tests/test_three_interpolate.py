"""Facts about three_interpolate: by hand, and against what torch computes."""

from __future__ import annotations

import pytest
import torch
from support import run

import triops

BACKENDS = ["reference", "cpu", "gpu"]
FEATURES = torch.tensor([[[10.0, 20, 40], [1, 2, 4]]])  # [1, 2, 3]
INDICES = torch.tensor([[[0, 1, 2], [2, 2, -1]]], dtype=torch.int32)
WEIGHTS = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.5, 9.0]]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_places_are_weighted_sums_and_minus_1_adds_nothing(backend: str) -> None:
    planes = run(backend, "three_interpolate", (FEATURES, INDICES, WEIGHTS, False))
    assert planes.tolist() == [[[20, 60], [2, 6]]]
    rows = run(backend, "three_interpolate", (FEATURES.mT, INDICES, WEIGHTS, True))
    assert torch.equal(rows, planes.mT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_go_to_features_and_weights(backend: str) -> None:
    grad = torch.tensor([[[1.0, 2], [0, 4]]])
    of_features, of_weights = run(
        backend, "three_interpolate_backward", (grad, FEATURES, INDICES, WEIGHTS, False, True)
    )
    assert of_features.tolist() == [[[0.5, 0.25, 0.25 + 2 * 1.5], [0, 0, 6]]]
    assert of_weights.tolist() == [[[10, 20, 40], [96, 96, 0]]]
    spared = run(backend, "three_interpolate_backward", (grad, FEATURES, INDICES, WEIGHTS, False, False))
    assert torch.equal(spared[0], of_features)
    assert spared[1].shape == (0,)


def test_many_channels_go_through_rows_on_a_gpu_however_they_lie() -> None:
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(-8, 9, (2, 70, 12), generator=draw).half()
    index = torch.randint(-1, 70, (2, 300, 3), generator=draw)
    weights = torch.randint(0, 3, (2, 300, 3), generator=draw).half()
    grad = torch.randint(-8, 9, (2, 12, 300), generator=draw).half()
    for features in (rows.mT, rows.mT.contiguous()):
        for operator, args in (
            ("three_interpolate", (features, index, weights, False)),
            ("three_interpolate_backward", (grad, features, index, weights, False, True)),
        ):
            expected, found = (run(backend, operator, args) for backend in ("reference", "gpu"))
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
                assert torch.equal(a.cpu(), b)  # sums of small integers are exact


def test_a_point_that_is_not_finite_stays_with_its_own_places() -> None:
    features = FEATURES.clone()
    features[0, :, 0] = torch.inf
    for backend in BACKENDS:
        found = run(backend, "three_interpolate", (features, INDICES, WEIGHTS, False))
        assert found[0, 0].tolist() == [torch.inf, 60]


@pytest.mark.parametrize("wild", [torch.inf, torch.nan])
@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_1_adds_nothing_even_with_a_weight_or_a_gradient_that_is_not_finite(backend: str, wild: float) -> None:
    weights = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.5, wild]]])
    assert run(backend, "three_interpolate", (FEATURES, INDICES, weights, False)).tolist() == [[[20, 60], [2, 6]]]
    assert run(backend, "three_interpolate", (FEATURES.mT, INDICES, weights, True)).mT.tolist() == [[[20, 60], [2, 6]]]
    grad = torch.tensor([[[1.0, wild], [0, 4]]])
    of_features, of_weights = run(
        backend, "three_interpolate_backward", (grad, FEATURES, INDICES, weights, False, True)
    )
    assert of_features[0, 1].tolist() == [0, 0, 6]
    assert of_weights[0, 1, 2] == 0


def test_indices_out_of_range_add_nothing_in_kernels_of_the_gpu() -> None:
    wild = torch.tensor([[[0, 1, 2], [2, 2**31 - 1, -(2**31)]]], dtype=torch.int32)
    assert run("gpu", "three_interpolate", (FEATURES, wild, WEIGHTS, False)).tolist() == [[[20, 40], [2, 4]]]
    of_features, of_weights = run(
        "gpu", "three_interpolate_backward", (torch.ones(1, 2, 2), FEATURES, wild, WEIGHTS, False, True)
    )
    assert of_features[0, 0].tolist() == [0.5, 0.25, 1.25]
    assert of_weights[0, 1].tolist() == [44, 0, 0]


def test_rows_of_all_clouds_are_what_indexing_gives() -> None:
    draw = torch.Generator().manual_seed(0)
    features, weights = torch.randn(9, 4, generator=draw, requires_grad=True), torch.rand(6, 5, generator=draw)
    index = torch.randint(0, 9, (6, 5), generator=draw)
    found = triops.three_interpolate(features, index, weights)
    torch.testing.assert_close(found, (features[index] * weights[..., None]).sum(1))
    compiled = torch.compile(triops.three_interpolate, backend="aot_eager", fullgraph=True)(features, index, weights)
    assert torch.equal(compiled, found)
