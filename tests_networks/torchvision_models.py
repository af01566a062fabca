"""Detectors of torchvision, whose compiled operators are not loaded, on triops: one process, which prints what it saw.

    PYTHONPATH=FOLDER_WITH_TORCHVISION python tests_networks/torchvision_models.py

Random weights, a small backbone, two images of other sizes. Compared with the reference backend: boxes, losses, and the
gradient of every weight.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import triops
import triops.compat.torchvision


def refuse(path: str) -> None:
    raise OSError("built for another PyTorch")


torch.ops.load_library = refuse  # one that happens to fit this PyTorch would use its own operators

import torchvision  # noqa: E402 - finds none
from torchvision.models import detection  # noqa: E402

SIZE = {"min_size": 160, "max_size": 224}
CLASSES = 5


def backbone() -> nn.Module:
    from torchvision.models.detection.backbone_utils import mobilenet_backbone

    return mobilenet_backbone(
        backbone_name="mobilenet_v3_small", weights=None, fpn=True, trainable_layers=6, norm_layer=nn.BatchNorm2d
    )


def deformable() -> nn.Module:
    """A backbone behind a deformable convolution that learns where to read."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offsets = nn.Conv2d(3, 27, 3, padding=1)
            self.convolution = torchvision.ops.DeformConv2d(3, 3, 3, padding=1)
            self.body = backbone()
            self.out_channels = self.body.out_channels

        def forward(self, images: Tensor) -> Any:
            y, x, mask = self.offsets(images).chunk(3, 1)
            return self.body(self.convolution(images, torch.cat((y, x), 1), mask.sigmoid()))

    return Stem()


def anchors(*ratios: float) -> Any:
    """For the three maps of the backbone."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(((32,), (64,), (128,)), (ratios,) * 3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Faster R-CNN": lambda: detection.FasterRCNN(
        backbone(), CLASSES, rpn_anchor_generator=anchors(0.5, 1.0, 2.0), box_score_thresh=0.0, **SIZE
    ),
    "Mask R-CNN": lambda: detection.MaskRCNN(
        deformable(), CLASSES, rpn_anchor_generator=anchors(0.5, 1.0, 2.0), box_score_thresh=0.0, **SIZE
    ),
    "RetinaNet": lambda: detection.RetinaNet(
        backbone(), CLASSES, anchor_generator=anchors(0.5, 1.0, 2.0), score_thresh=0.0, **SIZE
    ),
    "FCOS": lambda: detection.FCOS(backbone(), CLASSES, anchor_generator=anchors(1.0), score_thresh=0.0, **SIZE),
    "SSDlite": lambda: detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, score_thresh=0.0
    ),
}  # fmt: skip


def inputs() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    draw = torch.Generator().manual_seed(0)
    images = [torch.rand(3, *size, generator=draw) for size in ((150, 200), (180, 160))]
    targets = []
    for image in images:
        low = torch.rand(4, 2, generator=draw) * 80
        boxes = torch.cat((low, low + 20 + torch.rand(4, 2, generator=draw) * 60), 1)
        masks = torch.zeros(4, *image.shape[1:], dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        targets.append({"boxes": boxes, "labels": torch.tensor([1, 2, 3, 4]), "masks": masks})
    return images, targets


def run(make: Callable[[], nn.Module]) -> tuple[dict[str, float], dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    network = make()
    images, targets = inputs()
    losses = network(images, targets)
    sum(losses.values()).backward()
    gradients = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    with torch.no_grad():
        predicted = [p["boxes"] for p in network.eval()(images)]
    return {name: loss.item() for name, loss in losses.items()}, gradients, predicted


def compare(make: Callable[[], nn.Module]) -> dict[str, Any]:
    losses, gradients, predicted = run(make)
    with triops.reference_backend():
        of_reference = run(make)
    weights = sum(1 for _ in make().parameters())
    scale = max(g.abs().max().item() for g in of_reference[1].values())
    return {
        "losses": losses,
        "loss": max(abs(v - of_reference[0][n]) / max(abs(v), 1e-6) for n, v in losses.items()),
        "weights": weights,
        "gradients": len(gradients),
        "finite": all(g.isfinite().all().item() for g in gradients.values()),
        "gradient": max((g - of_reference[1][n]).abs().max().item() for n, g in gradients.items()) / scale,
        "boxes": [len(b) for b in predicted],
        "boxes of the reference": [len(b) for b in of_reference[2]],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(MODELS)
    print(json.dumps({name: compare(MODELS[name]) for name in chosen}))
