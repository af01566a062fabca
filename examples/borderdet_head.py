"""BorderDet's head on triops: boxes are refined by the strongest feature along each of their borders.

    python examples/borderdet_head.py

A head as of FCOS predicts a class and a coarse box at every place of a feature map. A border branch for each of the
two then walks the borders of the coarse boxes with `border_align`, and predicts class and box anew from what it finds
there. Here the images are rectangles on noise, seen by a small backbone; losses are `sigmoid_focal_loss` and the IoU
of `bbox_overlaps`. About a minute on two CPU cores; not timed on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_sparse_shapes import progress_bar

import triops
from triops.nn import BorderAlign

CLASSES = 3
SIZE, STRIDE = 96, 4  # of the images, in pixels; of the feature map
REFINABLE = 0.4  # IoU from which a coarse box is worth refining
REACH = 0.5  # how far a border moves for an output of 1, as a share of the box


class BorderBranch(nn.Module):
    """Features [N, F, H, W] and boxes [N, H*W, 4] in pixels of the map -> [N, F, H, W]: place and borders together."""

    def __init__(self, features: int, channels: int, pool_size: int = 10) -> None:
        super().__init__()
        self.place = nn.Sequential(nn.Conv2d(features, channels, 1), nn.InstanceNorm2d(channels), nn.ReLU())
        self.borders = nn.Sequential(nn.Conv2d(features, 4 * channels, 1), nn.InstanceNorm2d(4 * channels), nn.ReLU())
        self.align = BorderAlign(pool_size)
        self.join = nn.Sequential(nn.Conv2d(5 * channels, features, 1), nn.ReLU())

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        found = self.align(self.borders(x), boxes)  # [N, C, H*W, 4]
        found = found.permute(0, 3, 1, 2).flatten(1, 2).unflatten(2, x.shape[2:])  # [N, 4C, H, W]
        joined: Tensor = self.join(torch.cat([self.place(x), found], 1))
        return joined


class BorderHead(nn.Module):
    """Classes and boxes at every place of a feature map, coarse and refined. Boxes are in pixels of the image."""

    def __init__(self, features: int, classes: int, channels: int = 32) -> None:
        super().__init__()
        self.class_tower, self.box_tower = (
            nn.Sequential(nn.Conv2d(features, features, 3, padding=1), nn.GroupNorm(8, features), nn.ReLU())
            for _ in range(2)
        )
        self.coarse_class, self.coarse_box = nn.Conv2d(features, classes, 3, padding=1), nn.Conv2d(features, 4, 1)
        self.class_branch, self.box_branch = BorderBranch(features, channels), BorderBranch(features, channels)
        self.border_class, self.border_box = nn.Conv2d(features, classes, 1), nn.Conv2d(features, 4, 1)
        for layer in (self.coarse_class, self.border_class):
            nn.init.constant_(layer.bias, -4.0)  # nearly everything is background
        nn.init.normal_(self.border_box.weight, std=0.01)  # refining starts from the coarse box
        nn.init.zeros_(self.border_box.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores and boxes, coarse [N, P, classes] and [N, P, 4], then refined; P = H * W places."""
        by_class, by_box = self.class_tower(x), self.box_tower(x)
        sides = _by_place(F.softplus(self.coarse_box(by_box))) * STRIDE  # to the left, top, right, bottom
        here = _places(*x.shape[2:], x.device).repeat(1, 2)
        coarse = here + torch.cat([-sides[..., :2], sides[..., 2:]], -1)

        start = coarse.detach()  # the refinement judges the coarse box and does not push it
        on_map = start / STRIDE
        border_scores = _by_place(self.border_class(self.class_branch(by_class, on_map)))
        moves = _by_place(self.border_box(self.box_branch(by_box, on_map)))
        refined = start + REACH * moves * (start[..., 2:] - start[..., :2]).repeat(1, 1, 2)
        return _by_place(self.coarse_class(by_class)), coarse, border_scores, refined


def _by_place(x: Tensor) -> Tensor:
    """[N, C, H, W] as [N, H*W, C]."""
    return x.flatten(2).transpose(1, 2)


def _places(height: int, width: int, device: torch.device) -> Tensor:
    """The pixel of the image at the middle of every place of a map, [H*W, 2] of (x, y)."""
    y, x = torch.arange(height, device=device), torch.arange(width, device=device)
    return (torch.cartesian_prod(y, x).flip(1) + 0.5) * STRIDE


def network(features: int = 64) -> nn.Sequential:
    def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )  # fmt: skip

    backbone = nn.Sequential(stage(3, 32, 2), stage(32, features, 2), stage(features, features, 1))
    return nn.Sequential(backbone, BorderHead(features, CLASSES))


def images(count: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Images [count, 3, SIZE, SIZE], and the class [count] and box [count, 4] of the rectangle in each."""
    side = torch.randint(SIZE // 5, SIZE * 2 // 3, (count, 2))
    corner = (torch.rand(count, 2) * (SIZE - side)).long()
    boxes = torch.cat([corner, corner + side], 1)
    labels = torch.randint(0, CLASSES, (count,))
    pixels = torch.randn(count, 3, SIZE, SIZE) * 0.5
    for image, label, (x1, y1, x2, y2) in zip(pixels, labels, boxes.tolist(), strict=True):
        image[label, y1:y2, x1:x2] += 1
    return pixels.to(device), labels.to(device), boxes.float().to(device)


def losses(outputs: Sequence[Tensor], labels: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the coarse and of the refined predictions."""
    coarse_scores, coarse, border_scores, refined = outputs
    target = boxes[:, None].expand_as(coarse)
    # places in the middle of the object answer for it; of the refined boxes those that began near it
    here = _places(SIZE // STRIDE, SIZE // STRIDE, boxes.device)
    middle, reach = (target[..., :2] + target[..., 2:]) / 2, (target[..., 2:] - target[..., :2]) / 4
    central = ((here - middle).abs() < reach.clamp(min=STRIDE)).all(-1)
    close = triops.bbox_overlaps(coarse.detach(), target.contiguous(), aligned=True) > REFINABLE

    def loss(scores: Tensor, found: Tensor, mine: Tensor) -> Tensor:
        classes = torch.where(mine, labels[:, None], CLASSES)
        count = mine.sum().clamp(min=1)
        by_class = triops.sigmoid_focal_loss(scores.flatten(0, 1), classes.flatten(), reduction="sum")
        overlap = triops.bbox_overlaps(found[mine], target[mine], aligned=True)
        return (by_class + (1 - overlap).sum()) / count

    return loss(coarse_scores, coarse, central), loss(border_scores, refined, close)


@torch.no_grad()
def overlaps(net: nn.Module, count: int, device: str) -> tuple[float, float, float]:
    """On new images, of the place that is surest: the mean IoU of the coarse and the refined box; right classes."""
    net.eval()
    pixels, labels, boxes = images(count, device)
    scores, coarse, border_scores, refined = net(pixels)
    sure = (scores.sigmoid() * border_scores.sigmoid()).flatten(1).argmax(1)
    place, label = sure // CLASSES, sure % CLASSES
    every = torch.arange(count, device=device)
    found = (triops.bbox_overlaps(b[every, place], boxes, aligned=True).mean().item() for b in (coarse, refined))
    return *found, (label == labels).float().mean().item()  # type: ignore[return-value]


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    net = network().to(options.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    begin = time.perf_counter()
    with progress_bar(options.steps) as show:
        for step in range(1, options.steps + 1):
            pixels, labels, boxes = images(options.batch, options.device)
            coarse, border = losses(net(pixels), labels, boxes)
            optimizer.zero_grad()
            (coarse + border).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10)
            optimizer.step()
            show(step, f"loss {coarse.item():.3f} coarse, {border.item():.3f} border")
    seconds = time.perf_counter() - begin
    torch.manual_seed(options.seed + 1_000_000)  # images that training never made
    coarse_iou, refined_iou, right = overlaps(net, 100, options.device)
    print(f"IoU {coarse_iou:.3f} coarse, {refined_iou:.3f} refined, {right:.0%} of the classes right; {seconds:.0f} s")
    return coarse_iou, refined_iou


if __name__ == "__main__":
    before, after = main()
    if after <= before:
        raise SystemExit("the borders did not help")
