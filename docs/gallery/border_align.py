"""What border_align samples: points along each border; of each border and channel the largest value wins."""

import torch
from picture import BLUE, GREEN, ORANGE, RED, picture, rectangle

import triops

torch.manual_seed(1)
height, width, pool = 8, 10, 5
one = torch.nn.functional.avg_pool2d(torch.rand(1, 1, height + 2, width + 2), 3, 1)
box = [1.5, 1.0, 7.5, 6.0]
values, steps = triops.border_align_forward(one.expand(1, 4, height, width).contiguous(), torch.tensor([[box]]), pool)
x1, y1, x2, y2 = box
starts = {"top": (x1, y1, 1, 0), "left": (x1, y1, 0, 1), "bottom": (x2, y2, -1, 0), "right": (x2, y2, 0, -1)}

with picture(__file__, height=3.8) as axis:
    axis.imshow(one[0, 0], cmap="Greys", alpha=0.6)
    rectangle(axis, (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, 0.0, BLUE, lw=1)
    for border, ((name, (x, y, right, down)), color) in enumerate(
        zip(starts.items(), (BLUE, ORANGE, GREEN, RED), strict=True)
    ):
        for step in range(pool + 1):
            at = x + right * step * (x2 - x1) / pool, y + down * step * (y2 - y1) / pool
            best = step == int(steps[0, 0, 0, border])
            axis.scatter(*at, s=90 if best else 14, color=color, label=name if best else None, zorder=3)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=4, frameon=False)
