"""What the scripts of the gallery share: a figure that is saved under the script's name, boxes, colours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Polygon

FOLDER = Path(__file__).parent.parent / "images" / "gallery"
BLUE, ORANGE, GREEN, RED, GREY = "#3f51b5", "#ef6c00", "#2e7d32", "#c62828", "#b0bec5"


@contextmanager
def picture(script: str, panels: int = 1, height: float = 4.0) -> Iterator[Any]:
    """Axes side by side, saved to docs/images/gallery or the folder given on the command line."""
    figure, axes = plt.subplots(1, panels, figsize=(4.5 * panels, height), layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.set_aspect("equal")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    yield axes[0][0] if panels == 1 else axes[0]
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    figure.savefig(
        folder / f"{Path(script).stem}.png", dpi=110, bbox_inches="tight", pad_inches=0.08, metadata={"Software": None}
    )
    plt.close(figure)


def corners(x: float, y: float, width: float, height: float, angle: float) -> torch.Tensor:
    """The corners [4, 2] of a rectangle that is turned from x towards y."""
    signs = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]]) / 2
    cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()
    turn = torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])])
    return (signs * torch.tensor([width, height])) @ turn.T + torch.tensor([x, y])


def rectangle(
    axis: Any, x: float, y: float, width: float, height: float, angle: float, color: str, **style: Any
) -> None:
    polygon = Polygon(corners(x, y, width, height, angle).numpy(), closed=True, fill=False, edgecolor=color, lw=1.8)
    polygon.set(**style)
    axis.add_patch(polygon)
