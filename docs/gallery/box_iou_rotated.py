"""Overlap of a square with itself, turned, and of two rectangles that move apart."""

import math

import torch
from matplotlib.patches import Polygon
from picture import BLUE, ORANGE, corners, picture, rectangle

import triops

first = torch.tensor([[0.0, 0.0, 4.0, 2.0, 0.0]])
turned = torch.tensor([[0.4, 0.2, 4.0, 2.0, math.pi / 5]])
iou = triops.box_iou_rotated(first, turned).item()
angles = torch.linspace(0, math.pi, 181)
curve = triops.box_iou_rotated(first, torch.cat([first[:, :4].expand(181, 4), angles[:, None]], 1))[0]

with picture(__file__, 2, 3.2) as axes:
    axes[0].add_patch(Polygon(corners(*turned[0].tolist()).numpy(), color=ORANGE, alpha=0.15, lw=0))
    axes[0].add_patch(Polygon(corners(*first[0].tolist()).numpy(), color=BLUE, alpha=0.15, lw=0))
    rectangle(axes[0], *first[0].tolist(), BLUE)
    rectangle(axes[0], *turned[0].tolist(), ORANGE)
    axes[0].set(xlim=(-2.8, 3), ylim=(-2.2, 2.4), title=f"IoU {iou:.3f}")
    axes[1].set_aspect("auto")
    axes[1].plot(angles.rad2deg(), curve, color=BLUE)
    axes[1].set(xlabel="angle between two rectangles of 4 x 2 at one place, degrees", ylabel="IoU", ylim=(0, 1.05))
    axes[1].xaxis.label.set_fontsize(8)
