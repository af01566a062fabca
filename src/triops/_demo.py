"""The picture of `triops demo`: a synthetic sweep from above, points coloured by the box that holds them."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor


def draw_scene(points: Tensor, boxes: Tensor, index: Tensor, path: Path) -> None:
    """points [M, 3], boxes [T, 7], index [M] as points_in_boxes gives it; writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points, boxes, index = points.cpu(), boxes.cpu(), index.cpu()
    held = index >= 0
    figure, axes = plt.subplots(figsize=(10, 10), facecolor="white")
    axes.scatter(points[~held, 0], points[~held, 1], s=0.15, c="#b8bec6", linewidths=0)
    colours = plt.get_cmap("tab20")(index[held].numpy() % 20)
    axes.scatter(points[held, 0], points[held, 1], s=4, c=colours, linewidths=0)
    for t, (x, y, _, dx, dy, _, heading) in enumerate(boxes.tolist()):
        colour = plt.get_cmap("tab20")(t % 20)
        corners = torch.tensor([[1, 1], [1, -1], [-1, -1], [-1, 1], [1, 1]]) * torch.tensor([dx, dy]) / 2
        turn = torch.tensor([[math.cos(heading), math.sin(heading)], [-math.sin(heading), math.cos(heading)]])
        outline = corners @ turn + torch.tensor([x, y])
        axes.plot(outline[:, 0], outline[:, 1], color=colour, linewidth=1.1)
        nose = torch.tensor([[0.0, 0.0], [dx * 0.5 + 1.2, 0.0]]) @ turn + torch.tensor([x, y])
        axes.plot(nose[:, 0], nose[:, 1], color=colour, linewidth=1.1)
    axes.plot(0, 0, marker="^", color="black", markersize=7)
    axes.set(xlim=(-75, 75), ylim=(-75, 75), aspect="equal", xlabel="x [m]", ylabel="y [m]")
    axes.set_title(
        f"points_in_boxes: {len(points):,} points, {len(boxes)} boxes, {int(held.sum()):,} points inside", fontsize=12
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
