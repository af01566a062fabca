"""The public functions, each called with plain values that the samples of an operator hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

import triops
from triops._check import FLOATS
from triops._op import OPERATORS
from triops.acceptance.soak.mutate import generator

Values = tuple[Any, ...]

UPDATES = {"batch_norm_act": ("running_mean", "running_var")}  # arguments that a function changes by design
POOLING = {  # functions that take an `output_size`: their operator, and the places of their arguments in its own
    "deform_roi_pool": ("deform_roi_pool", range(7)),
    "prroi_pool": ("prroi_pool", range(4)),
    "riroi_align_rotated": ("roi_align_rotated", (0, 1, 2, 3, 4, 7, 6)),
    "roi_align": ("roi_align_forward", range(7)),
    "roi_align_rotated": ("roi_align_rotated", range(7)),
    "roi_pool": ("roi_pool_forward", range(4)),
}
NO_CALLS = ("reference_backend",)  # public functions that compute nothing


@dataclass(frozen=True)
class Public:
    """A public function as a function of plain values."""

    name: str
    source: str  # the operator whose samples it takes
    judged_as: str  # the operator by whose standard its results are judged
    parameters: list[str]
    convert: Callable[[Random, Values], Values]  # a sample's arguments -> the function's
    call: Callable[..., Any]


def functions() -> dict[str, Public]:
    """Those of `triops.__all__`. A function whose parameters an operator has under the same names needs no line here;
    one that has neither is left out, and `tests/test_soak.py` asks for the line."""
    found = {}
    for name in triops.__all__:
        function = getattr(triops, name)
        if not inspect.isfunction(function) or name in NO_CALLS:
            continue
        made = _special(name, function) or _by_names(name, function)
        if made is not None:
            found[name] = made
    return found


def _by_names(name: str, function: Callable[..., Any]) -> Public | None:
    wanted = inspect.signature(function).parameters
    required = {p for p in wanted if wanted[p].default is inspect.Parameter.empty}
    likely = [s for s in (name, f"{name}_forward", f"{name}_padded") if s in OPERATORS]
    source = next((s for s in (*likely, *OPERATORS) if required <= set(OPERATORS[s].parameters)), None)
    if source is None:
        return None
    has = OPERATORS[source].parameters
    used = [p for p in wanted if p in has]
    return Public(
        name, source, source, used,
        lambda rng, args: tuple(args[has.index(p)] for p in used),
        lambda *args: _with_updates(function, dict(zip(used, args, strict=True)), UPDATES.get(name, ())),
    )  # fmt: skip


def _with_updates(function: Callable[..., Any], arguments: dict[str, Any], updates: Sequence[str]) -> Any:
    """What the function returns; with it, where it changes arguments, copies of those that it changed instead."""
    if not updates:
        return function(**arguments)
    copies = {n: arguments[n].clone() for n in updates if isinstance(arguments[n], Tensor)}
    return function(**{**arguments, **copies}), *copies.values()


def _special(name: str, function: Callable[..., Any]) -> Public | None:
    if name == "bev_pool":
        parameters = ["features", "cells", "num_cells", "depth"]
        return Public(name, "bev_pool_forward", "bev_pool_forward", parameters, _bev_pool, function)
    if name == "border_align_backward":
        parameters = ["grad_output", "boxes", "argmax", "input_shape", "pool_size"]
        return Public(name, name, name, parameters, _border_align_backward, function)
    if name in ("boxes_iou3d", "boxes_iou_bev", "boxes_overlap_bev"):
        return Public(name, "points_in_boxes", "box_iou_rotated", ["boxes_a", "boxes_b"], _two_sets_of_boxes, function)
    if name == "box_iou_quadri":
        parameters = ["bboxes1", "bboxes2", "mode", "aligned"]
        return Public(
            name, "convex_iou", "convex_iou", parameters,
            lambda rng, a: (*(p.repeat(1, 8)[:, :8] for p in a[:2]), *a[2:]), function,
        )  # fmt: skip
    if name in ("diff_iou_rotated_2d", "diff_iou_rotated_3d"):
        source, fields = "diff_iou_rotated", 5 if name.endswith("2d") else 7
        return Public(
            name, source, source, list(inspect.signature(function).parameters),
            lambda rng, a: tuple(torch.cat([b, b[..., :2]], -1)[..., :fields] for b in a[:2]), function,
        )  # fmt: skip
    if name in BY_INDEX:
        return Public(name, *BY_INDEX[name], list(inspect.signature(function).parameters), _by_index(name), function)
    if name == "vector_pool":
        parameters = ["points", "features", "centers", "radius", "grid", "channels", "shape", "k", "offsets",
                      "center_offsets"]  # fmt: skip
        return Public(
            name, "vector_pool_pairs", "gather_points_backward", parameters, _vector_pool,
            lambda *a: function(*a[:6], shape=a[6], k=a[7], offsets=a[8], center_offsets=a[9]),
        )  # fmt: skip
    if name == "batched_nms":
        return Public(name, "nms", "nms", list(inspect.signature(function).parameters), _categories, function)
    if name in ("nms3d", "nms3d_normal"):
        parameters = ["boxes", "scores", "iou_threshold"]
        return Public(name, "points_in_boxes", "nms_rotated", parameters, _scored_boxes, function)
    if name in POOLING:
        source, places = POOLING[name]
        at = OPERATORS[source].parameters.index("pooled_height")
        return Public(
            name, source, source, list(inspect.signature(function).parameters),
            lambda rng, a: tuple((*a[:at], list(a[at : at + 2]), *a[at + 2 :])[place] for place in places), function,
        )  # fmt: skip
    if name in ("roiaware_pool3d", "roiaware_pool3d_forward"):
        parameters = ["rois", "points", "features", "out_size", "max_points_per_voxel", "mode", "z_origin", "margin"]
        forward = "roiaware_pool3d_forward"
        return Public(
            name, forward, forward, parameters, lambda rng, a: (*a[:3], list(a[3:6]), *a[6:]),
            lambda *a: function(*a[:6], z_origin=a[6], margin=a[7]),
        )  # fmt: skip
    if name in ("sparse_conv", "sparse_max_pool", "sparse_avg_pool"):
        weighted = name == "sparse_conv"
        parameters = ["features", *(["weight", "bias"] if weighted else []), *OPERATORS["get_indice_pairs"].parameters]
        return Public(
            name, "get_indice_pairs", name, parameters, lambda rng, a: _with_features(rng, a, weighted),
            lambda *a: _over_a_rulebook(function, a, weighted),
        )  # fmt: skip
    return None


# Functions of features in planes, where a sample of their operator may hold rows: that operator, and whose standard.
BY_INDEX = {
    "gather_points": ("gather_points", "gather_points"),
    "group_points": ("gather_points", "gather_points"),
    "three_interpolate": ("three_interpolate", "three_interpolate"),
}


def _by_index(name: str) -> Callable[[Random, Values], Values]:
    def convert(rng: Random, args: Values) -> Values:
        features, indices, *weights, rows = args
        return features.mT if rows else features, indices[..., None] if name == "group_points" else indices, *weights

    return convert


def _vector_pool(rng: Random, args: Values) -> Values:
    points, centers, offsets, center_offsets, radius, grid, k, ball = args
    channels = rng.choice((1, 3))
    features = torch.randn(points.shape[0], 3 * channels, generator=generator(rng)).to(points.dtype)
    shape = "ball" if ball else "cube"
    return points, features, centers, radius, grid, channels, shape, k, offsets, center_offsets


def _bev_pool(rng: Random, args: Values) -> Values:
    features, depth, cells, _, starts = args
    if depth is None:
        return features, cells, starts.shape[0] - 1, None
    images, depths, pixels = depth.shape
    return (
        features.reshape(images, 1, pixels, features.shape[1]), cells.reshape(images, depths, 1, pixels),
        starts.shape[0] - 1, depth.reshape(images, depths, 1, pixels),
    )  # fmt: skip


def _border_align_backward(rng: Random, args: Values) -> Values:
    grad, boxes, argmax, height, width, pool_size = args
    return grad, boxes, argmax, [grad.shape[0], 4 * grad.shape[1], height, width], pool_size


def _two_sets_of_boxes(rng: Random, args: Values) -> Values:
    boxes: Tensor = args[1].flatten(0, 1)[:300]
    half = rng.randrange(len(boxes) + 1)
    return boxes[:half], boxes[half:]


def _scored_boxes(rng: Random, args: Values) -> Values:
    boxes: Tensor = args[1].flatten(0, 1)[:120]
    return boxes, torch.rand(len(boxes), generator=generator(rng)).to(boxes.dtype), rng.choice((0.0, 0.1, 0.5))


def _categories(rng: Random, args: Values) -> Values:
    boxes, scores, _, iou_threshold, _ = args
    return boxes, scores, torch.randint(-2, 3, (len(boxes),), generator=generator(rng)), iou_threshold


def _with_features(rng: Random, args: Values, weighted: bool) -> Values:
    g, dtype = generator(rng), rng.choice(FLOATS)
    features = torch.randn(args[0].shape[0], rng.choice((1, 3, 16)), generator=g).to(dtype)
    if not weighted:
        return features, *args
    outputs = rng.choice((1, 5, 16))
    weight = torch.randn(outputs, *args[3], features.shape[1], generator=g).to(dtype)
    return features, weight, rng.choice((None, torch.randn(outputs, generator=g).to(dtype))), *args


def _over_a_rulebook(function: Callable[..., Any], args: Values, weighted: bool) -> Any:
    (features, *weights), geometry = (args[:3], args[3:]) if weighted else (args[:1], args[1:])
    indices, batch_size, shape, kernel, stride, padding, dilation, out_padding, submanifold, transpose = geometry
    if submanifold:
        rulebook = triops.Rulebook.submanifold(indices, batch_size, shape, kernel, dilation)
    else:
        rulebook = triops.Rulebook.sparse(
            indices, batch_size, shape, kernel, stride, padding, dilation, out_padding, transpose
        )
    if weighted:
        return function(features, weights[0], rulebook, weights[1])
    return function(features, rulebook)
