"""What RoI-aware pooling sees: the points of a box, by the cells of a grid that turns with it."""

import torch
from picture import BLUE, GREY, picture, rectangle

import triops

torch.manual_seed(2)
points = torch.cat([torch.rand(260, 2) * torch.tensor([7.0, 5.0]) - torch.tensor([3.5, 2.5]), torch.zeros(260, 1)], 1)
box = torch.tensor([[0.0, 0.0, -0.5, 4.4, 2.4, 1.0, 0.45]])
features = points[:, :1] + 4
pooled = triops.roiaware_pool3d(box, points, features, (4, 3, 1), 64, mode="avg")[0, :, :, 0, 0]
x, y, _, length, width, _, heading = box[0].tolist()
inside = triops.points_in_boxes(points[None], box[None], z_origin="bottom")[0] >= 0

with picture(__file__, 2, 3.2) as axes:
    axes[0].scatter(points[:, 0], points[:, 1], s=6, c=[BLUE if i else GREY for i in inside])
    turn = torch.tensor(heading)
    for i in range(4):
        for j in range(3):
            dx, dy = (i + 0.5) / 4 * length - length / 2, (j + 0.5) / 3 * width - width / 2
            at = x + dx * turn.cos() - dy * turn.sin(), y + dx * turn.sin() + dy * turn.cos()
            rectangle(axes[0], float(at[0]), float(at[1]), length / 4, width / 3, heading, BLUE, lw=0.8)
    axes[0].set(title="points and cells of a box", xlim=(-3.5, 3.5), ylim=(-2.5, 2.5))
    image = axes[1].imshow(pooled.T, origin="lower", cmap="viridis")
    axes[1].set(title="mean of x + 4 in each cell", xlabel="along the heading", ylabel="to the left")
    axes[1].figure.colorbar(image, ax=axes[1], shrink=0.7)
