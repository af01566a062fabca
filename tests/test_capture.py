"""Facts about fixed capacities and captured networks: same answers, and nothing is dropped in silence."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triops import Rulebook, scenes, sparse_conv
from triops.nn import (
    MeanVoxels,
    SparseConv3d,
    SparseConvTensor,
    SparseInverseConv3d,
    SparseMaxPool3d,
    SparseSequential,
    SubMConv3d,
    ToDense,
    capture,
)
from triops.ops.sparse_conv.samples import random_sites

pytestmark = pytest.mark.versions


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are a GPU's")


def tensor(count: int = 60, seed: int = 0, device: str = "cpu", channels: int = 4) -> SparseConvTensor:
    features = torch.randn(count, channels, generator=torch.Generator().manual_seed(seed))
    return SparseConvTensor(features.to(device), random_sites(count, 2, [9, 10, 11], seed).to(device), [9, 10, 11], 2)


def encoder(channels: int = 4) -> SparseSequential:
    torch.manual_seed(0)
    return SparseSequential(
        SubMConv3d(channels, 8, 3, bias=False, indice_key="a"), nn.BatchNorm1d(8), nn.ReLU(),
        SparseConv3d(8, 16, 3, 2, 1, bias=False, indice_key="down"), nn.BatchNorm1d(16), nn.ReLU(),
        SubMConv3d(16, 16, 3, indice_key="b"), SubMConv3d(16, 16, 3, indice_key="b"),
        SparseMaxPool3d(2, 2), SparseConv3d(16, 8, 3, 2, 1),
    ).eval()  # fmt: skip


def with_capacity(network: SparseSequential, capacity: int) -> SparseSequential:
    for layer in network:
        if isinstance(layer, SparseConv3d | SparseMaxPool3d):
            layer.capacity = capacity
    return network


def active(x: SparseConvTensor) -> tuple[Tensor, Tensor]:
    inside = x.indices[:, 0] >= 0
    return x.features[inside], x.indices[inside]


def test_a_network_with_room_to_spare_gives_the_same_sites_and_features() -> None:
    x = tensor()
    expected, got = encoder()(x), with_capacity(encoder(), 500)(x)
    assert got.features.shape == (500, 8)
    assert got.active is not None
    assert int(got.active) == len(expected.indices)
    features, indices = active(got)
    assert torch.equal(indices, expected.indices)
    torch.testing.assert_close(features, expected.features, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.dense() != 0, expected.dense() != 0)
    assert not got.capacity_exceeded()


def test_the_way_back_from_fixed_capacity_leads_to_all_inputs() -> None:
    x = tensor()
    net = SparseSequential(SparseConv3d(4, 8, 3, 2, 1, indice_key="down"), SparseInverseConv3d(8, 4, 3, "down"))
    expected = net(x)
    net[0].capacity = 400
    got = net(x)
    assert got.indices is x.indices
    assert got.active is None
    torch.testing.assert_close(got.features, expected.features)


def test_a_capacity_that_is_exceeded_says_so_whatever_comes_behind() -> None:
    got = with_capacity(encoder(), 40)(tensor())
    assert got.capacity_exceeded()
    count, capacity = got.limits[0]
    assert int(count) > capacity == 40


def test_gradients_are_those_of_the_network_without_capacities() -> None:
    results = []
    for capacity in (None, 400):
        x = tensor()
        features = x.features.double().requires_grad_()
        layer = SparseConv3d(4, 8, 3, 2, 1, bias=False).double()
        torch.manual_seed(1)
        nn.init.normal_(layer.weight)
        layer.capacity = capacity
        y = layer(SparseConvTensor(features, x.indices, x.spatial_shape, 2))
        loss = active(y)[0].square().sum()
        results.append(torch.autograd.grad(loss, (features, layer.weight)))
    for with_room, exact in zip(*results, strict=True):
        torch.testing.assert_close(with_room, exact)


def test_a_rulebook_of_fixed_capacity_compiles_to_static_shapes() -> None:
    weight = torch.randn(5, 3, 3, 3, 4)

    def run(features: Tensor, sites: Tensor) -> Tensor:
        book = Rulebook.sparse(sites, 2, [9, 10, 11], 3, stride=2, padding=1, capacity=300)
        return sparse_conv(features, weight, book)

    x = tensor()
    program = torch.export.export(_Module(run), (x.features, x.indices), strict=False)
    got = program.module()(x.features, x.indices)
    assert got.shape == (300, 5)
    assert torch.equal(got, run(x.features, x.indices))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.features, x.indices), got)


class _Module(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def detector(max_voxels: int = 900) -> SparseSequential:
    """From points to a dense bird's-eye map."""
    torch.manual_seed(0)
    voxels = MeanVoxels((0.5, 0.5, 0.5), (-8, -8, -2, 8, 8, 2), max_points=5, max_voxels=max_voxels)
    return SparseSequential(
        voxels, SubMConv3d(3, 8, 3, bias=False), nn.BatchNorm1d(8), nn.ReLU(),
        SparseConv3d(8, 16, 3, 2, 1), nn.ReLU(), ToDense(),
    ).eval()  # fmt: skip


def cloud(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)) * torch.tensor([4.0, 4.0, 1.0])


def test_from_points_to_a_map_all_shapes_are_fixed_and_the_map_is_the_same() -> None:
    net, points = detector(), cloud(700)
    expected = net([points])
    net[4].capacity = 2000
    program = torch.export.export(net, (points,), strict=False)
    torch.testing.assert_close(program.module()(points), expected, rtol=1e-5, atol=1e-6)
    points[100:] = torch.nan  # as capture pads them
    torch.testing.assert_close(program.module()(points), net([points[:100]]), rtol=1e-5, atol=1e-6)


def test_from_points_to_a_map_compiles_without_a_graph_break() -> None:
    net, points = detector(), cloud(700)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for count in (700, 300):  # the strided layer makes new sites, whose number nobody knows while tracing
            torch.testing.assert_close(compiled(points[:count]), net(points[:count]), rtol=1e-5, atol=1e-6)


def test_on_a_cpu_a_captured_network_is_the_network() -> None:
    net, x = encoder(), tensor()
    fast = capture(net, [x])
    with torch.no_grad():
        assert torch.equal(fast(x).features, net(x).features)
    assert all(layer.capacity is None for layer in net if hasattr(layer, "capacity"))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: capture(nn.Linear(2, 2).eval(), [torch.zeros(1, 2)]), TypeError, "must hold sparse layers"),
        (lambda: capture(encoder().train(), [tensor()]), ValueError, "evaluation mode"),
        (lambda: capture(encoder(), []), ValueError, "at least one input"),
        (lambda: capture(encoder(), [tensor()], 0.5), ValueError, "headroom must be at least 1"),
        (lambda: capture(lambda x: x, [tensor()]), TypeError, "must be a Module, got function"),
        (lambda: capture(encoder(), [(1, 2)]), TypeError, "SparseConvTensor or tensors"),
    ],
)
def test_what_cannot_be_captured_is_refused(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def lidar(count: int, seed: int = 0) -> SparseConvTensor:
    sites = scenes.lidar_sites(count, (41, 1440, 1440), 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    features = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return SparseConvTensor(features.cuda(), sites[order].cuda(), [41, 1440, 1440], 1)


@needs_gpu
def test_a_captured_network_gives_what_the_network_gives_for_any_number_of_sites() -> None:
    net = encoder().cuda()
    fast = capture(net, [lidar(20_000)])
    with torch.no_grad():
        for count in (20_000, 1, 700, 12_345, 30_001, 90_000, 15_000, 20_000):
            x = lidar(count, seed=count)
            got, expected = fast(x), net(x)
            assert torch.equal(got.indices, expected.indices), count
            torch.testing.assert_close(got.features, expected.features, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_a_captured_network_takes_points_of_any_number() -> None:
    net = detector(4000).cuda()
    fast = capture(net, [cloud(3000).cuda()])
    with torch.no_grad():
        for count in (3000, 1, 20_000, 1024, 1025, 2000):
            points = cloud(count, seed=count).cuda()
            torch.testing.assert_close(fast(points), net([points]), rtol=1e-4, atol=1e-5)


@needs_gpu
def test_more_sites_than_the_capacity_give_the_right_answer_too() -> None:
    net = encoder().cuda()
    dense = SparseConvTensor(
        torch.randn(4000, 4).cuda(), torch.cartesian_prod(*map(torch.arange, (1, 10, 20, 20))).int().cuda(),
        [41, 1440, 1440], 1,
    )  # fmt: skip
    fast = capture(net, [dense])
    with torch.no_grad():
        for _ in range(2):
            x = lidar(4000)
            got, expected = fast(x), net(x)
            assert torch.equal(got.indices, expected.indices)
            torch.testing.assert_close(got.features, expected.features, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_threads_and_streams_share_a_captured_network() -> None:
    net = SparseSequential(*encoder(), ToDense()).cuda().eval()
    fast = capture(net, [lidar(20_000)])
    inputs = [lidar(count, seed=count) for count in (20_000, 15_000, 9_000, 19_999)]
    with torch.no_grad():
        expected = [net(x) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(10):
                if not torch.allclose(fast(inputs[number]), expected[number], rtol=1e-4, atol=1e-5):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
