"""What a rulebook is: for each output site and each offset of the kernel, the input row that meets it, or none."""

import torch
from picture import BLUE, GREY, ORANGE, picture

import triops

sites = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 2, 4], [0, 4, 1], [0, 5, 5]], dtype=torch.int32)
shape = [7, 7]
strided, _, _ = triops.get_indice_pairs(sites, 1, shape, 3, 2, 1)
rulebook = triops.Rulebook.submanifold(sites, 1, shape, 3)

with picture(__file__, 3) as axes:
    for axis, title, found, size in (
        (axes[0], "input sites (rows)", sites, 7), (axes[1], "3 x 3, stride 2: output sites", strided, 4),
    ):  # fmt: skip
        for line in range(size + 1):
            axis.axhline(line - 0.5, color=GREY, lw=0.6)
            axis.axvline(line - 0.5, color=GREY, lw=0.6)
        for row, (_, y, x) in enumerate(found.tolist()):
            axis.scatter(x, y, s=220, marker="s", color=BLUE if axis is axes[0] else ORANGE, alpha=0.7)
            axis.text(x, y, str(row), ha="center", va="center", color="white", fontsize=9)
        axis.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), title=title)
    table = rulebook.gather
    axes[2].imshow(table >= 0, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    for offset, row in (table >= 0).nonzero().tolist():
        axes[2].text(row, offset, str(int(table[offset, row])), ha="center", va="center", fontsize=8, color="white")
    axes[2].set_aspect("auto")
    axes[2].set(title="submanifold 3 x 3: the table", xlabel="output row", ylabel="offset of the kernel")
