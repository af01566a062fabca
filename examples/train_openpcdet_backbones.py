"""Train OpenPCDet-style sparse backbones, written against spconv's names, on one synthetic sweep.

    python examples/train_openpcdet_backbones.py

Nothing in the networks knows of triops: `import triops.compat.spconv` is the one line that supplies `spconv` where it
is not installed. Points go into voxels, a backbone (plain or residual) brings them to an eighth of the resolution, the
height becomes channels, and a 1 x 1 convolution says for each cell of the ground whether an object stands there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

import triops
import triops.compat.spconv  # before spconv
from triops import scenes

import spconv.pytorch as spconv  # isort: skip
from spconv.pytorch.utils import PointToVoxel  # isort: skip

VOXEL = [0.1, 0.1, 0.2]
RANGE = [-16.0, -16.0, -3.0, 16.0, 16.0, 1.0]
GRID = [40, 320, 320]  # z, y, x
STRIDE = 8
STARTING_SCORE = -2.0

norm = partial(nn.BatchNorm1d, eps=1e-3, momentum=0.01)


def block(
    inputs: int, outputs: int, key: str, stride: int = 1, padding: Sequence[int] | int = 1
) -> spconv.SparseModule:
    """A convolution, batch norm and ReLU; submanifold where the sites stay."""
    if stride == 1:
        conv = spconv.SubMConv3d(inputs, outputs, 3, padding=1, bias=False, indice_key=key)
    else:
        conv = spconv.SparseConv3d(inputs, outputs, 3, stride=stride, padding=padding, bias=False, indice_key=key)
    return spconv.SparseSequential(conv, norm(outputs), nn.ReLU())


class ResidualBlock(spconv.SparseModule):
    def __init__(self, channels: int, key: str) -> None:
        super().__init__()
        self.conv1 = spconv.SubMConv3d(channels, channels, 3, padding=1, bias=True, indice_key=key)
        self.bn1 = norm(channels)
        self.conv2 = spconv.SubMConv3d(channels, channels, 3, padding=1, bias=True, indice_key=key)
        self.bn2 = norm(channels)

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        out = self.conv1(x)
        out = out.replace_feature(self.bn1(out.features).relu())
        out = self.conv2(out)
        return out.replace_feature((self.bn2(out.features) + x.features).relu())


class Backbone(nn.Module):
    """Four stages at strides 1, 2, 4, 8 and an end that halves the height once more."""

    channels: tuple[int, int, int, int]

    def __init__(self, inputs: int, grid: Sequence[int]) -> None:
        super().__init__()
        first = self.channels[0]
        self.spatial_shape = [grid[0] + 1, *grid[1:]]  # one layer more, so that the height can be halved thrice
        self.conv_input = block(inputs, first, "subm1")
        self.conv1 = self.stage(first, first, 1)
        self.conv2 = self.stage(first, self.channels[1], 2)
        self.conv3 = self.stage(self.channels[1], self.channels[2], 3)
        self.conv4 = self.stage(self.channels[2], self.channels[3], 4, padding=(0, 1, 1))
        self.conv_out = spconv.SparseSequential(
            spconv.SparseConv3d(
                self.channels[3], 128, (3, 1, 1), stride=(2, 1, 1), padding=0, bias=False, indice_key="spconv_down2"
            ),
            norm(128),
            nn.ReLU(),
        )

    def stage(self, inputs: int, outputs: int, number: int, padding: Sequence[int] | int = 1) -> spconv.SparseModule:
        raise NotImplementedError

    def forward(self, features: Tensor, coordinates: Tensor, batch_size: int) -> spconv.SparseConvTensor:
        x = spconv.SparseConvTensor(features, coordinates.int(), self.spatial_shape, batch_size)
        x = self.conv_input(x)
        for stage in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = stage(x)
        return self.conv_out(x)


class VoxelBackBone8x(Backbone):
    channels = (16, 32, 64, 64)

    def stage(self, inputs: int, outputs: int, number: int, padding: Sequence[int] | int = 1) -> spconv.SparseModule:
        key = f"subm{number}"
        if number == 1:
            return spconv.SparseSequential(block(inputs, outputs, key))
        return spconv.SparseSequential(
            block(inputs, outputs, f"spconv{number}", stride=2, padding=padding),
            block(outputs, outputs, key),
            block(outputs, outputs, key),
        )


class VoxelResBackBone8x(Backbone):
    channels = (16, 32, 64, 128)

    def stage(self, inputs: int, outputs: int, number: int, padding: Sequence[int] | int = 1) -> spconv.SparseModule:
        residual = [ResidualBlock(outputs, f"res{number}") for _ in range(2)]
        if number == 1:
            return spconv.SparseSequential(*residual)
        return spconv.SparseSequential(block(inputs, outputs, f"spconv{number}", stride=2, padding=padding), *residual)


class ObjectMap(nn.Module):
    """Backbone, height as channels, and one score for each cell of the ground: [B, Y / 8, X / 8]."""

    def __init__(self, backbone: type[Backbone]) -> None:
        super().__init__()
        self.backbone = backbone(4, GRID)
        self.score = nn.Conv2d(2 * 128, 1, 1)
        nn.init.constant_(self.score.bias, STARTING_SCORE)

    def forward(self, voxels: Tensor, number: Tensor, coordinates: Tensor) -> Tensor:
        features = voxels.sum(1) / number[:, None].clamp(min=1)
        dense = self.backbone(features, coordinates, batch_size=1).dense()
        return self.score(dense.flatten(1, 2))[:, 0]


def sweep(points: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Voxels, points per voxel, coordinates with the batch in front, and for each cell of the ground 1 in an object."""
    scene = scenes.lidar_scene(points, 40, seed=seed)
    cloud = torch.cat([scene.points, torch.rand(points, 1)], 1).to(device)
    maker = PointToVoxel(
        VOXEL, RANGE, 4, max_num_voxels=20_000, max_num_points_per_voxel=5, device=torch.device(device)
    )
    voxels, coordinates, number = maker(cloud)
    coordinates = torch.cat([torch.zeros_like(coordinates[:, :1]), coordinates], 1)
    y, x = (RANGE[a] + VOXEL[a] * STRIDE * (torch.arange(GRID[2 - a] // STRIDE) + 0.5) for a in (1, 0))
    cells = torch.stack([*torch.meshgrid(y, x, indexing="ij")][::-1], -1)
    ground = torch.cat([cells, torch.zeros_like(cells[..., :1])], -1).view(1, -1, 3)
    flat = scene.boxes.clone()
    flat[:, 2], flat[:, 5] = 0, 1
    held = triops.points_in_boxes(ground, flat[None]) >= 0
    return voxels, number, coordinates, held.view(1, *cells.shape[:2]).float().to(device)


def train(backbone: type[Backbone], points: int, steps: int, seed: int, device: str) -> list[float]:
    torch.manual_seed(seed)
    net = ObjectMap(backbone).to(device)
    voxels, number, coordinates, truth = sweep(points, seed, device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    weight = truth.numel() / truth.sum().clamp(min=1) / 4
    history = []
    for _ in range(steps):
        scores = net(voxels, number, coordinates)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, truth, pos_weight=weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--points", type=int, default=8_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    histories = {}
    for backbone in (VoxelBackBone8x, VoxelResBackBone8x):
        begin = time.perf_counter()
        history = train(backbone, options.points, options.steps, options.seed, options.device)
        seconds = time.perf_counter() - begin
        print(
            f"{backbone.__name__}: loss {history[0]:.3f} -> {history[-1]:.3f}, {options.steps} steps, {seconds:.1f} s"
        )
        histories[backbone.__name__] = history
    return histories


if __name__ == "__main__":
    if any(history[-1] >= history[0] for history in main().values()):
        raise SystemExit("a loss did not fall")
