"""What dynamic_scatter does: all points of a voxel become one row, without a limit on points or voxels."""

import torch
from matplotlib.patches import Rectangle
from picture import GREY, picture

import triops

torch.manual_seed(6)
points = torch.cat([torch.randn(160, 2) * torch.tensor([1.2, 0.9]) + torch.tensor([3.0, 2.0]), torch.zeros(160, 1)], 1)
feature = torch.sin(points[:, :1] * 1.3) + points[:, 1:2] / 2
cells = triops.dynamic_voxelize(points, (1, 1, 1), (0, 0, 0, 6, 4, 1))
means, voxels = triops.dynamic_scatter(feature, cells, "mean")
low, high = float(feature.min()), float(feature.max())

with picture(__file__, 2, 3.5) as axes:
    for axis, title in zip(axes, ("features of points", "mean of each voxel, in the order of voxels"), strict=True):
        axis.set(title=title, xlim=(0, 6), ylim=(0, 4))
        for line in range(7):
            axis.axvline(line, color=GREY, lw=0.7)
            axis.axhline(min(line, 4), color=GREY, lw=0.7)
    axes[0].scatter(points[:, 0], points[:, 1], s=14, c=feature[:, 0], cmap="viridis", vmin=low, vmax=high)
    colors = axes[0].collections[0].cmap
    for number, ((_, y, x), mean) in enumerate(zip(voxels.tolist(), means[:, 0].tolist(), strict=True)):
        axes[1].add_patch(Rectangle((x, y), 1, 1, color=colors((mean - low) / (high - low)), lw=0))
        axes[1].text(
            x + 0.5,
            y + 0.5,
            str(number),
            ha="center",
            va="center",
            fontsize=9,
            color="white" if mean < (low + high) / 2 else "black",
        )
