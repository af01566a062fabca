"""Where a deformable convolution reads: each tap of the kernel at a place of its own, here along a curve."""

import torch
from picture import BLUE, ORANGE, picture

import triops

size, row, column = 15, 8, 7
y, x = torch.meshgrid(torch.arange(size) * 1.0, torch.arange(size) * 1.0, indexing="ij")
curve = 8 + 3.5 * torch.sin((x - 7) / 3)  # the row of a curved thing at each column
features = torch.exp(-((y - curve) ** 2) / 1.5)[None, None]
taps = torch.tensor([[k, t] for k in (-1.0, 0.0, 1.0) for t in (-1.0, 0.0, 1.0)])
wanted_x = column + torch.linspace(-5.2, 5.2, 9)
wanted = torch.stack([8 + 3.5 * torch.sin((wanted_x - 7) / 3), wanted_x], 1)
wanted = wanted.view(3, 3, 2).transpose(0, 1).flatten(0, 1)  # left taps to the left
moved = wanted - (taps + torch.tensor([row * 1.0, column * 1.0]))  # dy, dx of each tap
offset = torch.zeros(1, 18, size, size)
offset[0, :, row, column] = moved.flatten()
mean = torch.full((1, 1, 3, 3), 1 / 9)
plain = triops.deform_conv2d(features, torch.zeros_like(offset), mean, padding=1)[0, 0, row, column]
deformed = triops.deform_conv2d(features, offset, mean, padding=1)[0, 0, row, column]

with picture(__file__, height=4.2) as axis:
    axis.imshow(features[0, 0], cmap="Greys", alpha=0.55)
    usual = taps + torch.tensor([row, column])
    for (tap_y, tap_x), (to_y, to_x) in zip(usual.tolist(), wanted.tolist(), strict=True):
        axis.annotate("", (to_x, to_y), (tap_x, tap_y), arrowprops={"arrowstyle": "->", "color": "#455a64", "lw": 0.8})
        axis.scatter(tap_x, tap_y, s=40, color=BLUE, zorder=3)
        axis.scatter(to_x, to_y, s=40, color=ORANGE, zorder=3)
    axis.scatter([], [], s=40, color=BLUE, label=f"without offsets: mean {plain:.2f}")
    axis.scatter([], [], s=40, color=ORANGE, label=f"with offsets: mean {deformed:.2f}")
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=2, frameon=False)
