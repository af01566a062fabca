"""Text detection in `mmcv._ext`: Bezier align in plain torch, and two searches on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from triops import _check
from triops._plain import gradients, regions
from triops._plain.bezier_align import bezier_align


def bezier_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, aligned_height: int, aligned_width: int, spatial_scale: float,
    sampling_ratio: int, aligned: bool,
) -> None:  # fmt: skip
    output.copy_(bezier_align(input, rois, aligned_height, aligned_width, spatial_scale, sampling_ratio, bool(aligned)))


def bezier_align_backward(
    grad_output: Tensor, rois: Tensor, grad_input: Tensor, aligned_height: int, aligned_width: int,
    spatial_scale: float, sampling_ratio: int, aligned: bool,
) -> None:  # fmt: skip
    def rule(input: Tensor) -> Tensor:
        return bezier_align(input, rois, aligned_height, aligned_width, spatial_scale, sampling_ratio, bool(aligned))

    (grad,) = gradients(rule, (grad_input,), grad_output)  # linear: of the input only the shape counts
    grad_input += grad


def pixel_group(
    score: Tensor, mask: Tensor, embedding: Tensor, kernel_label: Tensor, kernel_contour: Tensor,
    kernel_region_label: int, distance_threshold: float,
) -> list[list[float]]:  # fmt: skip
    """`kernel_region_label` is the number of regions, background included."""
    c = _check.Checker("pixel_group")
    for name, maps in {"mask": mask, "kernel_label": kernel_label, "kernel_contour": kernel_contour}.items():
        c.shape(name, maps, *score.shape)
    c.shape("embedding", embedding, *score.shape, "C")
    if kernel_label.numel() and int(kernel_label.max()) >= kernel_region_label:
        c.fail(f"kernel_label must be at most {kernel_region_label - 1}, got {int(kernel_label.max())}")
    return regions.group_pixels(
        score, mask, embedding, kernel_label.clamp(min=0), kernel_contour, kernel_region_label, distance_threshold
    )


def contour_expand(
    kernel_mask: Tensor, internal_kernel_label: Tensor, min_kernel_area: int, kernel_num: int
) -> list[list[int]]:
    """The labels grow over the first mask, which is the largest; as in mmcv the masks between are not looked at."""
    c = _check.Checker("contour_expand")
    c.shape("kernel_mask", kernel_mask, "K", *internal_kernel_label.shape)
    if internal_kernel_label.numel():
        low, high = (int(end) for end in internal_kernel_label.aminmax())
        if low < 0 or high > kernel_num:
            c.fail(f"internal_kernel_label must be from 0 to {kernel_num}, got {low} to {high}")
    mask = kernel_mask[0] if len(kernel_mask) > 1 else internal_kernel_label > 0  # one mask alone is that of the labels
    return regions.expand_regions(internal_kernel_label, mask, min_kernel_area).tolist()  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (bezier_align_forward, bezier_align_backward, pixel_group, contour_expand)
}
