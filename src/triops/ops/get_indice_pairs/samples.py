"""Inputs of get_indice_pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triops._sample import BadCall, Sample, Sized, Work
from triops.ops.get_indice_pairs import get_indice_pairs, sparse_output_shape
from triops.ops.rulebook import geometry
from triops.ops.rulebook import samples as rulebook
from triops.ops.rulebook.samples import (
    INDEX,
    LOOKUPS,
    SPARSE,
    SUBMANIFOLD,
    ascending,
    case,
    drawn,
    scattered,
    strided_sites,
    submanifold_sites,
)  # fmt: skip

SAMPLES = [
    Sample("get_indice_pairs", "submanifold, 248636 sites", case(
        "get_indice_pairs", submanifold_sites, 4, [41, 1440, 1440], padding=1, subm=True), "network", INDEX,
        demo=True),
    Sample("get_indice_pairs", "submanifold, 248636 sites, ascending", case(
        "get_indice_pairs", lambda: ascending(submanifold_sites(), [41, 1440, 1440]), 4, [41, 1440, 1440], padding=1,
        subm=True), "network", INDEX),
    Sample("get_indice_pairs", "stride 2, 149100 sites", case(
        "get_indice_pairs", strided_sites, 4, [11, 360, 360], stride=2, padding=[0, 1, 1]), "network", INDEX),
    Sample("get_indice_pairs", "stride 2, 149100 sites, ascending", case(
        "get_indice_pairs", lambda: ascending(strided_sites(), [11, 360, 360]), 4, [11, 360, 360], stride=2,
        padding=[0, 1, 1]), "network", INDEX),
]  # fmt: skip
SAMPLES += [
    Sample("get_indice_pairs", name, case("get_indice_pairs", *args, **options, subm=subm), scale, INDEX)  # type: ignore[arg-type]
    for cases, subm in ((SPARSE, False), (SUBMANIFOLD, True))
    for name, args, options, scale in cases
]
SAMPLES += [
    Sample("get_indice_pairs", "int64 sites", case(
        "get_indice_pairs", scattered(30, 1, [4, 5, 6]), 1, [4, 5, 6], stride=2), "general", (torch.int64,)),
    Sample("get_indice_pairs", "submanifold, int64 sites", case(
        "get_indice_pairs", scattered(30, 1, [4, 5, 6]), 1, [4, 5, 6], subm=True), "general", (torch.int64,)),
]  # fmt: skip


SIZED = [
    Sized("get_indice_pairs", "submanifold", lambda draw: case(
        "get_indice_pairs", *drawn(draw, [41, 400, 352]), padding=1, subm=True)),
    Sized("get_indice_pairs", "stride 2", lambda draw: case(
        "get_indice_pairs", *drawn(draw, [11, 400, 352]), stride=2, padding=1)),
]  # fmt: skip


def _bad_calls() -> list[BadCall]:
    sites = torch.zeros(3, 4, dtype=torch.int32)

    def bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
        return BadCall(f"get_indice_pairs: {what}", lambda: get_indice_pairs(*args, **options), error, match)

    return [
        bad("indices of rank 1", ValueError, r"indices must have shape \[L, 1 \+ D\].*got \[4\]", sites[0], 1, 5, 3),
        bad("indices of one column", ValueError, r"got \[3, 1\]", sites[:, :1], 1, [5], 3),
        bad("indices of six columns", ValueError, r"got \[3, 6\]", sites.repeat(1, 2)[:, :6], 1, 5, 3),
        bad("float indices", TypeError, "indices must be int32 or int64, got float32", sites.float(), 1, 5, 3),
        bad("indices as a list", TypeError, "indices must be a Tensor, got list", sites.tolist(), 1, 5, 3),
        bad("more sites than int32 counts in blocks", ValueError, r"at most 2\*\*30 sites.*got 2147483648",
            sites[:1].expand(2**31, 4), 1, 5, 3),
        bad("batch_size 0", ValueError, "batch_size must be at least 1, got 0", sites, 0, 5, 3),
        bad("batch_size as a string", TypeError, "batch_size must be an integer, got str", sites, "1", 5, 3),
        bad("spatial_shape of two axes", ValueError, r"spatial_shape must have 3 entries.*got \[5, 5\]", sites, 1,
            [5, 5], 3),
        bad("spatial_shape 0", ValueError, r"spatial_shape must be at least 1 .*got \[5, 0, 5\]", sites, 1,
            [5, 0, 5], 3),
        bad("spatial_shape of floats", TypeError, "spatial_shape must hold integers, got float", sites, 1,
            [5.0, 5, 5], 3),
        bad("spatial_shape None", TypeError, "spatial_shape must be an integer or a sequence .*got NoneType", sites, 1,
            None, 3),
        bad("kernel_size as a tensor", TypeError, "kernel_size must be an integer or a sequence .*got Tensor", sites, 1,
            5, torch.tensor([3, 3, 3])),
        bad("kernel_size 0", ValueError, r"kernel_size must be at least 1 .*got \[3, 0, 3\]", sites, 1, 5, [3, 0, 3]),
        bad("kernel_size of two axes", ValueError, r"kernel_size must have 3 entries", sites, 1, 5, [3, 3]),
        bad("kernel_size too large", ValueError, r"at most 4096 offsets, got \[17, 17, 17\]", sites, 1, 99, 17),
        bad("stride 0", ValueError, r"stride must be at least 1", sites, 1, 5, 3, stride=0),
        bad("stride of four axes", ValueError, r"stride must have 3 entries", sites, 1, 5, 3, stride=[1, 1, 1, 1]),
        bad("padding -1", ValueError, r"padding must be at least 0", sites, 1, 5, 3, padding=-1),
        bad("padding as a string", TypeError, r"padding must be an integer .*got str", sites, 1, 5, 3, padding="same"),
        bad("dilation 0", ValueError, r"dilation must be at least 1", sites, 1, 5, 3, dilation=[1, 0, 1]),
        bad("out_padding -1", ValueError, r"out_padding must be at least 0", sites, 1, 5, 3, out_padding=-1,
            transpose=True),
        bad("out_padding without transpose", ValueError, "out_padding must be 0 .*unless transpose", sites, 1, 5, 3,
            out_padding=1),
        bad("even kernel with subm", ValueError, r"kernel_size must be odd .*subm.*got \[3, 2, 3\]", sites, 1, 5,
            [3, 2, 3], subm=True),
        bad("stride 2 with subm", ValueError, r"stride must be 1 .*subm.*got \[2, 2, 2\]", sites, 1, 5, 3, stride=2,
            subm=True),
        bad("transpose with subm", ValueError, "transpose must be False when subm", sites, 1, 5, 3, subm=True,
            transpose=True),
        bad("subm as an integer", TypeError, "subm must be a bool, got int", sites, 1, 5, 3, subm=1),
        bad("empty output", ValueError, r"output shape would be empty: \[1, 0, 1\]", sites, 1, [5, 2, 5], [5, 3, 5]),
        bad("a grid beyond 2**62", ValueError, r"below 2\*\*62", sites, 8, 2**30, 3),
        BadCall("sparse_output_shape: empty output", lambda: sparse_output_shape([2, 2], 3), ValueError,
                r"output shape would be empty: \[0, 0\]"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()
STANDARD = {"get_indice_pairs": LOOKUPS}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    return rulebook.work(operator, args)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"torch": _vectorised}
    try:
        from spconv.core import ConvAlgo
        from spconv.pytorch import ops
    except Exception:  # a compiled peer may fail in any way while it loads
        return found

    def spconv(
        indices: Tensor, batch_size: int, shape: list[int], kernel: list[int], stride: list[int], padding: list[int],
        dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
    ) -> Any:  # fmt: skip
        return ops.get_indice_pairs(
            indices, batch_size, shape, ConvAlgo.Native, kernel, stride, padding, dilation, out_padding, subm, transpose
        )

    found["spconv"] = spconv
    return found


def _vectorised(
    indices: Tensor, batch_size: int, shape: list[int], kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What one writes in torch: all offsets at once, and a sort."""
    if subm:
        padding = geometry.submanifold_padding(kernel, dilation)
    out_shape = geometry.output_shape(shape, kernel, stride, padding, dilation, out_padding, subm, transpose)
    device, count = indices.device, indices.shape[0]
    sites = indices.long()
    limit = torch.tensor([batch_size, *shape], device=device)
    weight = torch.ones(len(shape) + 1, dtype=torch.int64, device=device)
    for axis in reversed(range(len(shape))):
        weight[axis] = weight[axis + 1] * out_shape[axis]
    input_weight = torch.ones_like(weight)
    for axis in reversed(range(len(shape))):
        input_weight[axis] = input_weight[axis + 1] * shape[axis]

    inside = ((sites >= 0) & (sites < limit)).all(1)
    far = torch.iinfo(torch.int64).max
    keys, order = torch.where(inside, (sites * input_weight).sum(1), far).sort(stable=True)
    active = inside.clone()
    active[order[1:]] &= keys[1:] != keys[:-1]

    offsets = torch.cartesian_prod(*(torch.arange(k, device=device) for k in kernel)).reshape(-1, len(kernel))
    reach = offsets * torch.tensor(dilation, device=device)
    step, pad = torch.tensor(stride, device=device), torch.tensor(padding, device=device)
    if transpose:
        target = sites[None, :, 1:] * step - pad + reach[:, None]
        valid = active.expand(len(offsets), count)
    else:
        scaled = sites[None, :, 1:] + pad - reach[:, None]
        target = scaled.div(step, rounding_mode="floor")
        valid = active & (target * step == scaled).all(2)
    valid = valid & ((target >= 0) & (target < torch.tensor(out_shape, device=device))).all(2)
    flat = sites[:, 0] * weight[0] + (target * weight[1:]).sum(2)
    if subm:
        place = torch.searchsorted(keys, flat).clamp(max=max(count - 1, 0))
        valid = valid & (keys[place] == flat) if count else valid
        rows, out_indices = order[place] if count else flat, indices.clone()
    else:
        outputs = flat[valid].unique()
        rows = torch.searchsorted(outputs, flat)
        columns = [outputs.div(weight[0], rounding_mode="floor")]
        columns += [outputs.div(w, rounding_mode="floor") % n for w, n in zip(weight[1:], out_shape, strict=True)]
        out_indices = torch.stack(columns, 1).to(indices.dtype)
    pairs = indices.new_full((len(offsets), 2, count), -1, dtype=torch.int32)
    k, i = valid.nonzero(as_tuple=True)
    num = valid.sum(1, dtype=torch.int32)
    first = num.cumsum(0) - num
    at = torch.arange(len(k), device=device) - first[k]
    pairs[k, 0, at], pairs[k, 1, at] = i.int(), rows[k, i].int()
    return out_indices, pairs, num
