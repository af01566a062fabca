"""Train a block in the manner of Point Transformer V3 to tell ground, objects and walls apart on one synthetic sweep.

    python examples/train_point_transformer.py

Written against `spconv`, `torch_scatter` and torch alone; two lines supply the first two where they are not installed.
A submanifold convolution is the positional encoding, attention runs within patches of a space-filling curve, and a pool
takes the maximum over the points of each coarser voxel, by segments of the sorted points.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import triops
import triops.compat.spconv  # before spconv
import triops.compat.torch_scatter  # before torch_scatter
from triops import scenes

import spconv.pytorch as spconv  # isort: skip
import torch_scatter  # isort: skip

CELL = 0.4
BITS = 10  # of a grid coordinate in the curve
CLASSES = ("ground", "object", "wall")


@dataclass
class Points:
    """Features [N, C] at the cells int32 [N, 3] of one grid."""

    features: Tensor
    cells: Tensor

    def sparse(self) -> spconv.SparseConvTensor:
        sites = F.pad(self.cells, (1, 0))  # batch element 0
        shape = (self.cells.amax(0) + 1).tolist()
        return spconv.SparseConvTensor(self.features, sites, shape, batch_size=1)


def z_order(cells: Tensor) -> Tensor:
    """The place of each cell [N, 3] on the z curve: the bits of its coordinates, interleaved."""
    code = torch.zeros_like(cells[:, 0], dtype=torch.int64)
    for bit in range(BITS):
        for axis in range(3):
            code |= ((cells[:, axis].long() >> bit) & 1) << (3 * bit + axis)
    return code


class Attention(nn.Module):
    """Self-attention within patches of points that follow each other on the curve."""

    def __init__(self, channels: int, heads: int, patch: int) -> None:
        super().__init__()
        self.heads, self.patch = heads, patch
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, features: Tensor, order: Tensor) -> Tensor:
        count, channels = features.shape
        patches = -(-count // self.patch)
        # the last patch is filled up with points of the one before it, whose answers are dropped
        places = torch.arange(patches * self.patch, device=order.device)
        places = torch.where(places < count, places, (places - self.patch).clamp(min=0) % count)
        rows = order[places]
        q, k, v = self.qkv(features)[rows].view(patches, self.patch, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        answer = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, channels)
        return self.out(torch.empty_like(features).index_copy(0, order, answer[:count]))


class Block(nn.Module):
    def __init__(self, channels: int, heads: int, patch: int, key: str) -> None:
        super().__init__()
        self.position = spconv.SubMConv3d(channels, channels, 3, bias=True, indice_key=key)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.linear = nn.Linear(channels, channels)
        self.attention = Attention(channels, heads, patch)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, points: Points, sites: spconv.SparseConvTensor) -> tuple[Points, spconv.SparseConvTensor]:
        """`sites` carries the rulebook from block to block."""
        sites = self.position(sites.replace_feature(points.features))
        features = points.features + self.norms[0](self.linear(sites.features))
        order = z_order(points.cells).argsort()
        features = features + self.attention(self.norms[1](features), order)
        features = features + self.mlp(self.norms[2](features))
        return replace(points, features=features), sites


class Pool(nn.Module):
    """The maximum over the points of each cell of twice the size, and the cell of each point."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, points: Points) -> tuple[Points, Tensor]:
        coarse, cell, counts = (points.cells // 2).unique(dim=0, return_inverse=True, return_counts=True)
        starts = F.pad(counts.cumsum(0), (1, 0))
        by_cell = self.linear(points.features)[cell.argsort()]
        return Points(torch_scatter.segment_csr(by_cell, starts, reduce="max"), coarse), cell


class Network(nn.Module):
    def __init__(self, inputs: int, patch: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(inputs, 32), nn.GELU())
        self.fine = nn.ModuleList(Block(32, 2, patch, "fine") for _ in range(2))
        self.pool = Pool(32, 64)
        self.coarse = nn.ModuleList(Block(64, 4, patch, "coarse") for _ in range(2))
        self.up = nn.Linear(64, 32)
        self.head = nn.Linear(32, len(CLASSES))

    def forward(self, points: Points) -> Tensor:
        fine = self.run(self.fine, replace(points, features=self.stem(points.features)))
        coarse, cell = self.pool(fine)
        coarse = self.run(self.coarse, coarse)
        return self.head(fine.features + self.up(coarse.features)[cell])

    @staticmethod
    def run(blocks: nn.ModuleList, points: Points) -> Points:
        sites = points.sparse()
        for block in blocks:
            points, sites = block(points, sites)
        return points


def sweep(count: int, seed: int, device: str) -> tuple[Points, Tensor]:
    """One point per cell of a synthetic sweep, and its class int64 [N]."""
    scene = scenes.lidar_scene(count, 60, seed=seed)
    near = scene.points[:, :2].abs().amax(1) < 40
    points = scene.points[near]
    cells = (points / CELL).floor().int()
    cells = cells - cells.amin(0)
    sites, cell = cells.unique(dim=0, return_inverse=True)
    total, _ = torch_scatter.scatter_min(torch.arange(len(cell)), cell, dim_size=len(sites))
    points = points[total]
    inside = triops.points_in_boxes(points[None], scene.boxes[None])[0] >= 0
    wall = points[:, 2] > -scenes.SENSOR_HEIGHT + 0.2
    label = torch.where(inside, 1, torch.where(wall, 2, 0))
    features = torch.cat([points / 40, points / CELL % 1], 1)
    return Points(features.to(device), sites.to(device)), label.to(device)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--points", type=int, default=8_000)
    parser.add_argument("--patch", type=int, default=128, help="points that attend to each other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    points, label = sweep(options.points, options.seed, options.device)
    net = Network(points.features.shape[1], options.patch).to(options.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    history, right = [], 0.0
    begin = time.perf_counter()
    for _ in range(options.steps):
        scores = net(points)
        loss = F.cross_entropy(scores, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        right = (scores.argmax(1) == label).float().mean().item()
    seconds = time.perf_counter() - begin
    print(
        f"{len(label)} points: loss {history[0]:.3f} -> {history[-1]:.3f} in {options.steps} steps, {seconds:.1f} s; "
        f"{right:.0%} of the points right"
    )
    return history


if __name__ == "__main__":
    losses = main()
    if losses[-1] >= losses[0]:
        raise SystemExit("the loss did not fall")
