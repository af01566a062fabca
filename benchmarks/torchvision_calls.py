"""Time small calls of nms, roi_align, roi_pool and deform_conv2d on one thread of this CPU against torchvision's.

    python benchmarks/torchvision_calls.py [--library FILE] [--seconds 1] [--date YYYY-MM-DD] [--machine NAME]

Both are called as a user calls them, by their functions, and trained as a user trains them, through autograd. Answers
are compared, then the calls take turns. A time is processor time, the fastest of all turns. Beside torchvision's
functions stand its bare operators, `torch.ops.torchvision`, which take no default arguments and check less. With
--library, the file of its C++ operators, they are loaded without torchvision's Python files: since 0.28 these register
autograd for the operators, and a call takes longer by that. Else a torchvision is needed that imports beside this
torch. Writes benchmarks/results/cpu-torchvision.json, or cpu-torchvision-library.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import triops
from triops.ops.roi_align import roi_align_backward
from triops.ops.roi_pool import roi_pool_backward, roi_pool_forward

TURN = 0.002  # seconds of calls between two looks at the clock
BARE = torch.ops.torchvision
torchvision: Any = None  # its Python files, where they are timed
VERSION = ""


def _boxes(count: int, size: int, generator: torch.Generator) -> Tensor:
    """With whole corners, on which torchvision's roi_pool and this one agree."""
    low = torch.rand(count, 2, generator=generator) * size * 0.6
    return torch.cat([low, low + 1 + torch.rand(count, 2, generator=generator) * size * 0.4], 1).floor()


def cases() -> Iterator[tuple[str, str, list[Callable[..., Any]], list[Tensor]]]:
    """Operator, case, [ours, torchvision's bare operator, its function where it has one], operands."""
    draw = torch.Generator().manual_seed(0)
    for count in (1, 4, 16, 100):
        operands: list[Tensor] = [_boxes(count, 50, draw), torch.rand(count, generator=draw)]
        of_nms: list[Callable[..., Any]] = [triops.nms, BARE.nms, lambda *args: torchvision.ops.nms(*args)]
        yield "nms", f"{count} box{'es' * (count > 1)}", [lambda b, s, f=f: f(b, s, 0.5) for f in of_nms], operands
    for shape, count, bins in (((1, 1, 8, 8), 1, 2), ((1, 16, 8, 8), 1, 7), ((1, 16, 8, 8), 16, 7)):
        boxes = torch.cat([torch.zeros(count, 1), _boxes(count, 8, draw)], 1)
        operands = [torch.rand(shape, generator=draw), boxes]
        name = f"{list(shape)} NCHW, {count} box{'es' * (count > 1)}, {bins} x {bins}"
        grad = torch.rand(count, shape[1], bins, bins, generator=draw)
        for ratio, words in ((2, "2 samples"), (-1, "adaptive")):
            yield "roi_align_forward", f"{name}, {words}", _roi_aligns(bins, ratio), operands
            yield "roi_align_backward", f"{name}, {words}", _roi_align_backwards(shape, bins, ratio), [grad, boxes]
        yield "roi_pool_forward", name, _roi_pools(bins), operands
        argmax = roi_pool_forward(*operands, bins, bins, 1.0)[1]
        yield "roi_pool_backward", name, _roi_pool_backwards(shape, bins), [grad, boxes, argmax]
    for channels, size in ((4, 4), (4, 8), (16, 4), (16, 8), (64, 4), (64, 8), (256, 4), (256, 8)):
        shapes = [(1, channels, size, size), (1, 18, size, size), (channels, channels, 3, 3), (channels,)]
        maps = [torch.randn(s, generator=draw) for s in shapes]
        name = f"{channels} to {channels}, [1, {channels}, {size}, {size}]"
        yield "deform_conv2d", name, _deform_convs(), [*maps, torch.rand((1, 9, size, size), generator=draw)]


def _roi_aligns(bins: int, ratio: int) -> list[Callable[..., Any]]:
    return [
        lambda x, b: triops.roi_align(x, b, bins, 1.0, ratio, True),
        lambda x, b: BARE.roi_align(x, b, 1.0, bins, bins, ratio, True),
        lambda x, b: torchvision.ops.roi_align(x, b, bins, 1.0, ratio, True),
    ]


def _roi_pools(bins: int) -> list[Callable[..., Any]]:
    return [
        lambda x, b: triops.roi_pool(x, b, bins),
        lambda x, b: BARE.roi_pool(x, b, 1.0, bins, bins)[0],
        lambda x, b: torchvision.ops.roi_pool(x, b, bins),
    ]


def _roi_align_backwards(shape: tuple[int, ...], bins: int, ratio: int) -> list[Callable[..., Any]]:
    batch, _, height, width = shape
    none = torch.empty(0)
    return [
        lambda g, b: roi_align_backward(g, b, none, none, batch, height, width, 1.0, ratio, True, "avg"),
        lambda g, b: BARE._roi_align_backward(g, b, 1.0, bins, bins, *shape, ratio, True),
    ]


def _roi_pool_backwards(shape: tuple[int, ...], bins: int) -> list[Callable[..., Any]]:
    batch, _, height, width = shape
    return [
        lambda g, b, argmax: roi_pool_backward(g, b, argmax, batch, height, width),
        lambda g, b, argmax: BARE._roi_pool_backward(g, b, argmax, 1.0, bins, bins, *shape),
    ]


def _deform_convs() -> list[Callable[..., Any]]:
    return [
        lambda x, offset, weight, bias, mask: triops.deform_conv2d(x, offset, weight, bias, 1, 1, 1, mask),
        lambda x, offset, weight, bias, mask: BARE.deform_conv2d(
            x, weight, offset, mask, bias, 1, 1, 1, 1, 1, 1, 1, 1, True
        ),
        lambda x, offset, weight, bias, mask: torchvision.ops.deform_conv2d(x, offset, weight, bias, 1, 1, 1, mask),
    ]


def _trained(call: Callable[..., Any], operands: list[Tensor], boxes: bool) -> Callable[[], Any]:
    """A call of forward and backward; boxes: the last operand takes no gradient."""
    leaves = [t.clone().requires_grad_() for t in operands]
    if boxes:
        leaves[-1] = operands[-1]
    wanted = [t for t in leaves if t.requires_grad]
    grad = torch.ones_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), wanted, grad)


def _fastest(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
    """Microseconds of each, in turn."""
    counts, times = [], [float("inf")] * len(calls)
    for call in calls:
        for _ in range(20):
            call()
        begin = time.process_time()
        call()
        counts.append(max(1, round(TURN / max(time.process_time() - begin, 1e-6))))
    end = time.process_time() + seconds * len(calls)
    while time.process_time() < end:
        for i, (call, count) in enumerate(zip(calls, counts, strict=True)):
            begin = time.process_time()
            for _ in range(count):
                call()
            times[i] = min(times[i], (time.process_time() - begin) / count * 1e6)
    return times


def rows(seconds: float, library: Path | None) -> Iterator[dict[str, Any]]:
    against = ["torchvision C++ (-O3)"] if library else ["torch.ops.torchvision", f"torchvision.ops {VERSION}"]
    for operator, name, calls, operands in cases():
        calls = calls[: len(against) + 1]
        for call in calls[1:]:
            torch.testing.assert_close(calls[0](*operands), call(*operands), rtol=1e-3, atol=1e-4)
        plain = [lambda call=call, operands=operands: call(*operands) for call in calls]
        timed = [(name, against, _fastest(plain, seconds))]
        if not library and operator in ("roi_align_forward", "roi_pool_forward", "deform_conv2d"):
            both = [_trained(call, operands, operator != "deform_conv2d") for call in (calls[0], calls[2])]
            timed.append((f"{name}, forward and backward", against[1:], _fastest(both, seconds)))
        for case, peers, (ours, *theirs) in timed:
            for whom, other in zip(peers, theirs, strict=False):
                yield {
                    "operator": operator, "case": case, "dtype": "float32", "threads": 1, "triops_us": round(ours, 1),
                    "against": whom, "against_us": round(other, 1), "ratio": round(other / ours, 2), "must_ratio": 1,
                }  # fmt: skip


def main() -> None:
    global torchvision, VERSION
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seconds", type=float, default=1.0, help="processor time for each call")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.library:
        torch.ops.load_library(options.library)
    else:
        import torchvision

        VERSION = torchvision.__version__.partition("+")[0]
    found = []
    for row in rows(options.seconds, options.library):
        print(" | ".join(str(value) for value in row.values()), flush=True)
        found.append(row)
    timer = "processor time of one thread, fastest of calls in turn: benchmarks/torchvision_calls.py"
    head = {"machine": options.machine, "date": options.date, "torch": torch.__version__, "numba": numba.__version__}
    note = {"note": options.note} if options.note else {}
    path = options.out / f"cpu-torchvision{'-library' if options.library else ''}.json"
    path.write_text(json.dumps({**head, "timer": timer, **note, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
