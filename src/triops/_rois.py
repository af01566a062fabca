"""Feature maps [N, C, H, W] and the boxes that are pooled from them: memory formats, arguments, image indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triops import _check
from triops._dtypes import compute_dtype

HALVES = (torch.float16, torch.bfloat16)
MOST_BINS = 2**15  # along one axis
MOST_RATIO = 1024  # samples of a bin along an axis, where they are asked for
MOST_SAMPLES = 2**20  # of a bin along an axis, where their number is adaptive
FEW_SAMPLES = 8  # of a bin that kernels visit wherever they lie


def format_of(tensor: Tensor) -> torch.memory_format:
    """How a 4D tensor lies in memory; one that lies both ways counts as contiguous."""
    if tensor.is_contiguous():  # first, for it is the quickest to ask
        return torch.contiguous_format
    return torch.channels_last if tensor.stride(1) == 1 and tensor.shape[1] > 1 else torch.contiguous_format


def empty_in_format(shape: Sequence[int], dtype: torch.dtype, device: torch.device, channels_last: bool) -> Tensor:
    """An empty tensor [N, C, H, W]; channels_last: in the memory order [N, H, W, C]."""
    if not channels_last:
        return torch.empty(*shape, dtype=dtype, device=device)  # PyTorch reads integers sooner than a list of them
    _, c, h, w = shape
    return torch.empty_strided(shape, (c * h * w, 1, c * w, c), dtype=dtype, device=device)


def empty_like_format(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """An empty tensor [N, C, H, W] on the device of `like`, lying in memory as `like` does."""
    return empty_in_format(shape, dtype, like.device, format_of(like) == torch.channels_last)


def as_boxes(operator: str, input: Any, boxes: Any) -> Any:
    """Boxes [K, 5], of which a list of [L, 4], one per image, is another way to write them. All else stays as it is."""
    if not isinstance(boxes, list | tuple) or not isinstance(input, Tensor) or input.dim() != 4:
        return boxes
    c = _check.Checker(operator)
    if not all(isinstance(b, Tensor) for b in boxes):
        c.fail("boxes must be a Tensor [K, 5] or a list of Tensors [L, 4]", TypeError)
    if len(boxes) != input.shape[0]:
        c.fail(
            f"boxes must be one Tensor per image where they are a list, got {len(boxes)} for {input.shape[0]} images"
        )
    rows = []
    for n, own in enumerate(boxes):
        if own.dim() != 2 or own.shape[1] != 4 or own.layout is not torch.strided:
            c.fail(f"boxes of image {n} must be a dense Tensor of shape [L, 4], got {list(own.shape)}")
        c.same_dtype(**{"boxes[0]": boxes[0], f"boxes[{n}]": own})
        c.same_device(input=input, **{f"boxes[{n}]": own})
        own = own.float() if own.dtype in HALVES else own  # bfloat16 does not hold the index of image 257
        rows.append(torch.cat([torch.full_like(own[:, :1], n), own], 1))
    return torch.cat(rows) if rows else input.new_zeros((0, 5), dtype=compute_dtype(input.dtype))


def as_bins(operator: str, output_size: Any) -> list[int]:
    """`output_size`, an integer or two, as rows and columns of bins."""
    if type(output_size) is int and 1 <= output_size <= MOST_BINS:
        return [output_size, output_size]
    c = _check.Checker(operator)
    one = _check.as_integer(output_size)
    sizes = [one, one] if one is not None else c.integers("output_size", output_size)
    if len(sizes) != 2:
        c.fail(f"output_size must be one integer or two (height, width), got {len(sizes)}")
    return [c.integer("output_size", size, 1, MOST_BINS) for size in sizes]


def check_maps(c: _check.Checker, name: str, maps: Tensor, boxes: Tensor, *pattern: str, fields: int = 5) -> None:
    """A tensor [pattern] of floats, boxes [K, fields] of its dtype or, where that is a half type, of float32."""
    c.shape(name, maps, *pattern)
    c.shape("boxes", boxes, "K", fields)
    c.dtype(name, maps, _check.FLOATS)
    if boxes.dtype != maps.dtype and not (boxes.dtype == torch.float32 and maps.dtype in HALVES):
        c.same_dtype(**{name: maps, "boxes": boxes})
    c.same_device(**{name: maps, "boxes": boxes})
    if _check.too_many(boxes.shape[0]):
        c.fail(f"boxes must be at most 2**30, got {boxes.shape[0]}")


def check_bins(c: _check.Checker, pooled_height: int, pooled_width: int) -> None:
    for name, size in (("pooled_height", pooled_height), ("pooled_width", pooled_width)):
        c.at_least(name, size, 1)
        if not isinstance(size, torch.SymInt) and size > MOST_BINS:
            c.fail(f"{name} must be at most {MOST_BINS}, got {size}")


def check_sizes(c: _check.Checker, **sizes: int) -> None:
    """Sizes of a map that is to be made, such as a gradient."""
    for name, size in sizes.items():
        c.at_least(name, size, 0)
        if _check.too_many(size):
            c.fail(f"{name} must be at most 2**30, got {size}")


def check_ratio(c: _check.Checker, name: str, ratio: int) -> None:
    if ratio > MOST_RATIO:
        c.fail(f"{name} must be at most {MOST_RATIO}, got {ratio}")


def images_of(boxes: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """The image of each box, int64 [K], 0 where there is none, and whether there is one."""
    image = boxes[:, 0]
    valid = (image > -1) & (image < batch)  # false for NaN; fractions are cut off, as mmcv does
    return torch.where(valid, image, 0).long(), valid


def check_images(operator: str, boxes: Tensor, batch: int) -> None:
    """IndexError for a box of an image that is not there."""
    if not bool(images_of(boxes, batch)[1].all()):
        raise no_image(operator, batch)


def no_image(operator: str, batch: int) -> IndexError:
    """What `check_images` raises."""
    return IndexError(f"{operator}: boxes must name images from 0 to {batch - 1} in column 0, and do not")


def check_boxes(operator: str, boxes: Tensor, batch: int) -> None:
    """`check_images`; on a GPU, where reading the boxes would synchronise, only when strict."""
    if boxes.device.type == "cpu" or _check.strict():
        check_images(operator, boxes, batch)


def neighbors(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whether positions are on an axis of the map, the two pixels around them, and the share of the second.

    Up to one pixel off the map a position reads the border pixel. Further away, and where it is NaN, it is off.
    """
    size = int(size) if isinstance(size, Tensor) else size  # as sizes are, on the CPU, while TorchScript traces
    on_map = (position >= -1) & (position <= size)
    place = torch.where(on_map, position, 0.0).clamp(0, size - 1)
    low = place.long().clamp(max=size - 1)
    return on_map, low, (low + 1).clamp(max=size - 1), place - low.to(place.dtype)


def samples_along(start: Tensor, extent: Tensor, pooled: int, ratio: int) -> tuple[Tensor, Tensor]:
    """Positions [pooled, samples] along an axis of a box that is cut into bins, and the number of samples of a bin.

    A ratio of 0 or less: as many as a bin is pixels long, rounded up.
    """
    length = extent / torch.full_like(extent, pooled)
    samples = int(length.float().ceil().clamp(0, MOST_SAMPLES)) if ratio <= 0 else ratio
    count = torch.full_like(extent, samples)
    bins = torch.arange(pooled, device=start.device).to(start.dtype)
    step = torch.arange(samples, device=start.device).to(start.dtype) + 0.5
    return (start + bins * length)[:, None] + step * length / count, count
