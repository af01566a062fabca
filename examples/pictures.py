"""What the examples share to draw: a scene from above with its objects and the boxes that a detector found."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def footprints(boxes: Tensor) -> Tensor:
    """The corners of 3D boxes [N, 7] seen from above, the first once more at the end: [N, 5, 2]."""
    signs = boxes.new_tensor([[1, 1], [-1, 1], [-1, -1], [1, -1], [1, 1]]) / 2
    x, y = (signs * boxes[:, None, 3:5]).unbind(-1)
    cos, sin = boxes[:, 6:7].cos(), boxes[:, 6:7].sin()
    return torch.stack([x * cos - y * sin, x * sin + y * cos], -1) + boxes[:, None, :2]


def draw_detections(points: Tensor, truth: Tensor, found: Tensor, title: str, file: Path) -> None:
    """points [M, 3 and more], boxes [T, 7] and [K, 7]; writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 8), layout="constrained")
    x, y = points[:, 0].cpu(), points[:, 1].cpu()
    axis.scatter(x, y, s=0.4, c="#90a4ae", linewidths=0)
    for boxes, color, width, name in ((truth, "#2e7d32", 3.0, "object"), (found, "#ef6c00", 1.3, "found")):
        for number, corners in enumerate(footprints(boxes.detach().cpu())):
            label = f"{name} ({len(boxes)})" if number == 0 else None
            axis.plot(corners[:, 0], corners[:, 1], color=color, lw=width, label=label)
    axis.set(aspect="equal", xlabel="x, m", ylabel="y, m", title=title)
    axis.set(xlim=(x.min(), x.max()), ylim=(y.min(), y.max()))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2, frameon=False)  # hides nothing
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)
