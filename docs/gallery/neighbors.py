"""Which neighbors a center gets: the lowest indices within a radius (ball_query), or the nearest (knn)."""

import torch
from matplotlib.patches import Circle
from picture import BLUE, GREY, ORANGE, picture

import triops

torch.manual_seed(9)
points = torch.cat([torch.rand(52, 2) * torch.tensor([4.0, 3.0]), torch.zeros(52, 1)], 1)
centers = torch.tensor([[1.3, 1.6, 0.0], [3.35, 0.8, 0.0]])
radius, k = 0.75, 6
ball = triops.ball_query(points, centers, radius, k)
near, _ = triops.knn(points, centers, k)

with picture(__file__, 2, 3.6) as axes:
    titles = f"ball_query: up to {k} within the radius", f"knn: the {k} nearest"
    for axis, found, title in zip(axes, (ball, near), titles, strict=True):
        axis.scatter(points[:, 0], points[:, 1], s=9, color=GREY)
        for number, (x, y) in enumerate(points[:, :2].tolist()):
            axis.annotate(str(number), (x, y), (2, 2), textcoords="offset points", fontsize=7, color="#607d8b")
        for (x, y, _), index, color in zip(centers.tolist(), found, (BLUE, ORANGE), strict=True):
            for to_x, to_y in points[index.unique().long(), :2].tolist():
                axis.plot([x, to_x], [y, to_y], color=color, lw=0.9)
                axis.scatter(to_x, to_y, s=26, color=color, zorder=3)
            axis.scatter(x, y, s=90, color=color, marker="+", lw=2, zorder=4)
            if found is ball:
                axis.add_patch(Circle((x, y), radius, fill=False, color=color, lw=1, ls="--"))
        axis.set(title=title, xlim=(0, 4.3), ylim=(-0.1, 3.1))
