"""Facts about sigmoid_focal_loss."""

from __future__ import annotations

import math

import pytest
import torch
from support import run
from torch.nn import functional

import triops
from triops.compat._mmcv_losses import FUNCTIONS


def focal(score: float, hit: bool, gamma: float = 2.0, alpha: float = 0.25) -> float:
    """One value by the formula of the paper."""
    p = 1 / (1 + math.exp(-score))
    return -alpha * (1 - p) ** gamma * math.log(p) if hit else -(1 - alpha) * p**gamma * math.log(1 - p)


def test_every_value_follows_the_formula() -> None:
    scores = torch.tensor([[0.0, 1.0, -2.0], [3.0, -1.0, 0.5]])
    loss = triops.sigmoid_focal_loss(scores, torch.tensor([2, 0]), reduction="none")
    expected = [[focal(s, c == t) for c, s in enumerate(row)] for row, t in zip(scores.tolist(), (2, 0), strict=True)]
    torch.testing.assert_close(loss, torch.tensor(expected))


@pytest.mark.parametrize("background", [3, 4, -1, -(2**62), 2**62])
def test_a_target_outside_of_the_classes_is_background(background: int) -> None:
    loss = triops.sigmoid_focal_loss(torch.zeros(1, 3), torch.tensor([background]), reduction="none")
    torch.testing.assert_close(loss, torch.full((1, 3), focal(0.0, False)))


def test_the_mean_is_over_rows_and_not_over_values() -> None:
    scores, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 4])
    total = triops.sigmoid_focal_loss(scores, target, reduction="none").sum()
    torch.testing.assert_close(triops.sigmoid_focal_loss(scores, target), total / 5)
    torch.testing.assert_close(triops.sigmoid_focal_loss(scores, target, reduction="sum"), total)


def test_a_row_counts_by_the_weight_of_its_target_and_background_by_one() -> None:
    scores, target = torch.zeros(3, 2), torch.tensor([0, 1, 2])
    plain = triops.sigmoid_focal_loss(scores, target, reduction="none")
    weighted = triops.sigmoid_focal_loss(scores, target, weight=torch.tensor([2.0, 5.0]), reduction="none")
    torch.testing.assert_close(weighted, plain * torch.tensor([[2.0], [5.0], [1.0]]))


def test_without_focus_and_balance_it_is_half_the_binary_cross_entropy() -> None:
    scores, target = torch.randn(50, 6), torch.randint(0, 6, (50,))
    loss = triops.sigmoid_focal_loss(scores, target, gamma=0.0, alpha=0.5, reduction="none")
    hit = functional.one_hot(target, 6).float()
    torch.testing.assert_close(2 * loss, functional.binary_cross_entropy_with_logits(scores, hit, reduction="none"))


@pytest.mark.parametrize("backend", ["reference", "cpu", "gpu"])
def test_a_score_that_is_far_off_costs_its_distance(backend: str) -> None:
    """mmcv's logarithm stops at the smallest float32, so its loss stops growing at 87."""
    args = torch.tensor([[-500.0, 500.0]]), torch.tensor([0]), None, 2.0, 0.25
    assert run(backend, "sigmoid_focal_loss", args).tolist() == [[125.0, 375.0]]
    grad = run(backend, "sigmoid_focal_loss_backward", (torch.ones(1, 2), *args))
    assert grad.tolist() == [[-0.25, 0.75]]


def test_half_precision_is_computed_in_float32() -> None:
    scores, target = torch.randn(200, 3).half(), torch.randint(0, 4, (200,))
    loss = triops.sigmoid_focal_loss(scores, target, reduction="none")
    torch.testing.assert_close(
        loss, triops.sigmoid_focal_loss(scores.double(), target, reduction="none").half(), rtol=1e-3, atol=0
    )
    big = torch.full((70_000, 1), -60.0).half()  # the sum is beyond float16, the mean is not
    mean = triops.sigmoid_focal_loss(big, torch.zeros(70_000, dtype=torch.int64))
    torch.testing.assert_close(mean, torch.tensor(15.0).half())


def test_no_rows_have_no_loss() -> None:
    scores = torch.zeros(0, 3, requires_grad=True)
    loss = triops.sigmoid_focal_loss(scores, torch.zeros(0, dtype=torch.int64), reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert triops.sigmoid_focal_loss(scores, torch.zeros(0, dtype=torch.int64)).isnan()


def test_a_second_derivative_is_refused() -> None:
    scores = torch.zeros(2, 3, requires_grad=True)
    loss = triops.sigmoid_focal_loss(scores, torch.tensor([0, 1]), reduction="sum")
    (grad,) = torch.autograd.grad(loss, scores, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        grad.sum().backward()


# mmcv's extension functions


@pytest.mark.parametrize("weight", [torch.empty(0), torch.tensor([2.0, 0.5, 1.0])])
def test_mmcv_fills_the_tensors_it_is_given(weight: torch.Tensor) -> None:
    scores, target = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 1, 2, 3, -1, 1])
    weights = weight if len(weight) else None
    expected = triops.sigmoid_focal_loss(scores, target, 1.5, 0.3, weights, "none")
    (slope,) = torch.autograd.grad(expected.sum(), scores)
    loss, grad = torch.zeros(6, 3), torch.zeros(6, 3)
    FUNCTIONS["sigmoid_focal_loss_forward"](scores.detach(), target, weight, loss, gamma=1.5, alpha=0.3)
    FUNCTIONS["sigmoid_focal_loss_backward"](scores.detach(), target, weight, grad, gamma=1.5, alpha=0.3)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, slope)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.5])
def test_mmcvs_softmax_focal_loss_has_the_gradient_of_its_formula(gamma: float) -> None:
    scores, target = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 1, -1, 2])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    softmax = scores.softmax(1)
    p = softmax[torch.arange(5), target.clamp(min=0)]
    expected = -0.25 * weight[target.clamp(min=0)] * (target >= 0) * (1 - p).pow(gamma) * p.log()
    (slope,) = torch.autograd.grad(expected.sum(), scores)
    loss, buffer, grad = p.new_zeros(5), p.new_zeros(5), p.new_zeros(5, 4)
    FUNCTIONS["softmax_focal_loss_forward"](softmax.detach(), target, weight, loss, gamma=gamma, alpha=0.25)
    FUNCTIONS["softmax_focal_loss_backward"](softmax.detach(), target, weight, buffer, grad, gamma=gamma, alpha=0.25)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, slope)
