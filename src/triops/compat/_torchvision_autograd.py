"""What torchvision before 0.28 compiled beside its operators: their gradients, and their types under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The operators under autocast: half types are computed in float32. All but the first two on NVIDIA GPUs alone.
AUTOCAST = {
    "nms": ("AutocastCPU", "AutocastCUDA"), "roi_align": ("AutocastCPU", "AutocastCUDA"),
    "roi_pool": ("AutocastCUDA",), "ps_roi_align": ("AutocastCUDA",), "ps_roi_pool": ("AutocastCUDA",),
    "deform_conv2d": ("AutocastCUDA",),
}  # fmt: skip
LATE = {
    "roi_align": 3
}  # of a backward that takes the sizes of the map in front of its last rules: how many rules first


def register(library: Any) -> None:
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"):
        torch.library.register_autograd(f"torchvision::{name}", _of_boxes(name), setup_context=_keep_boxes, lib=library)
    torch.library.register_autograd(
        "torchvision::deform_conv2d", _of_convolution, setup_context=_keep_convolution, lib=library
    )
    for name in AUTOCAST:
        if name != "nms":
            torch.library.register_autograd(f"torchvision::_{name}_backward", _no_second(name), lib=library)
        for key in AUTOCAST[name]:
            library.impl(name, _in_float(name, key), key)


def _keep_boxes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, rois, *ctx.rules = inputs
    ctx.sizes = input.shape
    ctx.save_for_backward(rois, *(output[1:] if isinstance(output, tuple) else ()))


def _of_boxes(name: str) -> Callable[..., Any]:
    backward = getattr(torch.ops.torchvision, f"_{name}_backward")

    def gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        first = LATE.get(name, len(ctx.rules))
        of_input = backward(grad, *ctx.saved_tensors, *ctx.rules[:first], *ctx.sizes, *ctx.rules[first:])
        return of_input, None, *(None,) * len(ctx.rules)

    return gradient


def _keep_convolution(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rules = inputs[5:]


def _of_convolution(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.torchvision._deform_conv2d_backward(grad, *ctx.saved_tensors, *ctx.rules)
    return *grads, *(None,) * len(ctx.rules)


def _no_second(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"double backwards on {name} not supported")

    return backward


def _in_float(name: str, key: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.torchvision, name)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*args: Any) -> Any:
        dtype = args[0].dtype
        with torch._C._ExcludeDispatchKeyGuard(keys):
            output = operator(*map(_as_float, args))
        if name == "nms":
            return output
        return (output[0].to(dtype), *output[1:]) if isinstance(output, tuple) else output.to(dtype)

    return call


def _as_float(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.float() if half else value


__all__ = ["register"]
