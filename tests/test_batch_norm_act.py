"""Facts about batch normalisation with its activation."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import run
from torch import Tensor, nn

import triops
from triops.nn import SparseConvTensor, SparseSequential, sparse_modules

TORCH: dict[str, Any] = {
    "none": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "gelu": F.gelu,
    "silu": F.silu,
}


@pytest.mark.parametrize("backend", ["reference", "cpu", "gpu"])
def test_by_hand(backend: str) -> None:
    x = torch.tensor(
        [[1.0, 0.0], [3.0, 4.0], [5.0, 8.0], [99.0, 99.0]]
    )  # of the first three: means 3, 4; squares 8, 32
    args = (x, torch.tensor([2.0, 1.0]), torch.tensor([0.0, 1.0]), torch.zeros(2), torch.ones(2),
            torch.tensor([3], dtype=torch.int32), True, 0.5, 0.0, "relu", 0.0)  # fmt: skip
    out, statistics, running = (t.cpu() for t in run(backend, "batch_norm_act", args))
    far = 1.5**0.5  # a deviation from the mean in deviations
    assert torch.allclose(out, torch.tensor([[0, 0], [0, 1], [2 * far, 1 + far], [0, 0]]))
    assert torch.allclose(statistics, torch.tensor([[3.0, 4.0], [(3 / 8) ** 0.5, (3 / 32) ** 0.5]]))
    assert torch.allclose(running, torch.tensor([[1.5, 2.0], [2.5, 8.5]]))  # unbiased variances 4 and 16


def test_equal_rows_become_0_where_a_plain_division_is_approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():  # the interpreter divides exactly: multiply by the reciprocal, as a GPU does
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(
            interpreter.InterpreterBuilder, "create_fdiv",
            lambda builder, a, b: builder.binary_op(a, b, lambda a, b: a * np.reciprocal(b)),
        )  # fmt: skip
    for rows in (41, 47, 55, 61, 83):  # of which 1 / rows times rows is less than 1 in float32
        x = torch.full((rows, 3), 1000.0)
        args = x, None, None, None, None, None, True, 0.1, 1e-3, "none", 0.0
        out, statistics, _ = run("gpu", "batch_norm_act", args)
        assert out.abs().max() == 0
        back = x, x, None, None, statistics, None, True, "none", 0.0
        assert run("gpu", "batch_norm_act_backward", back)[0].abs().max() == 0


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", TORCH)
def test_it_is_torchs_own_with_gradients_and_running_values(activation: str, training: bool, affine: bool) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6, generator=g, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(2, 6, generator=g, dtype=torch.float64).requires_grad_() if affine else (None, None)
    grad = torch.randn(50, 6, generator=g, dtype=torch.float64)
    inputs = [x] if weight is None else [x, weight, bias]
    results = []
    for own in (True, False):
        mean, var = torch.full((6,), 0.5).double(), torch.full((6,), 2.0).double()
        if own:
            out = triops.batch_norm_act(x, mean, var, weight, bias, training, 0.3, 1e-3, activation, 0.2)
        else:
            out = TORCH[activation](F.batch_norm(x, mean, var, weight, bias, training, 0.3, 1e-3))
        results.append([out, mean, var, *torch.autograd.grad(out, inputs, grad)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "cpu", "gpu"])
def test_rows_that_do_not_count_change_nothing_and_get_nothing(backend: str) -> None:
    g = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, 40, 5, generator=g)
    x[30:] = float("nan")
    rest: tuple[Any, ...] = (None, None, None, None)
    options = (True, 0.1, 1e-5, "silu", 0.0)
    out, statistics, _ = run(backend, "batch_norm_act", (x, *rest, torch.tensor([30]).int(), *options))
    alone, same, _ = run(backend, "batch_norm_act", (x[:30], *rest, None, *options))
    torch.testing.assert_close(out[:30], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(statistics, same, rtol=1e-5, atol=1e-6)
    assert (out[30:] == 0).all()
    gradient = run(
        backend, "batch_norm_act_backward",
        (grad, x, None, None, statistics.cpu(), torch.tensor([30]).int(), True, "silu", 0.0),
    )[0]  # fmt: skip
    assert (gradient[30:] == 0).all()
    assert gradient[:30].isfinite().all()


def test_without_rows_the_running_values_stay() -> None:
    for x, active in ((torch.zeros(0, 3), None), (torch.ones(4, 3), torch.zeros(1).int())):
        mean, var = torch.full((3,), 0.5), torch.full((3,), 2.0)
        triops.batch_norm_act(x, mean, var, training=True, active=active)
        assert (mean == 0.5).all()
        assert (var == 2).all()


def sparse(rows: int, channels: int, dtype: torch.dtype = torch.float64) -> SparseConvTensor:
    indices = torch.stack([torch.zeros(rows), torch.arange(rows)], 1).int()
    features = torch.randn(rows, channels, generator=torch.Generator().manual_seed(rows), dtype=dtype)
    return SparseConvTensor(features.requires_grad_(), indices, [rows], 1)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, also without one."""
    monkeypatch.setattr(sparse_modules, "_is_fused", lambda norm, x: sparse_modules._is_own_norm(norm))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "act", [nn.ReLU(), nn.LeakyReLU(0.3), nn.GELU(), nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.GELU(approximate="tanh")],
    ids=repr,
)  # fmt: skip
def test_a_sequence_in_training_gives_what_its_modules_give(act: nn.Module, momentum: Any, fused: None) -> None:
    net = SparseSequential(nn.BatchNorm1d(4, momentum=momentum), act, nn.BatchNorm1d(4, affine=False)).double()
    plain = copy.deepcopy(net)
    for step in range(3):
        x = sparse(20 + step, 4)
        together = net(x).features
        one_by_one = x.features
        for module in plain.children():
            one_by_one = module(one_by_one)
        torch.testing.assert_close(together, one_by_one, rtol=1e-10, atol=1e-12)
        both = together, one_by_one
        grads = (torch.autograd.grad(y.square().sum(), x.features, retain_graph=True)[0] for y in both)
        torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-10, atol=1e-12)


def test_a_sequence_in_evaluation_gives_what_its_modules_give(fused: None) -> None:
    net = SparseSequential(nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4, track_running_stats=False)).double()
    net(sparse(30, 4))
    net.eval()
    x = sparse(20, 4)
    expected = x.features
    for module in net.children():
        expected = module(expected)
    before = net.state_dict()["0.running_mean"].clone()
    torch.testing.assert_close(net(x).features, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(net.state_dict()["0.running_mean"], before)


def test_a_module_with_a_hook_is_called_itself(fused: None) -> None:
    seen: list[Tensor] = []
    net = SparseSequential(nn.BatchNorm1d(3), nn.ReLU()).double()
    net[1].register_forward_hook(lambda module, args, output: seen.append(output))
    out = net(sparse(9, 3))
    assert torch.equal(seen[0], out.features)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sparse(9, 3)
    x.active = torch.tensor([5], dtype=torch.int32)
    net = SparseSequential(nn.BatchNorm1d(3)).double()
    monkeypatch.setattr(sparse_modules, "fused_norm", False)
    torch.testing.assert_close(net(x).features, copy.deepcopy(net)[0](x.features))


def test_behind_a_capacity_only_active_rows_count() -> None:
    x = sparse(12, 3)
    x.active = torch.tensor([8], dtype=torch.int32)
    for net in (SparseSequential(nn.BatchNorm1d(3)), SparseSequential(nn.BatchNorm1d(3), nn.ReLU())):
        alone = copy.deepcopy(net).double()
        out = net.double()(x).features
        expected = alone[1](alone[0](x.features[:8])) if len(net) == 2 else alone[0](x.features[:8])
        torch.testing.assert_close(out[:8], expected)
        assert (out[8:] == 0).all()
        torch.testing.assert_close(net[0].running_var, alone[0].running_var)


def test_one_row_is_refused_in_training_as_torch_refuses_it(fused: None) -> None:
    with pytest.raises(ValueError, match="more than one row"):
        SparseSequential(nn.BatchNorm1d(3), nn.ReLU()).double()(sparse(1, 3))


def test_a_sequence_in_training_compiles(fused: None) -> None:
    net = SparseSequential(nn.BatchNorm1d(3), nn.ReLU()).double()
    expected = copy.deepcopy(net)
    x = sparse(9, 3)

    def step(features: Tensor) -> Tensor:
        return net(x.replace_feature(features)).features

    torch._dynamo.reset()
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(x.features)
    torch.testing.assert_close(out, expected(x).features)
    torch.testing.assert_close(net[0].running_mean, expected[0].running_mean)
