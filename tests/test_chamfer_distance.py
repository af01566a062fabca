"""Facts about chamfer_distance, by hand and against autograd of the plain formulation."""

from __future__ import annotations

import math

import pytest
import torch
from support import run

import triops

BACKENDS = ["reference", "cpu", "gpu"]
ONE = torch.tensor([[[0.0, 0], [3, 0], [3, 4]]])
TWO = torch.tensor([[[1.0, 0], [3, 2], [-1, 0]]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_squared_distances_and_of_equals_the_lower_index(backend: str) -> None:
    near1, near2, idx1, idx2 = run(backend, "chamfer_distance", (ONE, TWO))
    assert (near1.tolist(), idx1.tolist()) == ([[1, 4, 4]], [[0, 0, 1]])  # (3, 0) is as far from (1, 0) as from (3, 2)
    assert (near2.tolist(), idx2.tolist()) == ([[1, 4, 1]], [[0, 1, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_is_at_inf_and_has_no_gradient(backend: str) -> None:
    broken = torch.tensor([[[math.nan, 0], [0, 0]]])
    near1, near2, idx1, idx2 = run(backend, "chamfer_distance", (broken, TWO))
    assert (near1.tolist(), idx1.tolist()) == ([[math.inf, 1]], [[-1, 0]])
    assert idx2.tolist() == [[1, 1, 1]]
    grads = run(backend, "chamfer_distance_backward",
                (broken, TWO, idx1, idx2, torch.ones_like(near1), torch.ones_like(near2)))  # fmt: skip
    assert grads[0].tolist() == [[[0, 0], [-8, -4]]]  # its own nearest: -2; as the others': -2, (-6, -4), 2


def test_indices_that_are_not_there_are_passed_over_on_a_gpu() -> None:
    index = torch.tensor([[7, -9, 2**31 - 1]], dtype=torch.int32)
    for exact in (False, True):
        torch.use_deterministic_algorithms(exact)
        try:
            grads = run(
                "gpu", "chamfer_distance_backward", (ONE, TWO, index, index, torch.ones(1, 3), torch.ones(1, 3))
            )
        finally:
            torch.use_deterministic_algorithms(False)
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exact", [False, True])
def test_gradients_are_those_of_the_plain_formulation(backend: str, exact: bool) -> None:
    g = torch.Generator().manual_seed(0)
    one, two = (torch.rand(2, n, 3, generator=g, dtype=torch.float64) for n in (80, 50))
    one, two = one.requires_grad_(), two.requires_grad_()
    squares = (one[:, :, None] - two[:, None]).square().sum(3)
    weights = torch.rand(2, 80, generator=g, dtype=torch.float64), torch.rand(2, 50, generator=g, dtype=torch.float64)
    loss = (squares.amin(2) * weights[0]).sum() + (squares.amin(1) * weights[1]).sum()
    expected = torch.autograd.grad(loss, (one, two))
    points = one.detach(), two.detach()
    indices = run(backend, "chamfer_distance", points)[2:]
    torch.use_deterministic_algorithms(exact)
    try:
        found = run(backend, "chamfer_distance_backward", (*points, *indices, *weights))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, expected)


def test_autograd_of_half_points() -> None:
    one = ONE.half().requires_grad_()
    near1, near2, *_ = triops.chamfer_distance(one, TWO.half())
    assert near1.dtype == torch.float32
    (near1.sum() + near2.sum()).backward()
    assert one.grad is not None
    assert one.grad.dtype == torch.float16
    assert one.grad.tolist() == [[[-2, 0], [4, -4], [0, 4]]]
