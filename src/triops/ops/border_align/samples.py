"""Inputs of border_align_forward and border_align_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._dtypes import compute_dtype
from triops._sample import BadCall, Sample, Sized, Standard, Work, compiled_mmcv
from triops.ops.border_align import border_align, border_align_backward

Make = Callable[[torch.dtype], tuple[Any, ...]]
Shape = tuple[int, int, int, int, int, int]  # N, C, H, W, K, pool size; C is that of one edge

SEED_INPUT = [
    [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]],
    [[6.0, 7.0, 5.0, 8.0], [2.0, 1.0, 3.0, 4.0], [12.0, 9.0, 11.0, 10.0]],
    [[-2.0, -3.0, 2.0, 0.0], [-4.0, -5.0, 1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]],
    [[0.0, -1.0, 2.0, 1.0], [-4.0, -3.0, -2.0, -1.0], [-1.0, -2.0, -3.0, -4.0]],
]  # [4, 3, 4]
SEED_BOXES = [
    [0.0, 0.0, 2.0, 1.0], [1.0, 0.0, 3.0, 1.0], [1.0, 0.0, 2.0, 1.0], [0.0, 0.0, 3.0, 1.0], [0.0, 0.0, 1.0, 2.0],
    [0.0, 0.0, 2.0, 2.0], [1.0, 0.0, 2.0, 1.0], [1.0, 0.0, 3.0, 1.0], [0.0, 1.0, 1.0, 2.0], [0.0, 0.0, 3.0, 2.0],
    [1.0, 0.0, 3.0, 2.0], [2.0, 0.0, 3.0, 2.0],
]  # fmt: skip


def _maps(shape: Shape, layout: str = "NCHW", placed: str = "inside", seed: int = 0) -> Make:
    """Normal features under boxes "inside" the map, as a detector's mostly are, or "around" it: also inverted
    and far outside."""
    batch, channels, height, width, boxes, pool_size = shape

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        if layout == "NHWC":
            features = torch.randn(batch, height, width, 4 * channels, generator=g).permute(0, 3, 1, 2)
        else:
            features = torch.randn(batch, 4 * channels, height, width, generator=g)
        size = torch.tensor([width, height]).float()
        corners = torch.rand(batch, boxes, 2, 2, generator=g)
        inside, around = corners.sort(2).values * (size - 1), (corners * 4 - 1.5) * (size + 1)
        corners = inside if placed == "inside" else around
        return features.to(dtype), corners.flatten(2).to(dtype), pool_size

    return make


def _gradients(shape: Shape, layout: str = "NCHW", placed: str = "inside", seed: int = 0) -> Make:
    """Of a forward call as in `_maps`, with steps drawn evenly, as normal features give them."""
    batch, channels, height, width, boxes, pool_size = shape
    place = _maps((batch, 0, height, width, boxes, pool_size), "NCHW", placed, seed)

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        order = (batch, boxes, 4, channels) if layout == "NHWC" else (batch, channels, boxes, 4)
        grad_output = torch.randn(order, generator=g).to(dtype)
        argmax = torch.randint(0, pool_size + 1, order, generator=g, dtype=torch.int32)
        if layout == "NHWC":
            grad_output, argmax = grad_output.permute(0, 3, 1, 2), argmax.permute(0, 3, 1, 2)
        return grad_output, place(dtype)[1], argmax, height, width, pool_size

    return make


def _seed_example(layout: str) -> Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        features = torch.tensor([SEED_INPUT])
        if layout == "NHWC":
            features = features.contiguous(memory_format=torch.channels_last)
        return features.to(dtype), torch.tensor([SEED_BOXES]).to(dtype), 1

    return make


EDGE_BOXES = [
    [1.0, 1.0, 1.0, 1.0],  # no size
    [3.0, 3.0, 1.0, 1.0],  # inverted
    [1.0, 3.0, 3.0, 1.0],
    [-1.0, -1.0, 5.0, 4.0],  # exactly at the limits of the map
    [-1.25, -1.25, 5.25, 4.25],  # a little beyond
    [-20.0, 1.0, -10.0, 2.0],  # wholly outside
    [-40.0, -40.0, 40.0, 40.0],
    [4.0, 3.0, 5.0, 4.0],  # on the last pixel and beyond it
    [3.999, 2.999, 4.001, 3.001],
    [-0.5, -0.5, 0.5, 0.5],
]


def _edge_boxes(layout: str, pool_size: int, sign: float = 1.0) -> Make:
    """Degenerate boxes on a 4 x 5 map of features of one sign: below zero, a sample off the map wins with its 0."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(3)
        big = 3e4 if dtype == torch.float16 else 3e38
        boxes = torch.tensor([*EDGE_BOXES, [-big, 0.0, big, 2.0], [0.0, -big, 2.0, big], [big, big, big, big]])
        features = (torch.rand(2, 12, 4, 5, generator=g) + 0.5) * sign
        if layout == "NHWC":
            features = features.contiguous(memory_format=torch.channels_last)
        return features.to(dtype), boxes.expand(2, -1, -1).to(dtype), pool_size

    return make


def _not_finite_boxes(layout: str) -> Make:
    """Every field of a box is NaN or infinite once, beside one good box."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        features, _, _ = _maps((1, 5, 6, 7, 1, 3), layout, seed=8)(dtype)
        boxes = torch.tensor([1.0, 1.5, 4.0, 5.0]).repeat(1, 13, 1)
        for i, value in enumerate((float("inf"), float("-inf"), float("nan"))):
            for field in range(4):
                boxes[0, 4 * i + field, field] = value
        return features, boxes.to(dtype), 3

    return make


def _not_finite_features(dtype: torch.dtype) -> tuple[Any, ...]:
    features, boxes, pool_size = _maps((1, 3, 6, 7, 9, 4), seed=9)(dtype)
    for i, value in enumerate((float("inf"), float("-inf"), float("nan"))):
        features.view(-1)[i::37] = value
    return features, boxes, pool_size


def _backward_of(forward: Make) -> Make:
    """The backward call of a forward sample, with the steps that the forward finds."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        from triops.ops.border_align.reference import border_align_forward

        features, boxes, pool_size = forward(dtype)
        output, argmax = border_align_forward(features, boxes, pool_size)
        values = torch.linspace(-1, 1, output.numel()).view(output.shape)
        grad_output = torch.empty_like(output).copy_(values)
        return grad_output, boxes, argmax, features.shape[2], features.shape[3], pool_size

    return make


_LAYOUTS = ("NCHW", "NHWC")
_LARGE: Shape = (2, 256, 100, 152, 15200, 10)  # the largest map of a feature pyramid
_SMALL: Shape = (2, 5, 6, 7, 9, 3)
_NETWORK: list[Shape] = [
    (2, 256, 7, 10, 70, 10),
    (2, 256, 25, 38, 950, 10),
    (2, 128, 10, 7, 70, 10),
    (1, 16, 6, 7, 20, 1000),
    _LARGE,
]
_GENERAL: list[Shape] = [(3, 1, 10, 10, 5, 8), (3, 102, 8, 10, 80, 2), (3, 2, 8, 100, 800, 1)]
_BOUNDARY: list[Shape] = [
    (0, 2, 5, 5, 3, 2), (2, 0, 5, 5, 3, 2), (2, 2, 5, 5, 0, 2), (1, 2, 0, 5, 3, 2), (1, 2, 5, 0, 3, 2),
    (1, 1, 1, 1, 1, 1), (1, 3, 1, 9, 4, 2), (1, 3, 9, 1, 4, 2), (1, 31, 3, 4, 3, 2), (1, 32, 3, 4, 16, 2),
    (1, 33, 3, 4, 17, 2), (1, 65, 4, 3, 65, 1), (1, 2, 5, 300, 9, 3),
]  # fmt: skip


def _describe(shape: Shape, layout: str) -> str:
    batch, channels, height, width, boxes, pool_size = shape
    return f"[{batch}, {4 * channels}, {height}, {width}] {layout}, {boxes} boxes, pool {pool_size}"


SAMPLES: list[Sample] = []
for _operator, _make in (("border_align_forward", _maps), ("border_align_backward", _gradients)):
    for _shape in _NETWORK:
        for _layout in _LAYOUTS:
            SAMPLES.append(
                Sample(_operator, _describe(_shape, _layout), _make(_shape, layout=_layout), "network",
                       demo=_shape == _NETWORK[1] and _layout == "NHWC", gpu_only=_shape == _LARGE)
            )  # fmt: skip
    for _layout in _LAYOUTS:
        SAMPLES.append(Sample(_operator, _describe(_SMALL, _layout), _make(_SMALL, layout=_layout)))
        SAMPLES.append(
            Sample(_operator, f"{_describe(_SMALL, _layout)}, around the map",
                   _make(_SMALL, layout=_layout, placed="around", seed=1))
        )  # fmt: skip
    for _i, _shape in enumerate(_GENERAL):
        _layout = _LAYOUTS[_i % 2]
        SAMPLES.append(Sample(_operator, _describe(_shape, _layout), _make(_shape, layout=_layout)))
    for _i, _shape in enumerate(_BOUNDARY):
        _layout = _LAYOUTS[_i % 2]
        SAMPLES.append(
            Sample(_operator, _describe(_shape, _layout),
                   _make(_shape, layout=_layout, placed="around", seed=_i), "boundary", (torch.float32, torch.float16))
        )  # fmt: skip
for _layout in _LAYOUTS:
    _special: dict[str, Make] = {
        f"the worked example, {_layout}": _seed_example(_layout),
        f"degenerate boxes, positive features, {_layout}": _edge_boxes(_layout, 3),
        f"degenerate boxes, negative features, {_layout}": _edge_boxes(_layout, 3, -1.0),
        f"boxes not finite, {_layout}": _not_finite_boxes(_layout),
    }
    for _name, _forward in _special.items():
        SAMPLES.append(Sample("border_align_forward", _name, _forward, "boundary"))
        SAMPLES.append(Sample("border_align_backward", _name, _backward_of(_forward), "boundary"))
SAMPLES.append(Sample("border_align_forward", "features not finite", _not_finite_features, "boundary"))


SIZED = [
    Sized(f"border_align_{name}", layout, lambda draw, layout=layout, make=make: make(  # type: ignore[misc]
        (draw(3), 16, 1 + draw(40), 1 + draw(40), draw(1500), 10), layout))
    for name, make in (("forward", _maps), ("backward", _gradients)) for layout in ("NCHW", "NHWC")
]  # fmt: skip


def _bad_calls() -> list[BadCall]:
    features, boxes = torch.zeros(2, 8, 5, 6), torch.zeros(2, 3, 4)
    grad_output, argmax = torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4, dtype=torch.int32)
    shape = (2, 8, 5, 6)

    def forward(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(f"border_align: {what}", lambda: border_align(*args), error, match)

    def backward(what: str, error: type[Exception], match: str, *args: Any) -> BadCall:
        return BadCall(f"border_align_backward: {what}", lambda: border_align_backward(*args), error, match)

    return [
        forward("input of rank 5", ValueError, r"input must have shape \[N, 4C, H, W\], got \[3, 1, 2, 1, 256\]",
                torch.zeros(3, 1, 2, 1, 256), torch.zeros(3, 5, 4), 5),
        forward("boxes of rank 2", ValueError, r"boxes must have shape \[N, K, 4\] .*got \[3, 4\]",
                torch.zeros(3, 10, 9, 2), torch.zeros(3, 4), 10),
        forward("boxes with 3 columns", ValueError, r"boxes must have shape .*got \[13, 5, 3\]",
                torch.zeros(3, 1, 1, 0), torch.zeros(13, 5, 3), 6),
        forward("410 channels", ValueError, "input must have a multiple of 4 channels .*got 410",
                torch.zeros(3, 410, 8, 10), torch.zeros(3, 80, 4), 2),
        forward("unequal batches", ValueError, r"N = 10 as in input, got \[3, 800, 4\]",
                torch.zeros(10, 8, 8, 100), torch.zeros(3, 800, 4), 1),
        forward("integer input", TypeError, "input must be float32.*got int64", features.long(), boxes.long(), 1),
        forward("unequal dtypes", TypeError, "input float32, boxes float64", features, boxes.double(), 1),
        forward("half boxes for a float32 input", TypeError, "boxes float16", features, boxes.half(), 1),
        forward("unequal devices", ValueError, "boxes on meta", features, boxes.to("meta"), 1),
        forward("a list", TypeError, "input must be a Tensor, got list", features.tolist(), boxes, 1),
        forward("None", TypeError, "boxes must be a Tensor, got NoneType", features, None, 1),
        forward("pool size 0", ValueError, "pool_size must be at least 1, got 0", features, boxes, 0),
        forward("negative pool size", ValueError, "pool_size must be at least 1, got -3", features, boxes, -3),
        forward("pool size beyond int32", ValueError, "pool_size must be below 2147483647", features, boxes, 2**31 - 1),
        forward("pool size 2.5", TypeError, "pool_size must be an integer, got float", features, boxes, 2.5),
        forward("pool size of another type", TypeError, "pool_size must be an integer, got str", features, boxes, "1"),
        backward("grad_output of rank 3", ValueError, r"grad_output must have shape \[N, C, K, 4\]",
                 grad_output[0], boxes, argmax, shape, 1),
        backward("boxes of another number", ValueError, "K = 3 as in grad_output",
                 grad_output, boxes[:, :2], argmax, shape, 1),
        backward("argmax of another shape", ValueError, "argmax must have shape",
                 grad_output, boxes, argmax[:, :1], shape, 1),
        backward("argmax int64", TypeError, "argmax must be int32, got int64",
                 grad_output, boxes, argmax.long(), shape, 1),
        backward("integer grad_output", TypeError, "grad_output must be float32",
                 grad_output.int(), boxes, argmax, shape, 1),
        backward("unequal dtypes", TypeError, "grad_output float64, boxes float32",
                 grad_output.double(), boxes, argmax, shape, 1),
        backward("unequal devices", ValueError, "argmax on meta",
                 grad_output, boxes, argmax.to("meta"), shape, 1),
        backward("input_shape of another batch", ValueError, r"input_shape must be \[2, 8, H, W\]",
                 grad_output, boxes, argmax, (1, 8, 5, 6), 1),
        backward("input_shape of three numbers", ValueError, r"input_shape must be .*got \[8, 5, 6\]",
                 grad_output, boxes, argmax, (8, 5, 6), 1),
        backward("input_shape of other types", TypeError, "input_shape must be four integers",
                 grad_output, boxes, argmax, (2, 8, 5.0, 6), 1),
        backward("input_shape a number", TypeError, "input_shape must be four integers, got 5",
                 grad_output, boxes, argmax, 5, 1),
        backward("negative height", ValueError, "height must be at least 0, got -5",
                 grad_output, boxes, argmax, (2, 8, -5, 6), 1),
        backward("pool size 0", ValueError, "pool_size must be at least 1",
                 grad_output, boxes, argmax, shape, 0),
        backward("argmax above the pool size", IndexError, "argmax must hold steps from 0 to pool_size = 1",
                 grad_output, boxes, argmax + 2, shape, 1),
        backward("argmax below zero", IndexError, "argmax must hold steps from 0 to pool_size = 1",
                 grad_output, boxes, argmax - 1, shape, 1),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()


# The design document asks for half of one ceiling.
_GATHERS = "four pixels per sample are gathered wherever a box lies, again for every box that covers them"
_ATOMICS = "each output is added to four pixels wherever its box lies, and many boxes share them"
STANDARD = {
    "border_align_forward": Standard(network=0.5, general=0.5, why_slower=_GATHERS),
    "border_align_backward": Standard(network=0.5, general=0.5, error_scale="row", why_slower=_ATOMICS),
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    features, boxes, pool_size = args[0], args[1], args[-1]
    outputs = 4 * boxes.shape[0] * boxes.shape[1]
    if operator == "border_align_forward":
        outputs *= features.shape[1] // 4
        moved = features.numel() * features.element_size() + boxes.numel() * boxes.element_size()
        # A sample is four products, three sums and a comparison.
        return Work(moved + outputs * (features.element_size() + 4), 8 * outputs * (pool_size + 1))
    height, width = args[3], args[4]
    outputs *= features.shape[1]
    size = features.element_size()
    gradient = 4 * features.shape[0] * features.shape[1] * height * width
    return Work(outputs * (size + 4) + boxes.numel() * boxes.element_size() + gradient * size, 20 * outputs)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator == "border_align_backward":
        return {"torch": _vectorised_backward}
    found: dict[str, Callable[..., Any]] = {"torch": _vectorised, "grid_sample": grid_sampled}
    _ext = compiled_mmcv()
    if _ext is not None:

        def mmcv(input: Tensor, boxes: Tensor, pool_size: int) -> tuple[Tensor, Tensor]:
            shape = (input.shape[0], input.shape[1] // 4, boxes.shape[1], 4)
            output, argmax = input.new_zeros(shape), input.new_zeros(shape, dtype=torch.int32)
            _ext.border_align_forward(input, boxes, output, argmax, pool_size=pool_size)
            return output, argmax

        found["mmcv"] = mmcv
    return found


def _corners(
    boxes: Tensor, edge: int, step: Tensor, pool_size: int, height: int, width: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Corner pixels and weights as one would write them in plain torch; step broadcasts against [N, K, 1]."""
    x1, y1, x2, y2 = boxes.to(compute_dtype(boxes.dtype))[..., None, :].unbind(-1)
    x, y = ((x1, y1), (x1, y1), (x2, y2), (x2, y2))[edge]
    along = ((x2 - x1), (y2 - y1), (x1 - x2), (y1 - y2))[edge] / pool_size
    x, y = (x + along * step, y + 0 * step) if edge % 2 == 0 else (x + 0 * step, y + along * step)
    on_map = (x >= -1) & (x <= width) & (y >= -1) & (y <= height)
    x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    x_low, y_low = x.long(), y.long()
    x_high, y_high = (x_low + 1).clamp(max=width - 1), (y_low + 1).clamp(max=height - 1)
    u, v = x - x_low, y - y_low
    return on_map, [
        (y_low * width + x_low, (1 - v) * (1 - u)),
        (y_low * width + x_high, (1 - v) * u),
        (y_high * width + x_low, v * (1 - u)),
        (y_high * width + x_high, v * u),
    ]


def grid_sampled(input: Tensor, boxes: Tensor, pool_size: int) -> Tensor:
    """The output alone, by `torch.nn.functional.grid_sample`: steps before boxes is the faster order for NCHW."""
    channels, (height, width), real = input.shape[1] // 4, input.shape[2:], compute_dtype(input.dtype)
    steps_first = input.stride(1) != 1
    step = torch.arange(pool_size + 1, device=input.device)
    box = boxes.to(real)[:, None] if steps_first else boxes.to(real)[:, :, None]
    x1, y1, x2, y2 = box.unbind(-1)
    step = step[:, None] if steps_first else step
    outputs = []
    for edge in range(4):
        x, y = ((x1, y1), (x1, y1), (x2, y2), (x2, y2))[edge]
        along = ((x2 - x1), (y2 - y1), (x1 - x2), (y1 - y2))[edge] / pool_size * step
        x, y = (x + along, y.expand_as(along)) if edge % 2 == 0 else (x.expand_as(along), y + along)
        on_map = (x >= -1) & (x <= width) & (y >= -1) & (y <= height)
        grid = torch.stack([x * (2 / max(width - 1, 1)) - 1, y * (2 / max(height - 1, 1)) - 1], -1)
        group = input[:, edge * channels : (edge + 1) * channels].to(real)
        value = torch.nn.functional.grid_sample(group, grid, padding_mode="border", align_corners=True)
        outputs.append(torch.where(on_map[:, None], value, 0).amax(2 if steps_first else 3))
    return torch.stack(outputs, -1).to(input.dtype)


def _vectorised(input: Tensor, boxes: Tensor, pool_size: int) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = input.shape[0], input.shape[1] // 4, input.shape[2], input.shape[3]
    step = torch.arange(pool_size + 1, device=input.device)
    channels_last = input.stride(1) == 1
    outputs, steps = [], []
    for edge in range(4):
        group = input[:, edge * channels : (edge + 1) * channels]
        on_map, corners = _corners(boxes, edge, step, pool_size, height, width)  # [N, K, P]
        if channels_last:
            rows = group.permute(0, 2, 3, 1).reshape(batch, height * width, channels)
            image = torch.arange(batch, device=input.device)[:, None, None]
            value = sum((weight[..., None] * rows[image, pixel] for pixel, weight in corners), torch.zeros(()))
            best, at = torch.where(on_map[..., None], value, 0).max(2)  # [N, K, C]
            best, at = best.permute(0, 2, 1), at.permute(0, 2, 1)
        else:
            planes = group.reshape(batch, channels, height * width)
            shape = (batch, channels, boxes.shape[1], pool_size + 1)
            value = sum(
                (weight[:, None] * planes.gather(2, pixel.flatten(1)[:, None].expand(-1, channels, -1)).view(shape)
                 for pixel, weight in corners), torch.zeros(()),
            )  # fmt: skip
            best, at = torch.where(on_map[:, None], value, 0).max(3)  # [N, C, K]
        outputs.append(best)
        steps.append(at)
    return torch.stack(outputs, -1).to(input.dtype), torch.stack(steps, -1).int()


def _vectorised_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, height: int, width: int, pool_size: int
) -> Tensor:
    batch, channels = grad_output.shape[:2]
    grad = torch.zeros(batch, 4 * channels, height * width, dtype=compute_dtype(grad_output.dtype), device=boxes.device)
    for edge in range(4):
        step = argmax[..., edge].transpose(1, 2)  # [N, K, C]
        on_map, corners = _corners(boxes, edge, step, pool_size, height, width)
        given = torch.where(on_map, grad_output[..., edge].transpose(1, 2), 0)
        for pixel, weight in corners:
            group = grad[:, edge * channels : (edge + 1) * channels]
            group.scatter_add_(2, pixel.transpose(1, 2), (weight * given).transpose(1, 2))
    return grad.view(batch, 4 * channels, height, width).to(grad_output.dtype)
