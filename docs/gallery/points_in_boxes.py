"""Which points lie in which box; a point in two boxes belongs to the first."""

import torch
from picture import BLUE, GREY, ORANGE, picture, rectangle

import triops

torch.manual_seed(0)
boxes = torch.tensor([[-1.5, 0.0, 0.0, 4.0, 2.0, 2.0, 0.5], [1.0, 0.5, 0.0, 4.0, 2.0, 2.0, -0.3]])
points = torch.cat([torch.rand(700, 2) * torch.tensor([9.0, 5.0]) - torch.tensor([4.5, 2.5]), torch.zeros(700, 1)], 1)
index = triops.points_in_boxes(points[None], boxes[None])[0]

with picture(__file__, height=3.2) as axis:
    for number, color in ((-1, GREY), (0, BLUE), (1, ORANGE)):
        part = points[index == number]
        axis.scatter(part[:, 0], part[:, 1], s=5, color=color, label=f"{number}")
    for box, color in zip(boxes.tolist(), (BLUE, ORANGE), strict=True):
        rectangle(axis, box[0], box[1], box[3], box[4], box[6], color)
    axis.legend(title="index", fontsize=8, loc="upper right", markerscale=2)
    axis.set(xlim=(-4.5, 6), ylim=(-2.6, 2.6))
