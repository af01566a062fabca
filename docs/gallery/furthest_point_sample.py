"""What furthest_point_sample chooses: points that cover the cloud, where a random choice follows its density."""

import torch
from picture import BLUE, GREY, ORANGE, picture

import triops

torch.manual_seed(5)
dense = torch.randn(700, 2) * 0.25 + torch.tensor([-1.2, -0.4])
sparse = torch.rand(120, 2) * torch.tensor([5.0, 3.2]) - torch.tensor([2.5, 1.6])
points = torch.cat([torch.cat([dense, sparse]), torch.zeros(820, 1)], 1)
chosen = triops.furthest_point_sample(points[None], 24)[0].long()
random = torch.randperm(len(points))[:24]

with picture(__file__, 2, 3.4) as axes:
    for axis, index, title in (
        (axes[0], random, "24 at random"),
        (axes[1], chosen, "furthest_point_sample(points, 24)"),
    ):
        axis.scatter(points[:, 0], points[:, 1], s=4, color=GREY)
        color = BLUE if index is random else ORANGE
        axis.scatter(points[index, 0], points[index, 1], s=42, color=color, edgecolor="white", lw=0.6, zorder=3)
        axis.set(title=title, xlim=(-2.7, 2.7), ylim=(-1.8, 1.8))
    for order, (x, y) in enumerate(points[chosen[:6], :2].tolist()):
        axes[1].annotate(str(order), (x, y), (5, 5), textcoords="offset points", fontsize=9)
