"""What suppression keeps: of boxes that overlap, the one with the highest score."""

import torch
from picture import BLUE, GREY, picture, rectangle

import triops

boxes = torch.tensor(
    [
        [0.0, 0.0, 4.0, 2.0, 0.3], [0.3, 0.2, 4.0, 2.0, 0.4], [-0.2, 0.1, 4.2, 1.9, 0.15],
        [5.0, 1.0, 3.0, 1.6, -0.6], [5.2, 0.8, 3.0, 1.6, -0.5], [4.4, -1.6, 2.0, 1.0, 0.0],
    ]
)  # fmt: skip
scores = torch.tensor([0.9, 0.8, 0.6, 0.7, 0.75, 0.5])
kept = triops.nms_rotated(boxes, scores, 0.3).tolist()

with picture(__file__, 2, 3.2) as axes:
    for axis, title in zip(axes, ("before", "kept, threshold 0.3"), strict=True):
        for number, box in enumerate(boxes.tolist()):
            if number in kept or axis is axes[0]:
                color = BLUE if number in kept else GREY
                rectangle(axis, *box, color)
                axis.text(box[0], box[1] + (0.25 if number in kept else -0.35), f"{scores[number]:.2f}", color=color)
        axis.set(xlim=(-2.8, 7), ylim=(-2.6, 2.9), title=title)
