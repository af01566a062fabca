"""What bev_pool sums: pixels of an image, lifted along their rays by a guess of the depth, by cells seen from above."""

import torch
from picture import BLUE, GREY, picture

import triops

columns, depths, size = 25, 30, 24
angle = torch.linspace(-0.55, 0.55, columns)
distance = torch.linspace(2, 22, depths)
x = distance[:, None] * torch.sin(angle) + size / 2  # [D, W]: where each pixel lies at each depth, from above
y = distance[:, None] * torch.cos(angle)
inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
cells = torch.where(inside, y.floor() * size + x.floor(), -1).long()[None, :, None]  # [N, D, H, W]
wall = torch.where(angle < -0.1, 9.0, torch.where(angle < 0.25, 14.0, 18.5))  # how far what each pixel shows is
depth = torch.exp(-((distance[:, None] - wall) ** 2) / 1.5)
depth = (depth / depth.sum(0))[None, :, None]  # [N, D, H, W]
features = torch.ones(1, 1, columns, 1)  # [N, H, W, C]
grid = triops.bev_pool(features, cells, size * size, depth).view(size, size)

with picture(__file__, 2, 4.0) as axes:
    for column in range(columns):
        axes[0].plot(x[:, column], y[:, column], color=GREY, lw=0.5, zorder=1)
    axes[0].scatter(x.flatten(), y.flatten(), s=1 + 60 * depth.flatten(), color=BLUE, lw=0, zorder=2)
    axes[0].scatter(size / 2, 0.3, s=90, marker="^", color="black")
    axes[0].set(title="rays of pixels; dots: share of a depth", xlim=(0, size), ylim=(0, size))
    axes[1].imshow(grid, origin="lower", extent=(0, size, 0, size), cmap="Blues")
    axes[1].scatter(size / 2, 0.3, s=90, marker="^", color="black")
    axes[1].set(title="sums of the cells")
