"""Arguments of a call, made odd: in ways that change no result, in values only, or in any way at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

INTS = (-(2**31), -7, -1, 0, 1, 2, 3, 5, 64, 2**31 - 1, 2**62)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-30, 0.5, 1.0, 1e30, 1e300)
STRANGERS: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: "nonsense", lambda: b"", lambda: 1.5, lambda: True, lambda: [], lambda: [1, 2, 3], dict,
    lambda: 3 + 4j, object, tuple, lambda: torch.Size([2]), lambda: 2**70, lambda: [None], lambda: torch.zeros(()),
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip


def generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(32))


# Ways that change no result


def restrided(rng: Random, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Some of the tensors with other strides, of the same values."""
    return tuple(_restrided(rng, a) if isinstance(a, Tensor) and a.dim() and rng.random() < 0.4 else a for a in args)


def _restrided(rng: Random, tensor: Tensor) -> Tensor:
    way = rng.choice(("every second", "transposed", "inside"))
    if way == "every second":
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    if way == "transposed":
        first, second = rng.randrange(tensor.dim()), rng.randrange(tensor.dim())
        return tensor.transpose(first, second).contiguous().transpose(first, second)
    wider = tensor.new_zeros([size + 2 for size in tensor.shape])
    inside = wider[tuple(slice(1, 1 + size) for size in tensor.shape)]
    return inside.copy_(tensor)


# Other values


def other_values(rng: Random, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """One or two float tensors with NaN, inf, zeros of both signs, subnormal numbers, equal rows or ties."""
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point() and a.numel()]
    changed = list(args)
    for place in rng.sample(places, min(len(places), rng.choice((1, 1, 2)))):
        changed[place] = _other_values(rng, args[place])
    return tuple(changed)


def _other_values(rng: Random, tensor: Tensor) -> Tensor:
    way, g = rng.choice(("sprinkled", "sprinkled", "equal rows", "ties", "constant")), generator(rng)
    if way == "equal rows" and tensor.dim():
        few = max(1, tensor.shape[0] // rng.choice((1, 2, 10)))
        return tensor[torch.randint(few, (tensor.shape[0],), generator=g)]
    if way == "ties":
        return (tensor.float() * 4).round().div(4).to(tensor.dtype)
    if way == "constant":
        return torch.full_like(tensor, rng.choice((0.0, -0.0, 1.0, 0.25)))
    share = rng.choice((0.0, 0.02, 0.3))
    hit = torch.rand(tensor.shape, generator=g) < share
    hit.view(-1)[rng.randrange(tensor.numel())] = True
    tensor = tensor.clone()
    subnormal = torch.finfo(tensor.dtype).smallest_normal / 4
    for value in rng.sample((math.nan, math.inf, -math.inf, 0.0, -0.0, subnormal), 2):
        tensor[hit & (torch.rand(tensor.shape, generator=g) < 0.6)] = value
    return tensor


# Anything at all


def spoilt(rng: Random, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """One or two arguments of any other kind."""
    changed = list(args)
    for place in rng.sample(range(len(args)), min(len(args), rng.choice((1, 1, 2)))):
        changed[place] = _spoilt(rng, args[place])
    return tuple(changed)


def _spoilt(rng: Random, value: Any) -> Any:
    if isinstance(value, Tensor) and rng.random() < 0.9:
        return _spoilt_tensor(rng, value)
    if rng.random() < 0.3:
        return rng.choice(STRANGERS)()
    if isinstance(value, list):
        if value and rng.random() < 0.5:
            changed = list(value)
            numbers = INTS if all(isinstance(v, int) for v in value) else FLOATS
            changed[rng.randrange(len(value))] = rng.choice(numbers)
            return changed
        return [rng.choice(INTS) for _ in range(rng.randrange(5))]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*INTS, value - 1, value + 1, 2 * value))
    if isinstance(value, float):
        return rng.choice((*FLOATS, value / 2, value * 2, -value))
    if isinstance(value, str):
        return rng.choice(("", value + " ", value.upper(), "nonsense"))
    return rng.choice(STRANGERS)()


def _spoilt_tensor(rng: Random, tensor: Tensor) -> Any:
    way = rng.choice(("dtype", "shape", "device", "layout", "values", "values", "empty", "cut", "grown", "axes"))
    if way == "dtype":
        return tensor.to(rng.choice(DTYPES))
    if way == "shape":
        return torch.zeros([rng.randrange(10) for _ in range(rng.randrange(6))], dtype=tensor.dtype)
    if way == "device":
        return tensor.to("meta")
    if way == "values" and tensor.numel():
        g = generator(rng)
        hit = torch.rand(tensor.shape, generator=g) < rng.choice((0.02, 0.5, 1.0))
        hit.view(-1)[rng.randrange(tensor.numel())] = True
        if tensor.is_floating_point():
            most = torch.finfo(tensor.dtype).max
            return tensor.masked_fill(hit, rng.choice((math.nan, math.inf, most, -most, -1.0, 1e4)))
        if tensor.dtype not in (torch.int32, torch.int64):
            return tensor.logical_not() if tensor.dtype == torch.bool else tensor
        limits = torch.iinfo(tensor.dtype)
        size = max(tensor.shape)
        return tensor.masked_fill(hit, rng.choice((-2, -1, 0, 1, size - 1, size, 2**30, limits.max, limits.min)))
    if tensor.dim() == 0:
        return rng.choice(STRANGERS)()
    axis = rng.randrange(tensor.dim())
    if way == "layout":
        return tensor.to_sparse()
    if way == "empty":
        return tensor.narrow(axis, 0, 0)
    if way == "cut":
        return tensor.narrow(axis, 0, max(tensor.shape[axis] - 1, 0))
    if way == "grown":
        return torch.cat([tensor, tensor.narrow(axis, 0, min(1, tensor.shape[axis]))], axis)
    return tensor.transpose(0, axis) if rng.random() < 0.5 else tensor[None]
