"""torchvision's operators, supplied where it has none: its answers, gradients, errors, and when they are supplied."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_op import python
from torch import Tensor

from triops.compat import torchvision as supplied

OPERATORS = supplied.OPERATORS

# A torchvision that finds no compiled operators, as it says so since 0.28.
EXTENSION = """
import os
def _has_ops():
    return "OPS" in os.environ
"""
PACKAGE = """
from torchvision import extension
import torch
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)
"""


def maps(channels: int, seed: int = 0) -> Tensor:
    return torch.randn(2, channels, 11, 13, generator=torch.Generator().manual_seed(seed))


def boxes(count: int, seed: int = 0) -> Tensor:
    """On both images and beyond their edges, halves among the corners, some of no size or turned over."""
    draw = torch.Generator().manual_seed(seed)
    corners = torch.randint(-8, 36, (count, 4), generator=draw) / 2
    return torch.cat((torch.randint(0, 2, (count, 1), generator=draw), corners), 1)


def halves_up(value: float) -> int:
    """Away from zero, as C's `round`."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def whole_bins(box: Tensor, scale: float, bins: tuple[int, int], size: tuple[int, int], inclusive: int) -> Any:
    """Rows and columns of each bin, by a loop."""
    x1, y1, x2, y2 = (halves_up(v * scale) for v in box[1:].tolist())
    sides = []
    for low, high, count, limit in ((y1, y2, bins[0], size[0]), (x1, x2, bins[1], size[1])):
        length = max(high - low + inclusive, 1) / count
        ends = [(math.floor(p * length) + low, math.ceil((p + 1) * length) + low) for p in range(count)]
        sides.append([range(*(min(max(e, 0), limit - 1 + inclusive) for e in end)) for end in ends])
    return sides


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_roi_pool_is_the_maximum_over_whole_pixels(scale: float) -> None:
    input, rois, bins = maps(3), boxes(40), (4, 2)  # lengths that these divide are exact
    output, argmax = OPERATORS["roi_pool"](input, rois, scale, *bins)
    grad = OPERATORS["_roi_pool_backward"](torch.ones_like(output), rois, argmax, scale, *bins, 2, 3, 11, 13)
    expected = torch.zeros_like(input)
    for k, box in enumerate(rois):
        rows, columns = whole_bins(box, scale, bins, (11, 13), 1)
        for p, own_rows in enumerate(rows):
            for q, own_columns in enumerate(columns):
                for c in range(3):
                    places = [(y, x) for y in own_rows for x in own_columns]
                    values = [input[int(box[0]), c, y, x].item() for y, x in places]
                    best = max(range(len(values)), key=values.__getitem__, default=None)
                    assert output[k, c, p, q] == (0 if best is None else values[best])
                    assert argmax[k, c, p, q] == (-1 if best is None else places[best][0] * 13 + places[best][1])
                    if best is not None:
                        expected[int(box[0]), c, places[best][0], places[best][1]] += 1
    assert torch.equal(grad, expected)


def test_ps_roi_pool_is_the_mean_over_the_bins_own_channel() -> None:
    input, rois, bins = maps(16), boxes(40), (4, 2)
    output, mapping = OPERATORS["ps_roi_pool"](input, rois, 1.0, *bins)
    grad = OPERATORS["_ps_roi_pool_backward"](torch.ones_like(output), rois, mapping, 1.0, *bins, 2, 16, 11, 13)
    given = torch.zeros_like(input)
    for k, box in enumerate(rois):
        rows, columns = whole_bins(box, 1.0, bins, (11, 13), 0)
        for p, own_rows in enumerate(rows):
            for q, own_columns in enumerate(columns):
                for c in range(2):
                    channel = (c * bins[0] + p) * bins[1] + q
                    assert mapping[k, c, p, q] == channel
                    bin = (int(box[0]), channel, slice(own_rows.start, max(own_rows.stop, own_rows.start)),
                           slice(own_columns.start, max(own_columns.stop, own_columns.start)))  # fmt: skip
                    area = input[bin].numel()
                    expected = input[bin].mean().item() if area else 0.0
                    assert output[k, c, p, q].item() == pytest.approx(expected, abs=1e-6)
                    if area:
                        given[bin] += 1 / area
    assert torch.allclose(grad, given, atol=1e-5)


def test_ps_roi_align_is_roi_align_of_the_bins_own_channel() -> None:
    input, rois = maps(12), boxes(30)
    output, mapping = OPERATORS["ps_roi_align"](input, rois, 0.5, 2, 3, 2)
    every = OPERATORS["roi_align"](input, rois, 0.5, 2, 3, 2, True)
    for p in range(2):
        for q in range(3):
            assert torch.equal(output[:, :, p, q], every[:, p * 3 + q :: 6, p, q])
            assert (mapping[:, 1, p, q] == 6 + p * 3 + q).all()
    with pytest.raises(RuntimeError, match="channels must be a multiple"):
        supplied._refusing(OPERATORS["ps_roi_align"])(maps(7), rois, 0.5, 2, 3, 2)


def test_angles_of_rotated_boxes_are_degrees() -> None:
    overlaps = OPERATORS["box_iou_rotated"](
        torch.tensor([[0.0, 0, 4, 2, 90]]), torch.tensor([[0.0, 0, 2, 4, 0], [0, 0, 4, 2, 0]])
    )
    assert overlaps[0].tolist() == pytest.approx([1, 4 / 12])


def test_integers_that_stand_for_numbers() -> None:
    """roi_align of them is that of the numbers, rounded; nms needs neither scale nor zero point."""
    input = torch.randint(40, 90, (1, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rois = torch.tensor([[7, 12, 14, 22, 26], [7, 10, 10, 26, 14]], dtype=torch.uint8)  # (0, 1, 2, 6, 8) and so on
    got = OPERATORS["qroi_align"](input, rois, 0.25, 10, 0.5, 10, 1.0, 2, 2, 2, True)
    numbers = (input.float() - 10) * 0.25
    whole = torch.tensor([[0.0, 1, 2, 6, 8], [0, 0, 0, 8, 2]])
    expected = OPERATORS["roi_align"](numbers, whole, 1.0, 2, 2, 2, True)
    assert got.dtype == torch.uint8
    assert ((got.float() - 10) * 0.25 - expected).abs().max() <= 0.125 + 1e-5
    with pytest.raises(ValueError, match="one image"):
        OPERATORS["qroi_align"](input.expand(2, -1, -1, -1), rois, 0.25, 10, 0.5, 10, 1.0, 2, 2, 2, True)
    boxes = torch.tensor([[10, 10, 20, 20], [11, 11, 21, 21], [40, 40, 50, 50]], dtype=torch.uint8)
    assert OPERATORS["qnms"](boxes, torch.tensor([5, 9, 7], dtype=torch.uint8), 0.5).tolist() == [1, 2]


def package(folder: Path, **more: str) -> dict[str, str]:
    """A folder with such a torchvision, and where Python finds it."""
    (folder / "torchvision").mkdir()
    for name, text in {"extension": EXTENSION, "__init__": PACKAGE, **more}.items():
        (folder / "torchvision" / f"{name}.py").write_text(text)
    return {"PYTHONPATH": f"{Path(supplied.__file__).parents[2]}:{folder}"}


def test_a_torchvision_without_operators_gets_them(tmp_path: Path) -> None:
    done = python(
        """
        import torch, triops.compat.torchvision, torchvision
        print(torchvision.extension._has_ops(), torch.ops.torchvision._cuda_version())
        boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]])
        scores = torch.tensor([0.5, 0.9, 0.7])
        print(torch.ops.torchvision.nms(boxes, scores, 0.5).tolist())
        print(torch.jit.script(torchvision.extension._has_ops)())
        compiled = torch.compile(lambda b, s: torch.ops.torchvision.nms(b, s, 0.5) + 1, fullgraph=True, backend="eager")
        print(compiled(boxes, scores).tolist())
        try:
            torch.ops.torchvision.nms(boxes[:, :3], scores, 0.5)
        except RuntimeError as error:
            print(isinstance(error, ValueError), error)
        """,
        **package(tmp_path),
    )
    lines = done.stdout.splitlines()
    assert lines[:4] == ["True -1", "[1, 2]", "True", "[2, 3]"], done.stderr
    assert lines[4].startswith("True nms: boxes must have shape [N, 4]")


def test_a_torchvision_with_operators_keeps_them(tmp_path: Path) -> None:
    done = python(
        """
        import triops.compat._finder as finder, sys
        finder.install("torchvision")
        import torch
        from torchvision import extension
        print(extension._has_ops.__module__, hasattr(torch.ops.torchvision, "nms"),
              "triops.compat.torchvision" in sys.modules)
        """,
        **package(tmp_path, __init__=""),
        OPS="1",
    )
    assert done.stdout.split() == ["torchvision.extension", "False", "False"], done.stderr


def test_operators_for_the_cpu_alone_get_their_part_for_gpus(tmp_path: Path) -> None:
    """A torchvision for CPUs beside a torch for GPUs."""
    done = python(
        """
        import triops.compat.torchvision, torch
        own = torch.library.Library("torchvision", "FRAGMENT")
        own.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        own.impl("nms", lambda dets, scores, iou_threshold: torch.tensor([7]), "CPU")
        torch.version.cuda = "13.0"
        from torchvision import extension
        known = torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CUDA")
        print(known, extension._has_ops.__module__, hasattr(torch.ops.torchvision, "roi_pool"))
        print(torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5).tolist())
        """,
        **package(tmp_path, __init__=""),
        OPS="1",
    )
    assert done.stdout.splitlines() == ["True torchvision.extension False", "[7]"], done.stderr


# Before 0.28 gradients and types under autocast were compiled too.
GRADIENTS = """
import torch, triops.compat.torchvision, torchvision
ops = torch.ops.torchvision
draw = torch.Generator().manual_seed(0)
rand = lambda *shape: torch.rand(*shape, generator=draw, dtype=torch.float64)
x = rand(2, 8, 6, 7).requires_grad_()
rois = torch.cat((torch.tensor([[0.0], [1], [1]]), rand(3, 2) * 2, 3 + rand(3, 2) * 3), 1).double()
for f in (
    lambda x: ops.roi_align(x, rois, 1.0, 2, 2, 2, True),
    lambda x: ops.roi_pool(x, rois, 1.0, 2, 2)[0],
    lambda x: ops.ps_roi_align(x, rois, 1.0, 2, 2, 2)[0],
    lambda x: ops.ps_roi_pool(x, rois, 1.0, 2, 2)[0],
):
    print(torch.autograd.gradcheck(f, (x,)))
conv = [rand(1, 4, 5, 5), rand(6, 2, 3, 3), rand(1, 36, 5, 5) - 0.5, rand(1, 18, 5, 5), rand(6)]
conv = [t.requires_grad_() for t in conv]
print(torch.autograd.gradcheck(lambda *a: ops.deform_conv2d(*a, 1, 1, 1, 1, 1, 1, 2, 2, True), conv))
plain = [t for i, t in enumerate(conv) if i != 3]
plain[2] = rand(1, 36, 5, 5).requires_grad_()
unmasked = lambda i, w, o, b: ops.deform_conv2d(i, w, o, torch.zeros(1, 1).double(), b, 1, 1, 1, 1, 1, 1, 2, 2, False)
print(torch.autograd.gradcheck(unmasked, plain))
once = torch.autograd.grad(ops.roi_align(x, rois, 1.0, 2, 2, 2, True).sum(), x, create_graph=True)[0]
half = torch.autocast("cpu", torch.bfloat16)
with half:
    out = ops.roi_align(x.bfloat16(), rois.float(), 1.0, 2, 2, 2, True)
print(out.dtype)
"""


def test_an_older_torchvision_gets_gradients_and_autocast_too(tmp_path: Path) -> None:
    done = python(GRADIENTS, **package(tmp_path))
    assert done.stdout.split() == ["True"] * 6 + ["torch.bfloat16"], done.stderr
