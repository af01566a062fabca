"""Facts about fused networks: the same answers from fewer layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from triops._activations import activate
from triops.nn import (
    Activation,
    AddTable,
    ConcatTable,
    Identity,
    KernelFirstWeight,
    SparseConv3d,
    SparseConvolution,
    SparseConvTensor,
    SparseInverseConv3d,
    SparseReLU,
    SparseSequential,
    SubMConv3d,
    fuse,
)
from triops.ops.sparse_conv.samples import random_sites

pytestmark = pytest.mark.versions


class KernelFirst(KernelFirstWeight, SubMConv3d):
    pass


def tensor(channels: int = 4, dtype: torch.dtype = torch.float32) -> SparseConvTensor:
    return SparseConvTensor(torch.randn(60, channels).to(dtype), random_sites(60, 2, [9, 10, 11]), [9, 10, 11], 2)


def norm(channels: int, **options: bool) -> nn.BatchNorm1d:
    made = nn.BatchNorm1d(channels, **options)
    made.running_mean = torch.randn(channels)
    made.running_var = torch.rand(channels) + 0.5
    if made.affine:
        nn.init.normal_(made.weight)
        nn.init.normal_(made.bias)
    return made


def block(width: int) -> SparseSequential:
    branch = SparseSequential(
        SubMConv3d(width, width, 3, bias=False, indice_key="r"), norm(width), nn.ReLU(),
        SubMConv3d(width, width, 3, indice_key="r"), norm(width),
    )  # fmt: skip
    return SparseSequential(ConcatTable().add(branch).add(Identity()), AddTable(), nn.ReLU())


def network() -> SparseSequential:
    return SparseSequential(
        SubMConv3d(4, 8, 3, bias=False, indice_key="a"), norm(8), nn.ReLU(),
        SparseConv3d(8, 16, 3, 2, 1, indice_key="down"), norm(16, affine=False), nn.LeakyReLU(0.2),
        block(16),
        SparseSequential(KernelFirst(16, 16, 3), norm(16), nn.GELU()),
        SparseInverseConv3d(16, 8, 3, "down", bias=False), norm(8), nn.SiLU(),
        SubMConv3d(8, 8, 1), norm(8), SparseReLU(), nn.Linear(8, 3),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fused_network_gives_what_the_network_gives(dtype: torch.dtype) -> None:
    net = network().to(dtype)
    before = copy.deepcopy(net.state_dict())
    fused, x = fuse(net), tensor(dtype=dtype)
    with torch.no_grad():
        got, expected = fused(x), net(x)
    assert torch.equal(got.indices, expected.indices)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(got.features, expected.features, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items()), "it is left untouched"


def test_batch_norms_activations_and_sums_are_gone() -> None:
    kinds = [type(module) for module in fuse(network()).modules()]
    assert nn.BatchNorm1d not in kinds
    assert not {nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, AddTable, ConcatTable} & set(kinds)
    assert nn.Linear in kinds


def test_a_fused_network_asks_for_no_gradient_and_still_passes_one_on() -> None:
    fused = fuse(network())
    assert not any(p.requires_grad for p in fused.parameters())
    x = tensor()
    x = x.replace_feature(x.features.requires_grad_())
    fused(x).features.sum().backward()
    assert x.features.grad is not None
    assert x.features.grad.any()


@pytest.mark.parametrize("act", ["ReLU", "Sigmoid", "LeakyReLU"])
def test_act_type_of_spconv_is_the_same_with_and_without_gradients(act: str) -> None:
    conv = SparseConvolution(3, 4, 8, subm=True, act_type=Activation[act], act_alpha=0.1)
    x = tensor()
    with torch.no_grad():
        inference = conv(x).features
    torch.testing.assert_close(inference, conv(x).features, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_fused_is_refused() -> None:
    with pytest.raises(ValueError, match="evaluation mode"):
        fuse(network().train())
    with pytest.raises(TypeError, match="must be a Module, got int"):
        fuse(3)  # type: ignore[arg-type]


def test_gelu_of_infinity_is_infinity() -> None:
    """Not NaN, as torch's own is on CPU."""
    values = torch.full((40,), float("inf"))
    assert activate(values, "gelu", 0.0).equal(values)
    assert activate(-values, "gelu", 0.0).isnan().all()
