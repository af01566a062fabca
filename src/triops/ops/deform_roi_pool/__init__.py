"""deform_roi_pool: the features under boxes whose bins are moved by learned offsets (deformable RoI pooling)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._rois import HALVES, as_bins, as_boxes, check_bins, check_maps, check_ratio, empty_like_format
from triops.ops.deform_roi_pool import reference


def deform_roi_pool(
    input: Tensor, boxes: Tensor | Sequence[Tensor], offset: Tensor | None, output_size: int | Sequence[int],
    spatial_scale: float = 1.0, sampling_ratio: int = 0, gamma: float = 0.1,
) -> Tensor:  # fmt: skip
    """Mean of bilinear samples in each bin of each box, each bin moved by its offset. Differentiable in input and
    offset.

    Bins and samples are those of `roi_align` with `aligned=True`. Bin (p, q) of box k then moves by
    `gamma * width * offset[k, 0, p, q]` along x and `gamma * height * offset[k, 1, p, q]` along y. A sample more than
    one pixel off the map is 0, and counts.

    Args:
        input: float tensor [N, C, H, W]. Contiguous and channels_last are read as they lie.
        boxes: tensor [K, 5] of (image, x1, y1, x2, y2), or a list with one tensor [L, 4] per image, of the input's
            dtype, or float32 for an input of half precision. A box that is not finite lies off the map.
        offset: tensor [K, 2, *output_size] of (x, y), as shares of the box, of the same dtypes, or None. A bin whose
            offset is not finite lies off the map.
        output_size: rows and columns of bins, one integer or two.
        spatial_scale: pixels of the map per unit of the boxes.
        sampling_ratio: samples of a bin along each axis, at most 1024; 0 or less: as many as the bin is pixels long,
            rounded up (at most 2**20).
        gamma: what offsets are multiplied by.

    Returns:
        Tensor [K, C, *output_size] of the input's dtype, which lies in memory as the input does. Half types are
        computed in float32 and rounded once. Empty when K or C is 0; all 0 when H or W is 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device, size or ratio.
        IndexError: when a box names an image that is not there. On a GPU such a box gives zeros, unless TRIOPS_CHECK=1
            asks for the error there too.

    >>> import torch, triops
    >>> ramp = torch.arange(60.0).view(1, 1, 6, 10)  # value 10 y + x
    >>> offset = torch.tensor([[1.0, 0.0], [0.0, 2.5]]).view(1, 2, 1, 2)  # the first bin along x, the other along y
    >>> triops.deform_roi_pool(ramp, torch.tensor([[0.0, 2.5, 1.5, 6.5, 3.5]]), offset, (1, 2), gamma=0.5)
    tensor([[[[25., 50.]]]])
    """
    height, width = as_bins("deform_roi_pool", output_size)
    boxes = as_boxes("deform_roi_pool", input, boxes)
    return _deform_roi_pool(  # type: ignore[no-any-return]
        input, boxes, offset, height, width, spatial_scale, sampling_ratio, gamma
    )


def deform_roi_pool_backward(
    grad_output: Tensor, input: Tensor, boxes: Tensor, offset: Tensor | None, spatial_scale: float,
    sampling_ratio: int, gamma: float, of_input: bool = True, of_offset: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of input and offset of `deform_roi_pool`; called by autograd, and public.

    grad_output: [K, C, PH, PW]. of_input, of_offset: which are wanted; what is not, and the gradient of an offset that
    is None, is an empty tensor. The rest as given to the forward, errors too. The same bits on every run on a CPU, and
    on a GPU under `torch.use_deterministic_algorithms(True)`.
    """
    return _deform_roi_pool_backward(  # type: ignore[no-any-return]
        grad_output, input, boxes, offset, spatial_scale, sampling_ratio, gamma, of_input, of_offset
    )


def _check_rules(
    c: _check.Checker, input: Tensor, boxes: Tensor, offset: Tensor | None, pooled: Sequence[int],
    spatial_scale: float, sampling_ratio: int, gamma: float,
) -> None:  # fmt: skip
    check_maps(c, "input", input, boxes, "N", "C", "H", "W")
    check_bins(c, *pooled)
    if offset is not None:
        c.shape("offset", offset, "K", 2, "PH", "PW")
        c.dtype("offset", offset, (input.dtype, torch.float32) if input.dtype in HALVES else (input.dtype,))
        c.same_device(input=input, offset=offset)
        if not any(isinstance(size, torch.SymInt) for size in (*pooled, *offset.shape[2:])):
            got = list(offset.shape[2:])
            if got != list(pooled):
                c.fail(f"offset must have {pooled[0]} x {pooled[1]} bins, got {got[0]} x {got[1]}")
    c.finite("spatial_scale", spatial_scale)
    c.finite("gamma", gamma)
    check_ratio(c, "sampling_ratio", sampling_ratio)


def _check_forward(
    input: Tensor, boxes: Tensor, offset: Tensor | None, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, gamma: float,
) -> None:  # fmt: skip
    c = _check.Checker("deform_roi_pool")
    _check_rules(c, input, boxes, offset, (pooled_height, pooled_width), spatial_scale, sampling_ratio, gamma)


def _check_backward(
    grad_output: Tensor, input: Tensor, boxes: Tensor, offset: Tensor | None, spatial_scale: float,
    sampling_ratio: int, gamma: float, of_input: bool, of_offset: bool,
) -> None:  # fmt: skip
    c = _check.Checker("deform_roi_pool_backward")
    c.shape("boxes", boxes, "K", 5)
    c.shape("input", input, "N", "C", "H", "W")
    c.shape("grad_output", grad_output, "K", "C", "PH", "PW")
    c.same_dtype(input=input, grad_output=grad_output)
    c.same_device(input=input, grad_output=grad_output)
    _check_rules(c, input, boxes, offset, grad_output.shape[2:], spatial_scale, sampling_ratio, gamma)


def _fake_forward(
    input: Tensor, boxes: Tensor, offset: Tensor | None, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, gamma: float,
) -> Tensor:  # fmt: skip
    return empty_like_format((boxes.shape[0], input.shape[1], pooled_height, pooled_width), input.dtype, input)


def _fake_backward(
    grad_output: Tensor, input: Tensor, boxes: Tensor, offset: Tensor | None, spatial_scale: float,
    sampling_ratio: int, gamma: float, of_input: bool, of_offset: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return reference.empty_gradients(input, offset, of_input, of_offset)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, boxes, offset, _, _, *ctx.rules = inputs
    ctx.save_for_backward(input, boxes, offset)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    of_input, _, of_offset = ctx.needs_input_grad[:3]
    grads = _deform_roi_pool_backward(grad_output, *ctx.saved_tensors, *ctx.rules, of_input, of_offset)
    return grads[0] if of_input else None, None, grads[1] if of_offset else None, None, None, None, None, None


_deform_roi_pool_backward = _op.define(
    reference.deform_roi_pool_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_deform_roi_pool = _op.define(
    reference.deform_roi_pool, check=_check_forward, fake=_fake_forward, setup_context=_setup_context,
    backward=_backward,
)  # fmt: skip

__all__ = ["deform_roi_pool", "deform_roi_pool_backward"]
