"""Whole detectors of mmdetection, from the configs that it ships, on triops: they predict, they train, and every
backend agrees.

The networks are small ones (`image_detectors.build`). All else is as shipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import detectors
import image_detectors
from image_detectors import NETWORKS, Outcome
from test_networks import DEVICE


@pytest.fixture(scope="module", params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def own_attention() -> Iterator[Callable[..., Tensor]]:
    """The formulation in torch that mmcv would take on a CPU."""
    with image_detectors.own_attention() as before:
        yield before


@pytest.fixture(scope="module")
def case(name: str) -> tuple[Any, dict[str, Any]]:
    network = NETWORKS[name]
    return image_detectors.build(network, DEVICE, small=True), image_detectors.picture(network)


@pytest.fixture(scope="module")
def clock() -> detectors.Clock:
    return detectors.Clock(DEVICE)


@pytest.fixture(scope="module")
def outcome(case: tuple[Any, dict[str, Any]], clock: detectors.Clock) -> Outcome:
    with clock.on():
        return image_detectors.run(*case)


@pytest.fixture(scope="module")
def grads(outcome: Outcome, clock: detectors.Clock) -> dict[str, Tensor | None]:
    with clock.on():
        return outcome.gradients()


@pytest.fixture(scope="module")
def expected(case: tuple[Any, dict[str, Any]]) -> Outcome:
    return image_detectors.run_reference(*case)


def test_it_predicts_boxes(outcome: Outcome) -> None:
    assert len(outcome.boxes) > 0
    assert len(outcome.boxes) == len(outcome.scores) == len(outcome.labels)
    assert outcome.boxes.isfinite().all()
    assert ((outcome.scores >= 0) & (outcome.scores <= 1)).all()


def test_every_weight_gets_a_finite_gradient(outcome: Outcome, grads: dict[str, Tensor]) -> None:
    assert outcome.parts["loss"] > 0
    assert all(np.isfinite(value) for value in outcome.parts.values())
    assert [name for name, grad in grads.items() if grad is None] == []
    assert [name for name, grad in grads.items() if not grad.isfinite().all()] == []


@pytest.mark.usefixtures("outcome", "grads")
def test_it_runs_on_the_operators_of_triops(name: str, clock: detectors.Clock) -> None:
    called = {operator for operator, _, _ in clock.calls}
    assert NETWORKS[name].operators - called == set()


def test_losses_and_boxes_are_those_of_the_reference(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.parts == pytest.approx(expected.parts, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(outcome.scores, expected.scores, rtol=0, atol=1e-4)
    assert outcome.unlike(expected) == []


def test_gradients_are_those_of_the_reference(outcome: Outcome, grads: dict[str, Tensor]) -> None:
    assert image_detectors.apart(grads, outcome.gradients(by_reference=True)) < 1e-3


def test_attention_is_mmcvs_own_formulation(own_attention: Callable[..., Tensor]) -> None:
    shapes = torch.tensor([[6, 5], [3, 2]], device=DEVICE)
    g = torch.Generator().manual_seed(0)
    value = torch.randn(2, 36, 4, 8, generator=g).to(DEVICE).requires_grad_()
    locations = (torch.rand(2, 7, 4, 2, 3, 2, generator=g) * 1.2 - 0.1).to(DEVICE).requires_grad_()
    weights = torch.rand(2, 7, 4, 2, 3, generator=g).to(DEVICE).requires_grad_()
    ways = image_detectors.attention, own_attention
    results = [way(value, shapes, locations, weights) for way in ways]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    first, second = (torch.autograd.grad(result.square().sum(), (value, locations, weights)) for result in results)
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
