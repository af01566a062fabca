"""A head that learns 3D boxes from their overlap with the true ones, in the manner of FCAF3D.

Points on the surface of each object, seen from a place near its middle, go through a small PointNet. The head predicts
distances to the six faces and, in two more numbers, the angle with the ratio of width to length, which leaves no angle
ambiguous: a square has none. The loss is 1 - IoU of rotated boxes, `triops.diff_iou_rotated_3d`.

    python examples/train_rotated_iou_loss.py --steps 300 --mode giou
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import triops


class Head(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.box = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, points: Tensor, anchors: Tensor) -> Tensor:
        """points [N, P, 3], anchors [N, 3] -> boxes [N, 7]."""
        distances, turn = self.box(self.points(points - anchors[:, None]).amax(1)).split([6, 2], -1)
        low, high = distances.exp().view(-1, 3, 2).unbind(-1)
        centre = anchors + (high - low) / 2
        ratio = turn.norm(dim=-1).exp()
        angle = torch.atan2(turn[:, 0], turn[:, 1]) / 2
        around = (low + high)[:, :2].sum(-1)
        sizes = torch.stack([around / (1 + ratio) * ratio, around / (1 + ratio), (low + high)[:, 2]], -1)
        return torch.cat([centre, sizes, angle[:, None]], -1)


def scene(count: int, points: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes [N, 7], points on their faces [N, P, 3], and a place near the middle of each [N, 3]."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    sizes = torch.tensor([3.0, 1.4, 1.2]) * (0.7 + 0.6 * uniform(count, 3))
    angle = (uniform(count) - 0.5) * math.pi
    boxes = torch.cat([uniform(count, 3) * 10, sizes, angle[:, None]], 1)
    local = uniform(count, points, 3) - 0.5
    face = local.abs().argmax(-1, keepdim=True)
    local = local.scatter(-1, face, local.gather(-1, face).sign() / 2) * sizes[:, None]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    x, y, z = local.unbind(-1)
    turned = torch.stack([x * cos - y * sin, x * sin + y * cos, z], -1)
    return boxes, turned + boxes[:, None, :3], boxes[:, :3] + (uniform(count, 3) - 0.5) * 0.6


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--boxes", type=int, default=256)
    parser.add_argument("--mode", choices=["iou", "giou", "diou"], default="iou")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    head = Head().to(options.device)
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    losses, overlap = [], 0.0
    for step in range(options.steps):
        boxes, points, anchors = (t.to(options.device) for t in scene(options.boxes, 64, generator))
        predicted = head(points, anchors)
        if options.mode == "iou":  # mmcv's function, [B, N, 7] each
            value = triops.diff_iou_rotated_3d(predicted[None], boxes[None])[0]
        else:
            value = triops.diff_iou_rotated(predicted, boxes, options.mode)
        loss = (1 - value).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
            overlap = triops.diff_iou_rotated(predicted.detach(), boxes).mean().item()
            print(f"step {step:4d}  loss {losses[-1]:.3f}  overlap with the true boxes {overlap:.3f}")
    return losses, overlap


if __name__ == "__main__":
    main()
