"""What `triops demo` runs, and its picture: a synthetic sweep from above, points coloured by the box that holds them.

Operators are timed at the scale of a network and checked on a small input: the reference takes seconds where a kernel
takes milliseconds. A first demo compiles what it runs, so that it runs a tour of the library, not all of it.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

import triops
from triops import _sample
from triops._bench import Row, interleaved
from triops._op import OPERATORS
from triops._sample import Sample

# From points to boxes, then what works on images.
TOUR = (
    "points_in_boxes", "voxelize_padded", "dynamic_scatter_forward", "get_indice_pairs", "sparse_conv",
    "roiaware_pool3d_forward", "box_iou_rotated", "nms_rotated", "bbox_overlaps", "nms", "roi_align_forward",
    "border_align_forward",
)  # fmt: skip


def timed_samples(every: bool = False) -> list[Sample]:
    """Those of the tour, or of every operator."""
    found = [s for s in _sample.all_samples() if s.demo]
    return found if every else sorted((s for s in found if s.operator in TOUR), key=lambda s: TOUR.index(s.operator))


def checked_samples(every: bool = False) -> list[Sample]:
    """For each operator of the demo its first small sample."""
    small = [s for s in _sample.all_samples() if s.scale == "general"]
    names = dict.fromkeys(s.operator for s in timed_samples(every))
    return [next(s for s in small if s.operator == name) for name in names]


def inputs(operator: str) -> list[tuple[Sample, torch.dtype]]:
    """All that the demo calls an operator with."""
    return [(s, s.dtypes[0]) for s in (*checked_samples(True), *timed_samples(True)) if s.operator == operator]


def public_name(operator: str) -> str:
    """The function that users call, of an operator that is its forward or its padded form.

    >>> public_name("voxelize_padded"), public_name("roi_align_forward"), public_name("roi_align_backward")
    ('voxelize', 'roi_align', 'roi_align_backward')
    """
    name = operator.removesuffix("_forward").removesuffix("_padded")
    return name if name in triops.__all__ else operator


def timed(sample: Sample, device: str, right: bool) -> Row:
    """One sample, timed for a tenth of a second. right: what the check said of the operator."""
    operator, dtype = OPERATORS[sample.operator], sample.dtypes[0]
    args = _sample.to_device(sample.make(dtype), device)
    seconds = interleaved({"triops": lambda: operator(*args)}, 0.1)["triops"]
    work = _sample.module_of(operator).work(operator.name, args)
    name = str(dtype).removeprefix("torch.")
    return Row(public_name(operator.name), sample.name, name, device, right, seconds, work.bytes, work.ops)


def draw_scene(points: Tensor, boxes: Tensor, index: Tensor, path: Path) -> None:
    """points [M, 3], boxes [T, 7], index [M] as points_in_boxes gives it; writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points, boxes, index = points.cpu(), boxes.cpu(), index.cpu()
    held = index >= 0
    figure, axes = plt.subplots(figsize=(10, 10), facecolor="white")
    axes.scatter(points[~held, 0], points[~held, 1], s=0.15, c="#b8bec6", linewidths=0)
    colours = plt.get_cmap("tab20")(index[held].numpy() % 20)
    axes.scatter(points[held, 0], points[held, 1], s=4, c=colours, linewidths=0)
    for t, (x, y, _, dx, dy, _, heading) in enumerate(boxes.tolist()):
        colour = plt.get_cmap("tab20")(t % 20)
        corners = torch.tensor([[1, 1], [1, -1], [-1, -1], [-1, 1], [1, 1]]) * torch.tensor([dx, dy]) / 2
        turn = torch.tensor([[math.cos(heading), math.sin(heading)], [-math.sin(heading), math.cos(heading)]])
        outline = corners @ turn + torch.tensor([x, y])
        axes.plot(outline[:, 0], outline[:, 1], color=colour, linewidth=1.1)
        nose = torch.tensor([[0.0, 0.0], [dx * 0.5 + 1.2, 0.0]]) @ turn + torch.tensor([x, y])
        axes.plot(nose[:, 0], nose[:, 1], color=colour, linewidth=1.1)
    axes.plot(0, 0, marker="^", color="black", markersize=7)
    axes.set(xlim=(-75, 75), ylim=(-75, 75), aspect="equal", xlabel="x [m]", ylabel="y [m]")
    axes.set_title(
        f"points_in_boxes: {len(points):,} points, {len(boxes)} boxes, {int(held.sum()):,} points inside", fontsize=12
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
