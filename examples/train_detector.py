"""A small detector of 3D objects on triops alone: points in, boxes out, and a picture of what it found.

    python examples/train_detector.py

In the manner of CenterPoint: voxels, a sparse network, a map seen from above, and for each cell of the map how likely
an object has its centre there, and the box of that object. Every step trains on synthetic sweeps made for it; the
picture and the figures are of sweeps that training never saw. Less than a minute of one CPU core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from pictures import draw_detections
from torch import Tensor, nn
from torch.nn import functional as F
from train_sparse_shapes import progress_bar, stage

import triops
from triops import scenes
from triops.nn import MeanVoxels, SparseSequential, SubMConv3d

VOXEL, RANGE = (0.4, 0.4, 0.6), (-24.0, -24.0, -2.4, 24.0, 24.0, 2.4)  # metres: x, y, z; both corners
CELL = 2 * VOXEL[0]  # of the map, behind one stride of 2
SEEN = 5  # points that an object must have: nobody could find it otherwise
NEVER_SEEN = 1_000_000  # seeds of scenes from here on are not trained on


class Detector(nn.Module):
    """Clouds of points [M, 3] -> logits [B, H, W] of a centre in each cell of the map, and boxes [B, H, W, 7]."""

    cells: Tensor  # [H, W, 2]: x and y of the middle of each

    def __init__(self) -> None:
        super().__init__()
        self.voxels = MeanVoxels(VOXEL, RANGE, max_points=5, max_voxels=20_000)
        self.encoder = SparseSequential(
            SubMConv3d(4, 16, 3, bias=False), nn.BatchNorm1d(16), nn.ReLU(), stage(16, 32, 1)
        )
        self.head = nn.Sequential(
            nn.Conv2d(32 * 4, 48, 3, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU(),  # 4 cells above one another
            nn.Conv2d(48, 48, 3, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 9, 1),
        )  # fmt: skip
        along = torch.arange(RANGE[0] + CELL / 2, RANGE[3], CELL)
        self.register_buffer("cells", torch.stack(torch.meshgrid(along, along, indexing="xy"), -1))

    def forward(self, clouds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x = self.voxels(clouds)
        size, low = x.features.new_tensor(VOXEL), x.features.new_tensor(RANGE[:3])
        place = (x.features - low) / size - x.indices[:, [3, 2, 1]] - 0.5  # of the points within their voxel
        x = x.replace_feature(F.pad(place, (0, 1), value=1.0))
        map = self.encoder(x).dense().flatten(1, 2)  # [B, C * D, H, W]
        logits, offset, z, sizes, turn = self.head(map).permute(0, 2, 3, 1).split([1, 2, 1, 3, 2], -1)
        # twice the angle: a sweep does not tell the front of a box from its back
        angle = torch.atan2(turn[..., :1], turn[..., 1:]) / 2
        # centres are rare: the first guess is 2 % everywhere
        return logits[..., 0] - 4, torch.cat([self.cells + offset, z, sizes.clamp(max=3).exp(), angle], -1)


def scene(seed: int, device: str) -> tuple[Tensor, Tensor]:
    """A sweep [M, 3] and the boxes [T, 7] in it that can be seen."""
    boxes = scenes.random_boxes(12, seed=seed, radius=23.0)
    boxes = boxes[triops.nms3d(boxes, torch.ones(len(boxes)), 0.0)]  # objects do not stand in one another
    points = scenes.lidar_sweep(boxes, 16_000, seed=seed, nearest_wall=18.0)
    inside = triops.points_in_boxes_all(points[None], boxes[None])[0]  # [M, T]
    return points.to(device), boxes[inside.sum(0) >= SEEN].to(device)


def loss_of(logits: Tensor, boxes: Tensor, truth: Tensor, cells: Tensor) -> Tensor:
    """Of one sweep: logits [H, W], boxes [H, W, 7], truth [T, 7]."""
    distance, nearest = (cells[:, :, None] - truth[:, :2]).square().sum(-1).min(-1)  # squared, [H, W]
    wanted = torch.exp(-distance / CELL**2)  # 1 at a centre, less around it
    wrong = (wanted - logits.sigmoid()).square()  # cells that are nearly right count little, as in the focal loss
    centres = (wrong * F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")).sum() / len(truth)

    near = distance < CELL**2  # these cells learn the box of their object
    predicted, true = boxes[near], truth[nearest[near]]
    overlap = triops.diff_iou_rotated(predicted, true, "diou")
    turned = 1 - torch.cos(2 * (predicted[:, 6] - true[:, 6]))
    return centres + (1 - overlap + turned / 2).mean()


@torch.no_grad()
def detect(net: Detector, points: Tensor, least: float = 0.3) -> Tensor:
    """Boxes [K, 7] with a score above the least, best first."""
    logits, boxes = net([points])
    scores, boxes = logits.sigmoid().flatten(), boxes.flatten(0, 2)
    scores, boxes = scores[scores > least], boxes[scores > least]
    return boxes[triops.nms3d(boxes, scores, 0.1)]


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], float]:
    """Returns the losses, and of the objects in ten sweeps never seen the share that was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, default=Path("detector.png"), help="of what was found, from above")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    net = Detector().to(options.device)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=options.steps)
    history, begin = [], time.perf_counter()
    with progress_bar(options.steps) as show:
        for step in range(options.steps):
            batch = [scene(step * options.batch + b, options.device) for b in range(options.batch)]
            made = zip(*net([points for points, _ in batch]), (truth for _, truth in batch), strict=True)
            loss = torch.stack([loss_of(*one, net.cells) for one in made]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            history.append(loss.item())
            show(step + 1, f"loss {history[-1]:.3f}")
    print(f"{options.steps} steps in {time.perf_counter() - begin:.0f} s on {options.device}")

    net.eval()
    hits = objects = boxes = 0
    for seed in range(NEVER_SEEN, NEVER_SEEN + 10):
        points, truth = scene(seed, options.device)
        found = detect(net, points)
        if len(found):
            hits += int((triops.boxes_iou3d(truth, found).amax(1) > 0.5).sum())
        objects, boxes = objects + len(truth), boxes + len(found)
        if seed == NEVER_SEEN and find_spec("matplotlib"):
            near = (points[:, :2].abs() < RANGE[3]).all(1)
            draw_detections(points[near], truth, found, "A sweep that training never saw", options.picture)
            print(f"{options.picture}: the objects of a sweep and what was found")
    print(f"{hits} of {objects} objects of ten sweeps found, with an IoU above 0.5, by {boxes} boxes")
    return history, hits / objects


if __name__ == "__main__":
    main()
