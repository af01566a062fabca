"""Inputs of get_indice_pairs and of the compact forms beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Standard, Work
from triops.ops.get_indice_pairs import geometry, get_indice_pairs, sparse_output_shape, submanifold_neighbors

_PAIRS = ("get_indice_pairs", "compact_indice_pairs")
_INDEX = (torch.int32,)  # a sample's dtype is a float dtype elsewhere; here it is that of the sites

Make = Callable[[torch.dtype], tuple[Any, ...]]


def _arguments(
    operator: str, sites: Tensor, batch_size: int, shape: list[int], kernel: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The positional arguments of one of the four operators."""
    if operator == "submanifold_neighbors":
        return sites, batch_size, shape, kernel, dilation
    start = (sites, batch_size, shape, kernel, stride, padding, dilation, out_padding)
    return (*start, transpose) if operator == "sparse_neighbors" else (*start, subm, transpose)


def _case(
    operator: str, make_sites: Callable[[], Tensor], batch_size: int, shape: list[int], kernel: int | list[int] = 3, *,
    stride: int | list[int] = 1, padding: int | list[int] = 0, dilation: int | list[int] = 1,
    out_padding: int | list[int] = 0, subm: bool = False, transpose: bool = False,
) -> Make:  # fmt: skip
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        sites = make_sites()
        if dtype in (torch.int32, torch.int64):
            sites = sites.to(dtype)
        k, s, p, d, extra = (
            geometry.as_list(operator, "", v, len(shape)) for v in (kernel, stride, padding, dilation, out_padding)
        )
        return _arguments(operator, sites, batch_size, shape, k, s, p, d, extra, subm, transpose)

    return make


def ascending(sites: Tensor, shape: list[int]) -> Tensor:
    """The same sites, sorted by batch and position, as the layers behind the first one see them."""
    key = sites[:, 0].long()
    for axis, size in enumerate(shape):
        key = key * size + sites[:, 1 + axis]
    return sites[key.argsort()]


@cache
def _submanifold_sites() -> Tensor:
    return scenes.lidar_sites(248_636, (41, 1440, 1440), 4)


@cache
def _strided_sites() -> Tensor:
    return scenes.lidar_sites(149_100, (11, 360, 360), 4, reach=0.22, roughness=0.1)


def _random(count: int, batch_size: int, shape: list[int], seed: int = 0, outside: int = 0) -> Callable[[], Tensor]:
    """Sites anywhere in the grid, some of them twice, and `outside` places beyond each border."""

    def make() -> Tensor:
        g = torch.Generator().manual_seed(seed)
        columns = [
            torch.randint(-outside, size + outside, (count,), generator=g, dtype=torch.int32)
            for size in [batch_size, *shape]
        ]
        return torch.stack(columns, 1)

    return make


def _sites(*rows: list[int], width: int = 4) -> Callable[[], Tensor]:
    return lambda: torch.tensor(rows, dtype=torch.int32).reshape(-1, width)


def _every_site(batch_size: int, shape: list[int]) -> Callable[[], Tensor]:
    return lambda: torch.cartesian_prod(*(torch.arange(n) for n in [batch_size, *shape])).int()


def _corners(batch_size: int, shape: list[int], count: int = 300) -> Callable[[], Tensor]:
    """Sites at all borders of a grid, and clusters of them: the far corner's flat index may pass 2**31."""

    def make() -> Tensor:
        g = torch.Generator().manual_seed(0)
        ends = torch.tensor([batch_size, *shape]) - 1
        near = torch.randint(0, 3, (count, len(ends)), generator=g)
        return torch.where(torch.rand(count, len(ends), generator=g) < 0.5, near, ends - near).clamp(min=0).int()

    return make


_HUGE = [64, 20_000, 20_000]

SAMPLES = [
    Sample("get_indice_pairs", "submanifold, 248636 sites", _case(
        "get_indice_pairs", _submanifold_sites, 4, [41, 1440, 1440], padding=1, subm=True), "network", _INDEX,
        demo=True),
    Sample("get_indice_pairs", "submanifold, 248636 sites, ascending", _case(
        "get_indice_pairs", lambda: ascending(_submanifold_sites(), [41, 1440, 1440]), 4, [41, 1440, 1440], padding=1,
        subm=True), "network", _INDEX),
    Sample("get_indice_pairs", "stride 2, 149100 sites", _case(
        "get_indice_pairs", _strided_sites, 4, [11, 360, 360], stride=2, padding=[0, 1, 1]), "network", _INDEX),
    Sample("get_indice_pairs", "stride 2, 149100 sites, ascending", _case(
        "get_indice_pairs", lambda: ascending(_strided_sites(), [11, 360, 360]), 4, [11, 360, 360], stride=2,
        padding=[0, 1, 1]), "network", _INDEX),
    Sample("compact_indice_pairs", "submanifold, 248636 sites", _case(
        "compact_indice_pairs", _submanifold_sites, 4, [41, 1440, 1440], padding=1, subm=True), "network", _INDEX),
    Sample("compact_indice_pairs", "stride 2, 149100 sites", _case(
        "compact_indice_pairs", _strided_sites, 4, [11, 360, 360], stride=2, padding=[0, 1, 1]), "network", _INDEX),
    Sample("submanifold_neighbors", "248636 sites", _case(
        "submanifold_neighbors", _submanifold_sites, 4, [41, 1440, 1440]), "network", _INDEX),
    Sample("sparse_neighbors", "stride 2, 149100 sites", _case(
        "sparse_neighbors", _strided_sites, 4, [11, 360, 360], stride=2, padding=[0, 1, 1]), "network", _INDEX),
]  # fmt: skip

# Each of these is one sample of every operator that can take it: name, arguments of _case, scale.
_SPARSE: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("3D, 20 sites", (_random(20, 1, [4, 5, 6]), 1, [4, 5, 6]), {"stride": 2, "padding": 1}, "general"),
    ("1D", (_random(90, 3, [50], 1), 3, [50], 4), {"stride": 3, "padding": 2}, "general"),
    ("2D, stride and dilation", (_random(150, 2, [13, 17], 2), 2, [13, 17]),
     {"stride": [2, 6], "padding": [1, 5], "dilation": [3, 4]}, "general"),
    ("3D, stride 1", (_random(80, 2, [6, 7, 40], 3), 2, [6, 7, 40]), {"padding": 1}, "general"),
    ("4D", (_random(60, 2, [3, 4, 5, 6], 4), 2, [3, 4, 5, 6], [1, 2, 3, 2]), {"stride": 2, "padding": 1}, "general"),
    ("transposed", (_random(60, 2, [4, 5, 6], 5), 2, [4, 5, 6]),
     {"stride": 2, "padding": [0, 1, 1], "out_padding": [0, 1, 1], "transpose": True}, "general"),
    ("transposed, dilation", (_random(60, 1, [9, 33], 6), 1, [9, 33], [2, 3]),
     {"stride": [3, 2], "padding": 1, "dilation": [1, 2], "transpose": True}, "general"),
    ("kernel 1 x 1 x 9 taps", (_random(60, 1, [3, 4, 70], 7), 1, [3, 4, 70], [1, 1, 9]), {"padding": [0, 0, 4]},
     "general"),
    ("sites twice and outside", (_random(1100, 2, [5, 6, 7], 8, outside=1), 2, [5, 6, 7]), {"stride": 2, "padding": 1},
     "boundary"),
    ("no sites", (_sites(), 2, [5, 6, 7]), {"stride": 2}, "boundary"),
    ("one site in a corner", (_sites([0, 0, 0, 0]), 1, [5, 6, 7]), {"padding": 1}, "boundary"),
    ("all outside", (_sites([0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 6, 0]), 1, [5, 6, 7]), {"padding": 1}, "boundary"),
    ("every site", (_every_site(1, [3, 4, 70]), 1, [3, 4, 70]), {"stride": 2, "padding": 1}, "boundary"),
    ("none meets the stride", (_sites([0, 1, 1, 1]), 1, [3, 3, 3], 1), {"stride": 2}, "boundary"),
    ("huge grid", (_corners(8, _HUGE), 8, _HUGE), {"stride": 2, "padding": 1}, "boundary"),
    ("huge grid, stride to a small one", (_corners(2, [2**31 - 1]), 2, [2**31 - 1], 3),
     {"stride": 2**24, "dilation": 2**23, "padding": 2**24}, "boundary"),
    *((f"{n} sites", (_random(n, 1, [6, 40, 40], n), 1, [6, 40, 40]), {"stride": 2, "padding": 1}, "boundary")
      for n in (129, 1025)),
]  # fmt: skip
_SUBMANIFOLD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("submanifold 3D, 20 sites", (_random(20, 1, [4, 5, 6]), 1, [4, 5, 6]), {}, "general"),
    ("submanifold 1D", (_random(90, 3, [70], 1), 3, [70], 5), {}, "general"),
    ("submanifold 2D, dilation", (_random(200, 2, [13, 67], 2), 2, [13, 67], [3, 5]), {"dilation": [2, 3]}, "general"),
    ("submanifold 3D, word borders", (_random(400, 1, [3, 4, 95], 3), 1, [3, 4, 95]), {}, "general"),
    ("submanifold 3D, 5 x 5 x 5", (_random(150, 1, [5, 9, 11], 4), 1, [5, 9, 11], 5), {}, "general"),
    ("submanifold 4D", (_random(80, 2, [3, 4, 5, 6], 5), 2, [3, 4, 5, 6]), {}, "general"),
    ("submanifold, far taps along x", (_random(200, 1, [2, 3, 90], 6), 1, [2, 3, 90]), {"dilation": [1, 1, 20]},
     "general"),
    ("submanifold, kernel 1", (_random(40, 1, [4, 4, 4], 7), 1, [4, 4, 4], 1), {}, "general"),
    ("submanifold, sites twice and outside", (_random(1100, 2, [5, 6, 65], 8, outside=1), 2, [5, 6, 65]), {},
     "boundary"),
    ("submanifold, no sites", (_sites(), 2, [5, 6, 7]), {}, "boundary"),
    ("submanifold, one site", (_sites([0, 4, 5, 6]), 1, [5, 6, 7]), {}, "boundary"),
    ("submanifold, all outside", (_sites([0, -1, 0, 0], [1, 0, 0, 0]), 1, [5, 6, 7]), {}, "boundary"),
    ("submanifold, every site", (_every_site(1, [3, 4, 70]), 1, [3, 4, 70]), {}, "boundary"),
    ("submanifold, huge grid", (_corners(8, _HUGE), 8, _HUGE), {}, "boundary"),
    *((f"submanifold, {n} sites", (_random(n, 1, [6, 9, 40], n), 1, [6, 9, 40]), {}, "boundary")
      for n in (65, 513, 1025)),
]  # fmt: skip
for _operator, _cases, _subm in (
    *((name, _SPARSE, False) for name in (*_PAIRS, "sparse_neighbors")),
    *((name, _SUBMANIFOLD, True) for name in (*_PAIRS, "submanifold_neighbors")),
):
    for _name, _args, _options, _scale in _cases:
        # The other operators run the same kernels: what differs is the layout of the result.
        if _operator != "get_indice_pairs" and not any(
            word in _name for word in ("20 sites", "4D", "twice", "no sites")
        ):
            continue
        _make = _case(_operator, *_args, **_options, subm=_subm)
        SAMPLES.append(Sample(_operator, _name, _make, _scale, _INDEX))  # type: ignore[arg-type]
SAMPLES += [
    Sample("get_indice_pairs", "int64 sites", _case(
        "get_indice_pairs", _random(30, 1, [4, 5, 6]), 1, [4, 5, 6], stride=2), "general", (torch.int64,)),
    Sample("get_indice_pairs", "submanifold, int64 sites", _case(
        "get_indice_pairs", _random(30, 1, [4, 5, 6]), 1, [4, 5, 6], subm=True), "general", (torch.int64,)),
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
        BadCall("submanifold_neighbors: even kernel", lambda: submanifold_neighbors(sites, 1, 5, 2), ValueError,
                "kernel_size must be odd"),
        BadCall("sparse_output_shape: empty output", lambda: sparse_output_shape([2, 2], 3), ValueError,
                r"output shape would be empty: \[0, 0\]"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()

_LOOK_UPS = "neighbours are looked up wherever they lie in the grid: latency, not bandwidth"
STANDARD = {name: Standard(why_slower=_LOOK_UPS) for name in (*_PAIRS, "submanifold_neighbors", "sparse_neighbors")}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    """Sites read once, the full tables or pairs written once; compact pairs and outputs by their usual share."""
    sites, kernel = args[0], args[3]
    count, volume = sites.shape[0], torch.Size(kernel).numel()
    written = {"get_indice_pairs": 2, "compact_indice_pairs": 0, "submanifold_neighbors": 1, "sparse_neighbors": 1}
    read = sites.numel() * sites.element_size()
    table = 4 * written[operator] * volume * count
    pairs = 8 * 4 * count if operator == "compact_indice_pairs" else 0  # about four pairs a site
    return Work(2 * read + table + pairs, 10 * volume * count)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    if operator not in _PAIRS or operator == "compact_indice_pairs":
        return {}
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
