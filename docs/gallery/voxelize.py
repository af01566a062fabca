"""How voxels fill: each keeps its first points, and voxels that begin too late are dropped."""

import torch
from matplotlib.patches import Rectangle
from picture import BLUE, GREY, RED, picture

import triops

torch.manual_seed(3)
points = torch.cat([torch.rand(40, 2) * 5, torch.zeros(40, 1)], 1)
voxels, coords, num_points, slots, count = triops.voxelize_padded(points, (1, 1, 1), (0, 0, 0, 5, 5, 1), 2, 14)
kept = slots >= 0

with picture(__file__) as axis:
    for line in range(6):
        axis.axhline(line, color=GREY, lw=0.7)
        axis.axvline(line, color=GREY, lw=0.7)
    for number, (_, y, x) in enumerate(coords[: int(count)].tolist()):
        axis.add_patch(Rectangle((x, y), 1, 1, color=BLUE, alpha=0.12, lw=0))
        axis.text(x + 0.06, y + 0.78, str(number), fontsize=8, color=BLUE)
    axis.scatter(points[kept, 0], points[kept, 1], s=14, color=BLUE, label="kept")
    axis.scatter(points[~kept, 0], points[~kept, 1], s=18, color=RED, marker="x", label="left out")
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=2, frameon=False)
    axis.set(xlim=(0, 5), ylim=(0, 5))
