"""Train a sparse CNN to tell shapes apart: sphere, cube, cylinder, cone, torus, tetrahedron, in any pose.

    python examples/train_sparse_shapes.py

Clouds of surface points are made as they are needed, voxelised into a 24 x 24 x 24 grid (about 3 % of it is occupied)
and classified by a network of submanifold and strided convolutions. About a minute on two CPU cores, not timed on
a GPU, for at least 95 % on shapes never seen in training.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triops.nn import SparseConv3d, SparseConvTensor, SparseGlobalMaxPool, SparseSequential, SubMConv3d

SHAPES = ("sphere", "cube", "cylinder", "cone", "torus", "tetrahedron")
GRID = 24
POINTS = 1000  # on the surface of each shape
TARGET = 0.95


def surface(shape: str, count: int) -> Tensor:
    """Points [count, 3] on the surface of a shape that fills about [-1, 1] on every axis."""
    turn = 2 * math.pi * torch.rand(count)
    u, v = torch.rand(count), 2 * torch.rand(count) - 1
    circle = torch.stack([turn.cos(), turn.sin()], 1)
    if shape == "sphere":
        return F.normalize(torch.randn(count, 3), dim=1)
    if shape == "cube":
        points = 2 * torch.rand(count, 3) - 1
        face = torch.randint(0, 3, (count,))
        return 0.8 * points.scatter(1, face[:, None], v.sign()[:, None])
    if shape == "torus":
        tube = 2 * math.pi * torch.rand(count)
        return torch.cat([circle * (0.7 + 0.3 * tube.cos())[:, None], 0.3 * tube.sin()[:, None]], 1)
    if shape == "cylinder":  # a third of the surface is caps
        cap = torch.rand(count) < 1 / 3
        radius, height = torch.where(cap, u.sqrt(), 1.0), torch.where(cap, v.sign(), v)
        return torch.cat([0.7 * radius[:, None] * circle, height[:, None]], 1)
    if shape == "tetrahedron":  # any mixture of three of four corners
        corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
        weights = torch.rand(count, 4).log().scatter(1, torch.randint(0, 4, (count, 1)), 0.0)
        return weights / weights.sum(1, keepdim=True) @ corners
    # A cone: a base, and a side that narrows from it to the tip.
    height = torch.where(torch.rand(count) < 0.3, -0.8, 1 - 1.8 * u.sqrt())
    return torch.cat([0.9 * u.sqrt()[:, None] * circle, height[:, None]], 1)


def pose(points: Tensor) -> Tensor:
    """Points [B, P, 3] stretched a little, turned at random, scaled, moved, and made a little noisy."""
    batch = len(points)
    rotation = torch.linalg.qr(torch.randn(batch, 3, 3)).Q
    stretched = points * (0.9 + 0.2 * torch.rand(batch, 1, 3))
    posed = stretched @ rotation * (0.5 + 0.2 * torch.rand(batch, 1, 1)) + 0.05 * torch.randn(batch, 1, 3)
    return posed + 0.01 * torch.randn_like(points)


def voxelise(points: Tensor) -> SparseConvTensor:
    """One site for every cell of the grid over [-1, 1] that holds points of [B, P, 3].

    Features: 1, and the mean place of the points within their cell.
    """
    batch = len(points)
    place = ((points + 1) / 2 * GRID).clamp(0, GRID - 1e-3).reshape(-1, 3)
    element = torch.arange(batch, device=points.device).repeat_interleave(points.shape[1])
    cells = torch.cat([element[:, None], place.long()], 1)
    sites, cell = cells.unique(dim=0, return_inverse=True)
    inside = torch.cat([torch.ones_like(place[:, :1]), place - place.floor() - 0.5], 1)
    total = inside.new_zeros(len(sites), 4).index_add(0, cell, inside)
    return SparseConvTensor(total / total[:, :1], sites.int(), [GRID] * 3, batch)


def shapes(batch: int, device: str) -> tuple[SparseConvTensor, Tensor]:
    """A batch of shapes and their labels."""
    labels = torch.randint(0, len(SHAPES), (batch,))
    points = torch.stack([surface(SHAPES[label], POINTS) for label in labels])
    return voxelise(pose(points).to(device)), labels.to(device)


def stage(inputs: int, outputs: int, number: int) -> SparseSequential:
    """Half the resolution, then look around."""
    return SparseSequential(
        SparseConv3d(inputs, outputs, 3, stride=2, padding=1, bias=False, indice_key=f"down{number}"),
        nn.BatchNorm1d(outputs),
        nn.ReLU(),
        SubMConv3d(outputs, outputs, 3, bias=False, indice_key=f"subm{number}"),
        nn.BatchNorm1d(outputs),
        nn.ReLU(),
    )


def network() -> SparseSequential:
    return SparseSequential(
        SubMConv3d(4, 16, 3, bias=False),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        stage(16, 32, 1),
        stage(32, 64, 2),
        stage(64, 64, 3),
        SparseGlobalMaxPool(),
        nn.Linear(64, len(SHAPES)),
    )


@contextmanager
def progress_bar(steps: int) -> Iterator[Any]:
    """A function to call after every step: a bar with rich, lines without."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda step, text: print(f"{step}/{steps}  {text}") if step % 20 == 0 or step == steps else None
        return
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=steps)
        yield lambda step, text: bar.update(task, completed=step, description=text)


def train(net: nn.Module, steps: int, batch: int, device: str) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    smooth = math.log(len(SHAPES))
    with progress_bar(steps) as show:
        for step in range(1, steps + 1):
            x, labels = shapes(batch, device)
            loss = F.cross_entropy(net(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            smooth = 0.9 * smooth + 0.1 * loss.item()
            show(step, f"loss {smooth:.3f}")


@torch.no_grad()
def accuracy(net: nn.Module, batches: int, device: str) -> float:
    """The share of right answers on shapes made anew."""
    net.eval()
    right = [(net(x).argmax(1) == labels).float().mean() for x, labels in (shapes(60, device) for _ in range(batches))]
    return torch.stack(right).mean().item()


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--test-batches", type=int, default=10, help="of 60 shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    net = network().to(options.device)
    begin = time.perf_counter()
    train(net, options.steps, options.batch, options.device)
    seconds = time.perf_counter() - begin
    torch.manual_seed(options.seed + 1_000_000)  # shapes that training never made
    share = accuracy(net, options.test_batches, options.device)
    print(
        f"{share:.1%} of {60 * options.test_batches} new shapes right, trained for {seconds:.0f} s on {options.device}"
    )
    return share


if __name__ == "__main__":
    if main() < TARGET:
        raise SystemExit(f"below {TARGET:.0%}")
