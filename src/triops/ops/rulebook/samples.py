"""Inputs of the operators that make a rulebook's tables; get_indice_pairs takes the same geometries."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._sample import BadCall, Sample, Sized, Standard, Work
from triops.ops.rulebook import capped_neighbors, geometry, packed_pairs, row_tiles, submanifold_neighbors
from triops.ops.rulebook.plans import TILE, Pairs, Tiles
from triops.ops.rulebook.reference import ranked_bitmap

INDEX = (torch.int32,)  # a sample's dtype is a float dtype elsewhere; here it is that of the sites

Make = Callable[[torch.dtype], tuple[Any, ...]]


def _arguments(
    operator: str, sites: Tensor, batch_size: int, shape: list[int], kernel: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The positional arguments of one of the four operators."""
    if operator == "submanifold_neighbors":
        return sites, batch_size, shape, kernel, dilation, None
    start = (sites, batch_size, shape, kernel, stride, padding, dilation, out_padding)
    if operator == "capped_neighbors":
        capacity = _CAPACITY if sites.shape[0] < 10_000 else sites.shape[0] // 2
        return *start, transpose, capacity, None, True, True
    return (*start, transpose, None, True, True) if operator == "sparse_neighbors" else (*start, subm, transpose)


def _of_dtype(sites: Tensor, dtype: torch.dtype) -> Tensor:
    return sites.to(dtype) if dtype in (torch.int32, torch.int64) else sites


def case(
    operator: str, make_sites: Callable[[], Tensor], batch_size: int, shape: list[int], kernel: int | list[int] = 3, *,
    stride: int | list[int] = 1, padding: int | list[int] = 0, dilation: int | list[int] = 1,
    out_padding: int | list[int] = 0, subm: bool = False, transpose: bool = False,
) -> Make:  # fmt: skip
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        sites = _of_dtype(make_sites(), dtype)
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
def submanifold_sites() -> Tensor:
    return scenes.lidar_sites(248_636, (41, 1440, 1440), 4)


@cache
def strided_sites() -> Tensor:
    return scenes.lidar_sites(149_100, (11, 360, 360), 4, reach=0.22, roughness=0.1)


def scattered(count: int, batch_size: int, shape: list[int], seed: int = 0, outside: int = 0) -> Callable[[], Tensor]:
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

# Each of these is one sample of every operator that can take it: name, arguments of case, scale.
SPARSE: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("3D, 20 sites", (scattered(20, 1, [4, 5, 6]), 1, [4, 5, 6]), {"stride": 2, "padding": 1}, "general"),
    ("1D", (scattered(90, 3, [50], 1), 3, [50], 4), {"stride": 3, "padding": 2}, "general"),
    ("2D, stride and dilation", (scattered(150, 2, [13, 17], 2), 2, [13, 17]),
     {"stride": [2, 6], "padding": [1, 5], "dilation": [3, 4]}, "general"),
    ("3D, stride 1", (scattered(80, 2, [6, 7, 40], 3), 2, [6, 7, 40]), {"padding": 1}, "general"),
    ("4D", (scattered(60, 2, [3, 4, 5, 6], 4), 2, [3, 4, 5, 6], [1, 2, 3, 2]), {"stride": 2, "padding": 1}, "general"),
    ("transposed", (scattered(60, 2, [4, 5, 6], 5), 2, [4, 5, 6]),
     {"stride": 2, "padding": [0, 1, 1], "out_padding": [0, 1, 1], "transpose": True}, "general"),
    ("transposed, dilation", (scattered(60, 1, [9, 33], 6), 1, [9, 33], [2, 3]),
     {"stride": [3, 2], "padding": 1, "dilation": [1, 2], "transpose": True}, "general"),
    ("kernel 1 x 1 x 9 taps", (scattered(60, 1, [3, 4, 70], 7), 1, [3, 4, 70], [1, 1, 9]), {"padding": [0, 0, 4]},
     "general"),
    ("sites twice and outside", (scattered(1100, 2, [5, 6, 7], 8, outside=1), 2, [5, 6, 7]), {"stride": 2,
     "padding": 1}, "boundary"),
    ("no sites", (_sites(), 2, [5, 6, 7]), {"stride": 2}, "boundary"),
    ("one site in a corner", (_sites([0, 0, 0, 0]), 1, [5, 6, 7]), {"padding": 1}, "boundary"),
    ("all outside", (_sites([0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 6, 0]), 1, [5, 6, 7]), {"padding": 1}, "boundary"),
    ("every site", (_every_site(1, [3, 4, 70]), 1, [3, 4, 70]), {"stride": 2, "padding": 1}, "boundary"),
    ("none meets the stride", (_sites([0, 1, 1, 1]), 1, [3, 3, 3], 1), {"stride": 2}, "boundary"),
    ("huge grid", (_corners(8, _HUGE), 8, _HUGE), {"stride": 2, "padding": 1}, "boundary"),
    ("huge grid, stride to a small one", (_corners(2, [2**31 - 1]), 2, [2**31 - 1], 3),
     {"stride": 2**24, "dilation": 2**23, "padding": 2**24}, "boundary"),
    *((f"{n} sites", (scattered(n, 1, [6, 40, 40], n), 1, [6, 40, 40]), {"stride": 2, "padding": 1}, "boundary")
      for n in (129, 1025)),
]  # fmt: skip
SUBMANIFOLD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("submanifold 3D, 20 sites", (scattered(20, 1, [4, 5, 6]), 1, [4, 5, 6]), {}, "general"),
    ("submanifold 1D", (scattered(90, 3, [70], 1), 3, [70], 5), {}, "general"),
    ("submanifold 2D, dilation", (scattered(200, 2, [13, 67], 2), 2, [13, 67], [3, 5]), {"dilation": [2, 3]},
     "general"),
    ("submanifold 3D, word borders", (scattered(400, 1, [3, 4, 95], 3), 1, [3, 4, 95]), {}, "general"),
    ("submanifold 3D, 5 x 5 x 5", (scattered(150, 1, [5, 9, 11], 4), 1, [5, 9, 11], 5), {}, "general"),
    ("submanifold 4D", (scattered(80, 2, [3, 4, 5, 6], 5), 2, [3, 4, 5, 6]), {}, "general"),
    ("submanifold, far taps along x", (scattered(200, 1, [2, 3, 90], 6), 1, [2, 3, 90]), {"dilation": [1, 1, 20]},
     "general"),
    ("submanifold, kernel 1", (scattered(40, 1, [4, 4, 4], 7), 1, [4, 4, 4], 1), {}, "general"),
    ("submanifold, sites twice and outside", (scattered(1100, 2, [5, 6, 65], 8, outside=1), 2, [5, 6, 65]), {},
     "boundary"),
    ("submanifold, no sites", (_sites(), 2, [5, 6, 7]), {}, "boundary"),
    ("submanifold, one site", (_sites([0, 4, 5, 6]), 1, [5, 6, 7]), {}, "boundary"),
    ("submanifold, all outside", (_sites([0, -1, 0, 0], [1, 0, 0, 0]), 1, [5, 6, 7]), {}, "boundary"),
    ("submanifold, every site", (_every_site(1, [3, 4, 70]), 1, [3, 4, 70]), {}, "boundary"),
    ("submanifold, huge grid", (_corners(8, _HUGE), 8, _HUGE), {}, "boundary"),
    *((f"submanifold, {n} sites", (scattered(n, 1, [6, 9, 40], n), 1, [6, 9, 40]), {}, "boundary")
      for n in (65, 513, 1025)),
]  # fmt: skip
# The kernels are those of get_indice_pairs; what differs is the layout of the result.
_CAPACITY = 40  # more than some of the cases below have, and less than others
_LAYOUTS = ("20 sites", "4D", "twice", "no sites")

SAMPLES = [
    Sample("compact_indice_pairs", "submanifold, 248636 sites", case(
        "compact_indice_pairs", submanifold_sites, 4, [41, 1440, 1440], padding=1, subm=True), "network", INDEX),
    Sample("compact_indice_pairs", "stride 2, 149100 sites", case(
        "compact_indice_pairs", strided_sites, 4, [11, 360, 360], stride=2, padding=[0, 1, 1]), "network", INDEX),
    Sample("submanifold_neighbors", "248636 sites", case(
        "submanifold_neighbors", submanifold_sites, 4, [41, 1440, 1440]), "network", INDEX),
    Sample("capped_neighbors", "stride 2, 149100 sites", case(
        "capped_neighbors", strided_sites, 4, [11, 360, 360], stride=2, padding=[0, 1, 1]), "network", INDEX),
    Sample("sparse_neighbors", "stride 2, 149100 sites", case(
        "sparse_neighbors", strided_sites, 4, [11, 360, 360], stride=2, padding=[0, 1, 1]), "network", INDEX),
]  # fmt: skip
for _operator, _cases, _subm in (
    ("compact_indice_pairs", SPARSE, False), ("sparse_neighbors", SPARSE, False),
    ("capped_neighbors", SPARSE, False),
    ("compact_indice_pairs", SUBMANIFOLD, True), ("submanifold_neighbors", SUBMANIFOLD, True),
):  # fmt: skip
    for _name, _args, _options, _scale in _cases:
        if any(word in _name for word in _LAYOUTS):
            _make = case(_operator, *_args, **_options, subm=_subm)
            SAMPLES.append(Sample(_operator, _name, _make, _scale, INDEX))  # type: ignore[arg-type]


def _indexed(count: int, batch_size: int, shape: list[int], kernel: list[int], dilation: list[int]) -> Make:
    """Distinct ascending sites with their index, as a strided convolution leaves them."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        sites = _of_dtype(ascending(scattered(count, batch_size, shape)().unique(dim=0), shape), dtype)
        return sites, batch_size, shape, kernel, dilation, ranked_bitmap(sites, batch_size, shape)

    return make


def _owned(operator: str) -> Make:
    """Sites whose owners are known: some come twice, some are outside. One table only."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        sites, shape = _of_dtype(scattered(300, 2, [5, 6, 7], 8, outside=1)(), dtype), [5, 6, 7]
        owners = submanifold_neighbors(sites, 2, shape, 1)[0]
        start = sites, 2, shape, [3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1], [0, 0, 0], False
        return *start, *([_CAPACITY] if operator == "capped_neighbors" else []), owners, False, False

    return make


SAMPLES += [
    Sample("submanifold_neighbors", "indexed, 3D", _indexed(400, 2, [5, 6, 70], [3, 3, 3], [1, 1, 1]), dtypes=INDEX),
    Sample("submanifold_neighbors", "indexed, far taps", _indexed(200, 2, [3, 90], [3, 9], [1, 4]), dtypes=INDEX),
    Sample("submanifold_neighbors", "one site, indexed", _indexed(1, 1, [4, 40], [3, 3], [1, 1]), "boundary", INDEX),
    Sample("sparse_neighbors", "known owners", _owned("sparse_neighbors"), dtypes=INDEX),
    Sample("capped_neighbors", "known owners", _owned("capped_neighbors"), dtypes=INDEX),
]


def _table(count: int, columns: int, offsets: int, fill: float = 0.3, seed: int = 0) -> Callable[[], Tensor]:
    """A table with a share of entries, more of the middle offsets."""

    def make() -> Tensor:
        g = torch.Generator().manual_seed(seed)
        entries = torch.randint(0, max(count, 1), (offsets, columns), generator=g, dtype=torch.int32)
        odds = fill * (1.5 - (torch.arange(offsets) - offsets // 2).abs() / max(offsets, 1))
        return torch.where(torch.rand(offsets, columns, generator=g) < odds[:, None], entries, -1)

    return make


@cache
def _lidar_table() -> Tensor:
    return submanifold_neighbors(submanifold_sites(), 4, [41, 1440, 1440], 3)


# name, table, rows that its entries count, scale
_TABLES: list[tuple[str, Callable[[], Tensor], int, str]] = [
    ("27 offsets, 200 columns", _table(90, 200, 27), 90, "general"),
    ("3 offsets, 70 columns", _table(70, 70, 3, 0.7), 70, "general"),
    ("125 offsets, 90 columns", _table(40, 90, 125, 0.1), 40, "boundary"),
    ("2100 columns", _table(500, 2100, 9), 500, "boundary"),
    ("one column", _table(5, 1, 27), 5, "boundary"),
    ("no columns", _table(5, 0, 27), 5, "boundary"),
    ("no entries", _table(5, 40, 8, 0.0), 5, "boundary"),
    ("no rows", _table(0, 40, 8, 0.0), 0, "boundary"),
    ("submanifold, 248636 sites", _lidar_table, 248_636, "network"),
]


def _plan(operator: str, table: Callable[[], Tensor], rows: int, tile: int) -> Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        return (table(), rows) if operator == "packed_pairs" else (table(), rows, tile)

    return make


SAMPLES += [
    Sample(operator, name, _plan(operator, table, rows, TILE), scale, INDEX)  # type: ignore[arg-type]
    for operator in ("packed_pairs", "row_tiles")
    for name, table, rows, scale in _TABLES
]
SAMPLES += [Sample("row_tiles", "tiles of 128", _plan("row_tiles", _table(90, 300, 27), 90, 128), dtypes=INDEX)]


def drawn(draw: Callable[[int], int], shape: list[int]) -> tuple[Callable[[], Tensor], int, list[int]]:
    """Sites, batch size and shape of a call in which only the shape is given."""
    batch_size, most = draw(8), 30_000 if shape is _HUGE else 1_200_000
    return scattered(draw(most), batch_size, shape), batch_size, shape


SIZED = [
    Sized("compact_indice_pairs", "submanifold", lambda draw: case(
        "compact_indice_pairs", *drawn(draw, [41, 400, 352]), padding=1, subm=True)),
    Sized("submanifold_neighbors", "sites", lambda draw: case("submanifold_neighbors", *drawn(draw, [41, 400, 352]))),
    Sized("packed_pairs", "table", lambda draw: _plan(
        "packed_pairs", _table(n := draw(2000), draw(90_000), 27), n, TILE)),
    Sized("row_tiles", "table", lambda draw: _plan("row_tiles", _table(n := draw(2000), draw(90_000), 27), n, TILE)),
]  # fmt: skip
for _operator in ("compact_indice_pairs", "sparse_neighbors", "capped_neighbors"):
    for _name, _shape in (("a grid", [11, 400, 352]), ("a large grid", [41, 1600, 1408]), ("a huge grid", _HUGE)):
        SIZED.append(Sized(_operator, f"stride 2, {_name}", lambda draw, o=_operator, s=_shape: case(  # type: ignore[misc]
            o, *drawn(draw, s), stride=2, padding=1)))  # fmt: skip

BAD_CALLS = [
    BadCall("capped_neighbors: a negative capacity", lambda: capped_neighbors(
        torch.zeros(3, 4).int(), 1, 5, 3, capacity=-1), ValueError, "capacity must be at least 0, got -1"),
    BadCall("packed_pairs: a float table", lambda: packed_pairs(torch.zeros(2, 3), 3), TypeError,
            "table must be int32, got float32"),
    BadCall("packed_pairs: a row behind the last", lambda: packed_pairs(torch.full((2, 3), 3).int(), 3), IndexError,
            r"table\[0, 0\] = 3 is neither -1 nor a row of 3"),
    BadCall("packed_pairs: too many rows", lambda: packed_pairs(torch.zeros(2, 3).int(), 2**62), ValueError,
            r"rows must be at most 2\*\*30"),
    BadCall("row_tiles: tiles of 48", lambda: row_tiles(torch.zeros(2, 3).int(), 3, 48), ValueError,
            "tile must be a power of two from 16 to 256, got 48"),
    BadCall("row_tiles: a negative number of rows", lambda: row_tiles(torch.zeros(2, 3).int(), -1), ValueError,
            "rows must be at least 0, got -1"),
    BadCall("submanifold_neighbors: even kernel", lambda: submanifold_neighbors(torch.zeros(3, 4).int(), 1, 5, 2),
            ValueError, "kernel_size must be odd"),
]  # fmt: skip

LOOKUPS = Standard(why_slower="neighbors are looked up wherever they lie in the grid: latency, not bandwidth")
STANDARD = dict.fromkeys(
    ("compact_indice_pairs", "submanifold_neighbors", "sparse_neighbors", "capped_neighbors"), LOOKUPS
)
STANDARD["row_tiles"] = Standard(why_slower="a sort of the rows by code")


def specified(operator: str, args: tuple[Any, ...], outputs: list[Tensor]) -> list[Tensor]:
    """Plans with -1 behind their counts, where anything may stand."""
    if operator not in ("packed_pairs", "row_tiles"):
        return outputs
    plan, (offsets, columns) = outputs[0].clone(), args[0].shape
    place = torch.arange(columns if operator == "packed_pairs" else offsets, device=plan.device)
    if operator == "packed_pairs":
        pairs, counts = Pairs.of(plan, offsets, columns)
        pairs.masked_fill_((place >= counts[:, None])[:, None, :], -1)
    else:
        tiles = Tiles.of(plan, offsets, columns, args[2])
        unused = place >= tiles.counts[:, None]
        tiles.offsets.masked_fill_(unused, -1)
        tiles.neighbors.masked_fill_(unused[:, :, None], -1)
    return [plan]


def work(operator: str, args: tuple[Any, ...]) -> Work:
    """Sites read once, the full tables or pairs written once; compact pairs and outputs by their usual share."""
    if operator in ("packed_pairs", "row_tiles"):  # of a plan only what its counts cover
        entries = int((args[0] >= 0).sum())
        return Work(4 * args[0].numel() + 8 * entries, args[0].numel())
    sites, kernel = args[0], args[3]
    count, volume = sites.shape[0], torch.Size(kernel).numel()
    written = {"get_indice_pairs": 2, "compact_indice_pairs": 0, "submanifold_neighbors": 1, "sparse_neighbors": 1}
    written["capped_neighbors"] = 1
    read = sites.numel() * sites.element_size()
    table = 4 * written[operator] * volume * count
    pairs = 8 * 4 * count if operator == "compact_indice_pairs" else 0  # about four pairs a site
    return Work(2 * read + table + pairs, 10 * volume * count)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    return {}
