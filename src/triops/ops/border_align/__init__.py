"""border_align: the strongest feature along each of the four borders of a box (BorderDet)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops._rois import HALVES, empty_like_format
from triops.ops.border_align import reference


def border_align(input: Tensor, boxes: Tensor, pool_size: int) -> Tensor:
    """Maximum of `pool_size + 1` bilinear samples along the top, left, bottom and right border of each box.

    Channels `[0, C)` of the input serve the top borders, `[C, 2C)` the left, `[2C, 3C)` the bottom and
    `[3C, 4C)` the right ones. Top and left borders are walked from `(x1, y1)` towards `x2` and `y2`, bottom
    and right borders from `(x2, y2)` back; sample i lies at `start + i * (extent / pool_size)`. A sample more
    than one pixel off the map counts as 0 and takes part in the maximum. Differentiable in the input.

    Args:
        input: float tensor [N, 4C, H, W]. Contiguous and channels_last are read as they lie.
        boxes: tensor [N, K, 4] of (x1, y1, x2, y2) in pixels of the map, of the input's dtype, or float32 for
            an input of half precision. A box with a field that is not finite lies off the map.
        pool_size: number of steps along a border, at least 1.

    Returns:
        Tensor [N, C, K, 4] of the input's dtype, which lies in memory as the input does: channels_last in
        gives the memory order [N, K, 4, C]. Empty when N, C or K is 0; all 0 when H or W is 0.

    Raises:
        ValueError, TypeError: on a wrong rank, last dimension, number of channels, batch size, dtype, device or
            pool size.

    >>> import torch, triops
    >>> ramp = torch.arange(12.0).view(1, 1, 3, 4).repeat(1, 4, 1, 1)
    >>> triops.border_align(ramp, torch.tensor([[[0.0, 0.0, 2.0, 1.0]]]), 1)
    tensor([[[[2., 4., 6., 6.]]]])
    """
    return border_align_forward(input, boxes, pool_size)[0]


def border_align_forward(input: Tensor, boxes: Tensor, pool_size: int) -> tuple[Tensor, Tensor]:
    """`border_align` and, for every output, the step of the sample it comes from.

    Returns:
        The output of `border_align`, and int32 [N, C, K, 4] with steps `0..pool_size`; the first of equal
        maxima wins. The steps are bit-identical on every backend.

    >>> import torch, triops
    >>> ramp = torch.arange(12.0).view(1, 1, 3, 4).repeat(1, 4, 1, 1)
    >>> triops.border_align_forward(ramp, torch.tensor([[[0.0, 0.0, 2.0, 1.0]]]), 1)[1]
    tensor([[[[1, 1, 0, 0]]]], dtype=torch.int32)
    """
    return _border_align_forward(input, boxes, pool_size)  # type: ignore[no-any-return]


def border_align_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, input_shape: Sequence[int], pool_size: int
) -> Tensor:
    """Gradient of the input of `border_align`; called by autograd, and public.

    Args:
        grad_output: float tensor [N, C, K, 4].
        boxes: as given to the forward.
        argmax: int32 tensor [N, C, K, 4] from `border_align_forward`.
        input_shape: (N, 4C, H, W) of the forward's input.
        pool_size: as given to the forward.

    Returns:
        Tensor [N, 4C, H, W] of the dtype of `grad_output`, which lies in memory as `argmax` does. Half types are
        summed in float32. The same bits on every run under `torch.use_deterministic_algorithms(True)`.

    Raises:
        ValueError, TypeError: as `border_align`.
        IndexError: when `argmax` holds a step outside `0..pool_size`. On a GPU such a step is skipped, unless
            TRIOPS_CHECK=1 asks for the error there too.

    >>> import torch, triops
    >>> boxes, argmax = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]]), torch.zeros(1, 1, 1, 4, dtype=torch.int32)
    >>> triops.border_align_backward(torch.ones(1, 1, 1, 4), boxes, argmax, (1, 4, 2, 2), 1).flatten(2)
    tensor([[[1., 0., 0., 0.],
             [1., 0., 0., 0.],
             [0., 0., 0., 1.],
             [0., 0., 0., 1.]]])
    """
    if not isinstance(input_shape, Sequence) or not all(
        isinstance(size, (int, torch.SymInt)) and not isinstance(size, bool) for size in input_shape
    ):
        raise TypeError(f"border_align_backward: input_shape must be four integers, got {input_shape!r}")
    if isinstance(grad_output, Tensor) and grad_output.dim() == 4:  # else the operator's own check says so
        batch, channels = grad_output.shape[:2]
        if len(input_shape) != 4 or input_shape[0] != batch or input_shape[1] != 4 * channels:
            raise ValueError(
                f"border_align_backward: input_shape must be [{batch}, {4 * channels}, H, W] for grad_output of shape "
                f"{list(grad_output.shape)}, got {list(input_shape)}"
            )
    height, width = input_shape[-2:] if len(input_shape) == 4 else (0, 0)
    return _border_align_backward(grad_output, boxes, argmax, height, width, pool_size)  # type: ignore[no-any-return]


def _check_forward(input: Tensor, boxes: Tensor, pool_size: int) -> None:
    c = _check.Checker("border_align")
    c.shape("input", input, "N", "4C", "H", "W")
    c.shape("boxes", boxes, "N", "K", 4)
    if input.shape[1] % 4 != 0:
        c.fail(f"input must have a multiple of 4 channels (top, left, bottom, right), got {input.shape[1]}")
    _check_dtypes(c, "input", input, boxes)
    c.same_device(input=input, boxes=boxes)
    _check_pool_size(c, pool_size)


def _check_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, height: int, width: int, pool_size: int
) -> None:
    c = _check.Checker("border_align_backward")
    c.shape("grad_output", grad_output, "N", "C", "K", 4)
    c.shape("boxes", boxes, "N", "K", 4)
    c.shape("argmax", argmax, "N", "C", "K", 4)
    _check_dtypes(c, "grad_output", grad_output, boxes)
    c.dtype("argmax", argmax, (torch.int32,))
    c.same_device(grad_output=grad_output, boxes=boxes, argmax=argmax)
    c.at_least("height", height, 0)
    c.at_least("width", width, 0)
    _check_pool_size(c, pool_size)


def _check_dtypes(c: _check.Checker, name: str, tensor: Tensor, boxes: Tensor) -> None:
    c.dtype(name, tensor, _check.FLOATS)
    if boxes.dtype != tensor.dtype and not (boxes.dtype == torch.float32 and tensor.dtype in HALVES):
        c.same_dtype(**{name: tensor, "boxes": boxes})


def _check_pool_size(c: _check.Checker, pool_size: int) -> None:
    c.at_least("pool_size", pool_size, 1)
    if pool_size > 2**31 - 2:
        c.fail(f"pool_size must be below 2147483647, since argmax is int32, got {pool_size}")


def _fake_forward(input: Tensor, boxes: Tensor, pool_size: int) -> tuple[Tensor, Tensor]:
    return reference.empty_outputs(input, boxes)


def _fake_backward(
    grad_output: Tensor, boxes: Tensor, argmax: Tensor, height: int, width: int, pool_size: int
) -> Tensor:
    shape = (grad_output.shape[0], 4 * grad_output.shape[1], height, width)
    return empty_like_format(shape, grad_output.dtype, argmax)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, boxes, ctx.pool_size = inputs
    ctx.save_for_backward(boxes, output[1])
    ctx.height, ctx.width = input.shape[2:]


def _backward(ctx: Any, grad_output: Tensor, grad_argmax: Tensor | None) -> tuple[Tensor, None, None]:
    boxes, argmax = ctx.saved_tensors
    return _border_align_backward(grad_output, boxes, argmax, ctx.height, ctx.width, ctx.pool_size), None, None


_border_align_backward = _op.define(
    reference.border_align_backward, check=_check_backward, fake=_fake_backward, backward=_op.no_second_derivative
)
_border_align_forward = _op.define(
    reference.border_align_forward,
    check=_check_forward,
    fake=_fake_forward,
    setup_context=_setup_context,
    backward=_backward,
)
