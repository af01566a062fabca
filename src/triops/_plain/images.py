"""Resampling and activations of StyleGAN's images: FIR filters between up- and downsampling, bias and activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from triops._plain import wide


def upfirdn2d(
    input: Tensor, filter: Tensor, up: tuple[int, int], down: tuple[int, int], padding: tuple[int, int, int, int],
    flip: bool, gain: float,
) -> Tensor:  # fmt: skip
    """Upsample, pad, filter and downsample images [N, C, H, W] by one filter [FH, FW] -> [N, C, OH, OW].

    up, down: factors along x and y; zeros are inserted, pixels left out. padding: left, right, top, bottom; below 0 it
    crops. flip: the filter is applied as it is (a correlation), otherwise turned around (a convolution).
    """
    n, c, h, w = input.shape
    (up_x, up_y), (down_x, down_y) = up, down
    taps = filter.to(wide(input).dtype) * gain
    taps = taps if flip else taps.flip(0, 1)
    spread = functional.pad(wide(input).reshape(n * c, h, 1, w, 1), [0, up_x - 1, 0, 0, 0, up_y - 1])
    # Images as the channels of one: torch filters channels one by one in full float32, whatever TF32 is set to.
    image = functional.pad(spread.reshape(1, n * c, h * up_y, w * up_x), padding)
    weight = taps.expand(n * c, 1, *taps.shape)
    filtered = functional.conv2d(image, weight, stride=(down_y, down_x), groups=n * c)
    return filtered.view(n, c, *filtered.shape[2:]).to(input.dtype)


def as_matrix(filter: Tensor) -> Tensor:
    """A filter [F], which stands for the product of itself along both axes, or [FH, FW] -> [FH, FW]."""
    return filter if filter.dim() == 2 else filter[:, None] * filter


class Activation(NamedTuple):
    """An activation and its derivatives. Those take its input x and its output y, of which each uses one."""

    value: Callable[[Tensor, float], Tensor]
    slope: Callable[[Tensor, Tensor, float], Tensor]
    curvature: Callable[[Tensor, Tensor], Tensor]


SELU = 1.0507009873554805  # the scale of SELU, and where it ends below: -scale * alpha
SELU_END = SELU * 1.6732632423543772


def _swish_slope(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    gate = x.sigmoid()
    return gate * (1 + x * (1 - gate))


def _swish_curvature(x: Tensor, y: Tensor) -> Tensor:
    gate = x.sigmoid()
    return gate * (1 - gate) * (2 + x * (1 - 2 * gate))


def _leaky_slope(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return torch.where(y > 0, torch.ones_like(y), alpha)


def _flat(x: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(y)


ACTIVATIONS = {
    "linear": Activation(lambda x, a: x, lambda x, y, a: torch.ones_like(y), _flat),
    "relu": Activation(lambda x, a: x.relu(), lambda x, y, a: (y > 0).to(y.dtype), _flat),
    "lrelu": Activation(lambda x, a: torch.where(x > 0, x, x * a), _leaky_slope, _flat),
    "tanh": Activation(lambda x, a: x.tanh(), lambda x, y, a: 1 - y * y, lambda x, y: (1 - y * y) * (-2 * y)),
    "sigmoid": Activation(
        lambda x, a: x.sigmoid(), lambda x, y, a: y * (1 - y), lambda x, y: y * (1 - y) * (1 - 2 * y)
    ),
    "elu": Activation(
        lambda x, a: functional.elu(x),
        lambda x, y, a: torch.where(y >= 0, 1.0, y + 1),
        lambda x, y: torch.where(y >= 0, 0.0, y + 1),
    ),
    "selu": Activation(
        lambda x, a: functional.selu(x),
        lambda x, y, a: torch.where(y >= 0, SELU, y + SELU_END),
        lambda x, y: torch.where(y >= 0, 0.0, y + SELU_END),
    ),
    "softplus": Activation(
        lambda x, a: functional.softplus(x, threshold=80),
        lambda x, y, a: -torch.expm1(-y),
        lambda x, y: torch.exp(-y) * -torch.expm1(-y),
    ),
    "swish": Activation(lambda x, a: functional.silu(x), _swish_slope, _swish_curvature),
}


def bias_act(x: Tensor, bias: Tensor | None, dim: int, act: str, alpha: float, gain: float, clamp: float) -> Tensor:
    """gain * activation(x + bias), within -clamp and clamp unless that is below 0. The bias [B] lies along `dim`."""
    result = ACTIVATIONS[act].value(plus_bias(x, bias, dim), alpha) * gain
    return (result.clamp(-clamp, clamp) if clamp >= 0 else result).to(x.dtype)


def bias_act_derivative(
    grad: Tensor, x: Tensor | None, bias: Tensor | None, y: Tensor | None, other: Tensor | None, order: int, dim: int,
    act: str, alpha: float, gain: float, clamp: float,
) -> Tensor:  # fmt: skip
    """The first or second derivative of `bias_act` times a gradient, and of order 2 times another.

    x, y: its input and output. Each activation needs one of them at most; None counts as 0.
    """
    given, rule = wide(grad), ACTIVATIONS[act]
    at_x = plus_bias(torch.zeros_like(given) if x is None else x, bias, dim)
    result_y = torch.zeros_like(given) if y is None else wide(y)
    at_y = result_y / gain if gain else torch.zeros_like(given)
    derivative = rule.slope(at_x, at_y, alpha) if order == 1 else rule.curvature(at_x, at_y)
    result = given * derivative * gain * (1 if other is None else wide(other))
    if clamp >= 0:
        value = rule.value(at_x, alpha) * gain if act == "swish" else result_y
        result = torch.where(value.abs() < clamp, result, 0)
    return result.to(grad.dtype)


def plus_bias(x: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    """x plus the bias [B] along `dim`, in the dtype that it is computed in."""
    if bias is None:
        return wide(x)
    return wide(x) + wide(bias).view([-1 if axis == dim else 1 for axis in range(x.dim())])


# The leaky ReLU between two filters. Its backward pass reads what the forward pass noted of each value: bit 0 where it
# was below 0, bit 1 alone where it was cut off. Four values share a byte, the first in the lowest bits.

ROW = 16  # values: rows of notes are padded to a multiple of it


def leaky_relu_signs(x: Tensor, gain: float, slope: float, clamp: float) -> tuple[Tensor, Tensor]:
    """The leaky ReLU of gain * x, within -clamp and clamp, and what to note of each value, uint8 0, 1 or 2."""
    scaled = wide(x) * gain
    value = torch.where(scaled < 0, scaled * slope, scaled)
    cut = value.abs() > clamp
    signs = torch.where(cut, 2, (scaled < 0).to(torch.uint8)).to(torch.uint8)
    return value.clamp(-clamp, clamp).to(x.dtype), signs


def leaky_relu_by_signs(x: Tensor, signs: Tensor, gain: float, slope: float) -> Tensor:
    """gain * x times the slope that was noted. signs: of the shape of x, see `leaky_relu_signs`."""
    scaled = wide(x) * gain
    return torch.where(signs == 2, 0, torch.where(signs == 1, scaled * slope, scaled)).to(x.dtype)


def pack_signs(signs: Tensor) -> Tensor:
    """[N, C, H, W] of 0 to 3 -> four to a byte [N, C, H, W / 4], W padded to a multiple of 16."""
    padded = functional.pad(signs, [0, -signs.shape[3] % ROW])
    fours = padded.view(*padded.shape[:3], -1, 4)
    return (fours << _shifts(signs)).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, size: torch.Size, offset: tuple[int, int]) -> Tensor:
    """The window [N, C, height, width] at offset (x, y) of what was packed, which may lie outside: 0 there."""
    (x, y), (height, width) = offset, size[2:]
    signs = (packed[..., None] >> _shifts(packed) & 3).flatten(3)
    return functional.pad(signs, [-x, width + x - signs.shape[3], -y, height + y - signs.shape[2]])


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=like.device)


def filtered_leaky_relu(
    input: Tensor, up_filter: Tensor, down_filter: Tensor, bias: Tensor, signs: Tensor | None, up: int, down: int,
    padding: tuple[int, int, int, int], offset: tuple[int, int], gain: float, slope: float, clamp: float, flip: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Bias, upsampling by a filter, leaky ReLU, downsampling by another -> images, and what was noted of the signs.

    signs: what an earlier call noted, packed; its slopes are then used from `offset` (x, y) on.
    """
    image = wide(input) + wide(bias)[:, None, None]
    image = upfirdn2d(image, as_matrix(up_filter), (up, up), (1, 1), padding, flip, float(up * up))
    if signs is None:
        image, noted = leaky_relu_signs(image, gain, slope, clamp)
    else:
        noted = unpack_signs(signs, image.shape, offset)
        image = leaky_relu_by_signs(image, noted, gain, slope)
    taps = as_matrix(down_filter)
    output = upfirdn2d(image, taps, (1, 1), (down, down), (0, 0, 0, 0), flip, 1.0)
    # what the second filter does not reach teaches nothing, and is not noted
    rows, columns = ((size - 1) * down + taps.shape[axis] for axis, size in enumerate(output.shape[2:]))
    return output.to(input.dtype), pack_signs(noted[:, :, :rows, :columns])
