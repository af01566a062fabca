"""A tensor described by shape, dtype, strides, value ranges and a seed, and one made from such a description.

A recording of descriptions is small, and of the data it holds no more than the least and the greatest value per column.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

COLUMNS = 16  # up to so many columns have ranges of their own: x, y and z are not alike, nor are batch and site

_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip
_SPREAD = 8  # how many times more than its elements the values of a permutation may span
_MOST_ELEMENTS = 2**32  # of a tensor that a file may ask for


class DescriptionError(ValueError):
    """A description that no tensor fits."""


def described(tensor: Tensor, seed: int) -> dict[str, Any]:
    """What `made` needs. `low` and `high` are of the finite values, per column where there are few; 0 of none.

    >>> described(torch.tensor([[1.0, 20.0], [3.0, 10.0]]), seed=7)
    {'shape': [2, 2], 'dtype': 'float32', 'stride': [2, 1], 'low': [1.0, 10.0], 'high': [3.0, 20.0], 'seed': 7}
    """
    tensor = tensor.detach()
    low, high = _range(tensor)
    found = {**layout(tensor), "low": low, "high": high, "seed": seed}
    if _ascends(tensor):
        found["ascending"] = True
    if (count := _distinct(tensor)) is not None:
        found["distinct"] = count
    return found


def layout(tensor: Tensor) -> dict[str, Any]:
    """Shape, dtype and strides."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "stride": list(tensor.stride())}


def _ascends(tensor: Tensor) -> bool:
    """Whether these are integers in order, as where the lists of a plan start."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool or len(tensor) < 2:
        return False
    return bool((tensor[1:] >= tensor[:-1]).all())


def _distinct(tensor: Tensor) -> int | None:
    """How many values are not negative, if these are distinct and lie close: a permutation, or the rows of sites."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.numel() < 2:
        return None
    named = tensor[tensor >= 0]
    if len(named) < 2 or int(tensor.min()) < -1 or int(named.max()) > _SPREAD * tensor.numel():
        return None
    return len(named) if len(named.unique()) == len(named) else None


def _range(tensor: Tensor) -> tuple[Any, Any]:
    """Lowest and highest finite value: two numbers, or two lists of numbers."""
    columns = tensor.dim() > 1 and 0 < tensor.shape[-1] <= COLUMNS
    if tensor.numel() == 0:
        return 0, 0
    rows = tensor.reshape(-1, tensor.shape[-1]) if columns else tensor.reshape(-1, 1)
    if rows.is_floating_point():
        finite = rows.isfinite()
        low = torch.where(finite, rows, torch.inf).amin(0).double()
        high = torch.where(finite, rows, -torch.inf).amax(0).double()
        none = ~finite.any(0)
        low, high = low.masked_fill(none, 0), high.masked_fill(none, 0)
    else:
        numbers = rows.int() if rows.dtype == torch.bool else rows
        low, high = numbers.amin(0), numbers.amax(0)
    lows, highs = low.tolist(), high.tolist()
    return (lows, highs) if columns else (lows[0], highs[0])


def made(description: Any) -> Tensor:
    """A tensor of this shape, dtype and strides, with values drawn evenly between `low` and `high`.

    >>> made({"shape": [2, 2], "dtype": "int32", "stride": [1, 2], "low": [0, 5], "high": [0, 5], "seed": 1})
    tensor([[0, 5],
            [0, 5]], dtype=torch.int32)
    """
    shape, stride, dtype, low, high, seed = _checked(description)
    kind = torch.float64 if dtype.is_floating_point else torch.int64
    low, high = torch.tensor(low, dtype=kind), torch.tensor(high, dtype=kind)
    # a dimension that was expanded has one value
    sizes = [1 if s == 0 and n > 1 else n for n, s in zip(shape, stride, strict=True)]
    share = torch.rand(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dtype.is_floating_point:
        values = low * (1 - share) + high * share
    else:
        values = torch.minimum((share * (high - low + 1)).floor().to(torch.int64) + low, high)
    count = description.get("distinct")
    if type(count) is int and 0 < count <= values.numel() and not dtype.is_floating_point:
        values = _drawn_distinct(values, count, int(low.min()), int(high.max()), seed)
    if description.get("ascending") is True and values.numel():
        values = values.sort(0).values
        values[0], values[-1] = low.min(), high.max()  # offsets begin at 0 and end at the number of rows
    span = 1 + sum((n - 1) * s for n, s in zip(sizes, stride, strict=True)) if values.numel() else 0
    memory = torch.zeros(span, dtype=dtype)
    try:
        memory.as_strided(sizes, stride).copy_(values)
    except RuntimeError:  # windows that overlap, which nothing can be written to
        return values.to(dtype).expand(shape).contiguous()
    return memory.as_strided(shape, stride)


def _drawn_distinct(like: Tensor, count: int, low: int, high: int, seed: int) -> Tensor:
    """So many different values from max(low, 0) to high at random places, and -1 everywhere else."""
    first, generator = max(low, 0), torch.Generator().manual_seed(seed)
    if not count <= high - first + 1 <= _SPREAD * like.numel() + 1:
        return like
    flat = torch.full((like.numel(),), -1)
    places = torch.randperm(like.numel(), generator=generator)[:count]
    flat[places] = first + torch.randperm(high - first + 1, generator=generator)[:count]
    return flat.view(like.shape)


def _checked(description: Any) -> tuple[list[int], list[int], torch.dtype, Any, Any, int]:
    """The parts of a description from a file, of which anything may be wrong."""
    if not isinstance(description, dict):
        raise DescriptionError("a description of a tensor must be an object")
    shape, stride, dtype = description.get("shape"), description.get("stride"), description.get("dtype")
    low, high, seed = description.get("low"), description.get("high"), description.get("seed")
    for name, sizes in (("shape", shape), ("stride", stride)):
        if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
            raise DescriptionError(f"{name} must be a list of integers, got {sizes!r}")
    assert isinstance(shape, list)
    assert isinstance(stride, list)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise DescriptionError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if len(shape) != len(stride) or type(seed) is not int or not 0 <= seed < 2**63:
        raise DescriptionError("there must be one stride per dimension, and a seed that is an integer")
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    count = 1
    for n in shape:
        count *= n
    if count and max(span, count) > _MOST_ELEMENTS:
        raise DescriptionError(f"a tensor of {max(span, count):,} elements is too large")
    columns = [shape[-1]] if len(shape) > 1 else []
    kinds = (int, float) if _DTYPES[dtype].is_floating_point else (int,)
    for name, numbers in (("low", low), ("high", high)):
        each = numbers if isinstance(numbers, list) else [numbers]
        if not all(type(n) in kinds and _holds(n) for n in each):
            raise DescriptionError(f"{name} must be numbers of {dtype}, got {numbers!r}")
        if isinstance(numbers, list) and [len(numbers)] != columns:
            raise DescriptionError(f"{name} must be one number, or one per column")
    return shape, stride, _DTYPES[dtype], low, high, seed


def _holds(number: Any) -> bool:
    """Whether a tensor can hold it."""
    return math.isfinite(number) if isinstance(number, float) else -(2**63) <= number < 2**63
