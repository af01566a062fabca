"""What one query of deformable attention reads: a few places on each level of a pyramid, by their weights."""

import torch
from picture import BLUE, picture

import triops

torch.manual_seed(7)
levels, starts = torch.tensor([[16, 16], [8, 8]]), torch.tensor([0, 256])
value = torch.randn(1, 320, 1, 1, requires_grad=True)
reference = torch.tensor([0.55, 0.45])
places = reference + torch.randn(1, 1, 1, 2, 4, 2) * torch.tensor([0.17])
weights = torch.rand(1, 1, 1, 2, 4).flatten(3).softmax(-1).view(1, 1, 1, 2, 4)
triops.ms_deform_attn(value, levels, starts, places, weights).sum().backward()
read = value.grad[0, :, 0, 0]  # how much each pixel counts in the answer
maps = read[:256].view(16, 16), read[256:].view(8, 8)

with picture(__file__, 2, 3.6) as axes:
    for axis, grid, spots, shares in zip(axes, maps, places[0, 0, 0], weights[0, 0, 0], strict=True):
        size = len(grid)
        axis.imshow(grid, cmap="Oranges", vmin=0, vmax=float(read.max()))
        spot = reference * size - 0.5
        for place, share in zip(spots * size - 0.5, shares, strict=True):
            axis.plot([spot[0], place[0]], [spot[1], place[1]], color=BLUE, lw=0.8)
            axis.scatter(*place.tolist(), s=30 + 400 * float(share), facecolor="none", edgecolor=BLUE, lw=1.5, zorder=3)
        axis.scatter(*spot.tolist(), s=90, color="black", marker="+", lw=2.2, zorder=4)
        axis.set(title=f"level of {size} x {size} pixels")
