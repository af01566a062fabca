"""What roi_align samples: a box is cut into bins, and each bin is the mean of a few bilinear samples."""

import torch
from picture import BLUE, ORANGE, picture, rectangle

import triops

torch.manual_seed(4)
height, width, bins, samples = 9, 12, 3, 2
features = torch.nn.functional.avg_pool2d(torch.rand(1, 1, height + 2, width + 2), 3, 1)
x1, y1, x2, y2 = 2.3, 1.6, 9.5, 7.3
pooled = triops.roi_align(features, torch.tensor([[0, x1, y1, x2, y2]]), bins, 1.0, samples, aligned=True)[0, 0]
wide, high = (x2 - x1) / bins, (y2 - y1) / bins

with picture(__file__, 2, 3.4) as axes:
    low, most = float(features.min()), float(features.max())
    axes[0].imshow(features[0, 0], cmap="viridis", vmin=low, vmax=most, alpha=0.75)
    for i in range(bins):
        for j in range(bins):  # half a pixel up and left: pixel 0 has its centre at 0.5 of the image
            at = x1 - 0.5 + (j + 0.5) * wide, y1 - 0.5 + (i + 0.5) * high
            rectangle(axes[0], *at, wide, high, 0.0, BLUE, lw=1.5)
            for step in range(samples * samples):
                down, right = divmod(step, samples)
                x, y = at[0] + ((right + 0.5) / samples - 0.5) * wide, at[1] + ((down + 0.5) / samples - 0.5) * high
                axes[0].scatter(x, y, s=16, color=ORANGE, edgecolor="white", lw=0.5, zorder=3)
    axes[0].set(title="box, 3 x 3 bins, 2 x 2 samples each")
    axes[1].imshow(pooled, cmap="viridis", vmin=low, vmax=most, alpha=0.75)
    for i in range(bins):
        for j in range(bins):
            axes[1].text(j, i, f"{pooled[i, j]:.2f}", ha="center", va="center", color="black", fontsize=11)
    axes[1].set(title="mean of the samples of each bin", xticks=range(bins), yticks=range(bins))
