"""Inputs of sparse_conv and sparse_conv_backward_weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from triops import scenes
from triops._activations import ACTIVATIONS, activate
from triops._check import FLOATS
from triops._dtypes import compute_dtype
from triops._sample import BadCall, Sample, Sized, Standard, Work, bytes_of
from triops.ops.rulebook import row_tiles
from triops.ops.rulebook.plans import TILE
from triops.ops.sparse_conv import Rulebook, fused_convolution, preferred_tile, sparse_conv

Make = Callable[[torch.dtype], tuple[Any, ...]]
Build = Callable[[], Rulebook]


def random_sites(count: int, batch_size: int, shape: list[int], seed: int = 0) -> Tensor:
    """Distinct sites anywhere in the grid, in random order: int32 [count, 1 + D]."""
    places = torch.Size([batch_size, *shape])
    flat = torch.randperm(places.numel(), generator=torch.Generator().manual_seed(seed))[:count]
    return torch.stack(torch.unravel_index(flat, places), 1).int()


def submanifold(
    count: int, batch_size: int, shape: list[int], kernel: int | list[int] = 3, dilation: int = 1, seed: int = 0
) -> Build:
    return lambda: Rulebook.submanifold(
        random_sites(count, batch_size, shape, seed), batch_size, shape, kernel, dilation
    )


def sparse(
    count: int, batch_size: int, shape: list[int], kernel: int | list[int] = 3, seed: int = 0, **options: Any
) -> Build:
    return lambda: Rulebook.sparse(
        random_sites(count, batch_size, shape, seed), batch_size, shape, kernel, **{"stride": 2, **options}
    )


@cache
def lidar(tile: int = TILE) -> Rulebook:
    """The submanifold case of the design documents: 248,636 sites, about 3.7 neighbors each; prepared, as layers share
    it."""
    return prepared(_lidar, tile)()


@cache
def _lidar() -> Rulebook:
    return Rulebook.submanifold(scenes.lidar_sites(248_636, (41, 1440, 1440), 4), 4, [41, 1440, 1440], 3)


@cache
def deep_layer() -> Rulebook:
    """50,000 voxels, closely packed as behind a few strided layers."""
    sites = scenes.lidar_sites(50_000, (11, 360, 360), 2, reach=0.22, roughness=0.1)
    return prepared(lambda: Rulebook.submanifold(sites, 2, [11, 360, 360], 3))()


def hand_made(*columns: list[int], rows: int) -> Build:
    """A rulebook whose `gather` has the given columns, one an output; `scatter` follows from it."""

    def build() -> Rulebook:
        gather = torch.tensor(columns, dtype=torch.int32).t().contiguous()
        scatter = torch.full((gather.shape[0], rows), -1, dtype=torch.int32)
        for k, line in enumerate(gather.tolist()):
            for output, row in enumerate(line):
                if row >= 0:
                    scatter[k, row] = output
        sites = torch.zeros(rows, 2, dtype=torch.int32), torch.zeros(len(columns), 2, dtype=torch.int32)
        return Rulebook(*sites, [1], [1], 1, [gather.shape[0]], gather, scatter)

    return build


def with_gather(book: Rulebook, gather: Tensor) -> Rulebook:
    """The same sites, with a table made by hand."""
    return Rulebook(
        book.in_indices, book.out_indices, book.in_shape, book.out_shape, book.batch_size, book.kernel_size, gather,
        None if book.mirrored else book.scatter,
    )  # fmt: skip


def convolution_arguments(
    features: Tensor, weight: Tensor, bias: Tensor | None, rulebook: Rulebook, flip: bool = False
) -> tuple[Any, ...]:
    """As `torch.ops.triops.sparse_conv` takes them."""
    t = rulebook.tables
    return (
        features, weight, bias, t.gather, t.scatter, t.mirrored, flip, t.tile, t.tiles, t.transposed_tiles, t.pairs,
        t.transposed_pairs,
    )  # fmt: skip


def prepared(build: Build, tile: int = TILE) -> Build:
    """With all plans, those of both devices, so that one sample serves both."""

    def make() -> Rulebook:
        rulebook = build().prepared(backward=True)
        t = rulebook.tables
        tiles = row_tiles(t.gather, t.inputs, tile)
        transposed = None if t.scatter is None else row_tiles(t.scatter, t.gather.shape[1], tile)
        rulebook.tables = t._replace(tile=tile, tiles=tiles, transposed_tiles=transposed)
        return rulebook

    return make


def _conv(
    build: Build, channels_in: int, channels_out: int, *, bias: bool = True, flip: bool = False, layout: str = "spconv",
    special: bool = False, seed: int = 0,
) -> Make:  # fmt: skip
    """layout "parameter": as a network's float32 parameter, whatever the features are."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        rulebook = lidar(preferred_tile(dtype, channels_in, channels_out)) if build is lidar else build()
        taps, rows = rulebook.tables.gather.shape[0], rulebook.in_indices.shape[0]
        features = torch.randn(rows, channels_in, generator=g)
        if special:  # every eleventh value is infinite or no number
            features.view(-1)[::11] = torch.tensor([float("inf"), -float("inf"), float("nan")]).repeat(rows)[
                : len(features.view(-1)[::11])
            ]
        scale = (3 * max(channels_in, 1)) ** -0.5
        if layout == "mmcv":
            weight = torch.randn(taps, channels_in, channels_out, generator=g).mul(scale).to(dtype).permute(2, 0, 1)
        else:
            weight = torch.randn(channels_out, taps, channels_in, generator=g).mul(scale).to(dtype)
        if layout == "parameter":
            weight = weight.to(compute_dtype(dtype)).unflatten(1, rulebook.kernel_size)
        if layout == "transposed":  # as the gradient of the features sees it
            weight = weight.permute(2, 1, 0)
        shift = torch.randn(channels_out, generator=g).to(dtype) if bias else None
        return convolution_arguments(features.to(dtype), weight, shift, rulebook, flip)

    return make


def _gradient(
    build: Build, channels_in: int, channels_out: int, *, flip: bool = False, wide: bool = False, seed: int = 0
) -> Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        rulebook = build()
        features = torch.randn(rulebook.in_indices.shape[0], channels_in, generator=g)
        outputs = rulebook.tables.gather.shape[1]
        grad = torch.randn(outputs, channels_out, generator=g) / max(outputs, 1) ** 0.5
        t = rulebook.tables
        return features.to(dtype), grad.to(dtype), t.gather, t.scatter, t.mirrored, flip, t.pairs, wide

    return make


def _fused(
    build: Build, channels_in: int, channels_out: int, activation: str, *, bias: bool = True, residual: bool = True
) -> Make:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        features, weight, shift, *_ = _conv(build, channels_in, channels_out, bias=bias)(dtype)
        t = build().tables
        rows = torch.randn(t.gather.shape[1], channels_out, generator=torch.Generator().manual_seed(7)).to(dtype)
        return (
            features, weight, shift, rows if residual else None, t.gather, t.tile, t.tiles, t.pairs, activation, 0.1
        )  # fmt: skip

    return make


_TINY = submanifold(20, 1, [4, 5, 6])
_STRIDED = sparse(40, 2, [5, 6, 7], padding=1)
_NO_NEIGHBORS = hand_made([-1, -1, -1], [0, -1, 1], [-1, -1, -1], rows=2)

# name, rulebook, channels in and out, scale
_CASES: list[tuple[str, Build, int, int, str]] = [
    ("submanifold 3D, 3 to 5 channels", _TINY, 3, 5, "general"),
    ("stride 2, 4 to 6 channels", _STRIDED, 4, 6, "general"),
    ("transposed, 16 to 8 channels", sparse(30, 1, [4, 5, 6], padding=1, transpose=True), 16, 8, "general"),
    ("inverse, 8 to 16 channels", lambda: _STRIDED().inverse(), 8, 16, "general"),
    ("2D, 8 sites", submanifold(8, 1, [3, 4]), 2, 3, "general"),
    ("1D, stride 2, 6 sites", sparse(6, 1, [9], padding=1), 2, 2, "general"),
    ("1D, dilation", submanifold(50, 3, [30], 5, 2), 17, 33, "general"),
    ("2D, stride and dilation", sparse(90, 2, [13, 17], stride=[2, 3], padding=2, dilation=2), 20, 12, "general"),
    ("4D", submanifold(60, 2, [3, 3, 4, 4]), 5, 7, "general"),
    ("kernel volume 1", submanifold(70, 1, [5, 6, 7], 1), 16, 16, "boundary"),
    ("kernel volume 125", submanifold(90, 1, [5, 6, 7], 5), 6, 4, "boundary"),
    ("one channel", _STRIDED, 1, 1, "boundary"),
    ("130 to 70 channels", submanifold(40, 1, [60]), 130, 70, "boundary"),
    ("one site", submanifold(1, 1, [4, 5, 6]), 8, 8, "boundary"),
    ("no sites", submanifold(0, 1, [4, 5, 6]), 8, 8, "boundary"),
    ("no outputs", sparse(1, 1, [1, 1, 1], 1, padding=0, stride=1), 4, 4, "boundary"),
    ("all vanish", lambda: Rulebook.sparse(torch.ones(3, 4, dtype=torch.int32), 2, [3, 3, 3], 1, stride=2), 4, 4,
     "boundary"),
    ("no channels in", _TINY, 0, 4, "boundary"),
    ("no channels out", _TINY, 4, 0, "boundary"),
    ("outputs without inputs", _NO_NEIGHBORS, 3, 4, "boundary"),
    ("every site", submanifold(120, 1, [4, 5, 6]), 16, 16, "boundary"),
    *((f"{n} sites", submanifold(n, 1, [6, 9, 8], seed=n), 16, 16, "boundary") for n in (63, 64, 65, 257)),
]  # fmt: skip

# A boundary is one of shapes, not of dtypes.
_DTYPES = {"general": FLOATS, "boundary": (torch.float32, torch.float16)}
# Plans, which say the same as the tables: a recording of shapes leaves them out.
_PLANS = ("tiles", "transposed_tiles", "pairs", "transposed_pairs")
DERIVED = dict.fromkeys(("sparse_conv", "sparse_conv_fused", "sparse_conv_backward_weight"), _PLANS)

SAMPLES = [
    Sample(operator, name, make(build, i, o), scale, _DTYPES[scale],  # type: ignore[arg-type]
           gradcheck=i * o <= 6 and scale == "general")
    for operator, make in (("sparse_conv", _conv), ("sparse_conv_backward_weight", _gradient))
    for name, build, i, o, scale in _CASES
]  # fmt: skip
SAMPLES += [
    Sample("sparse_conv", "reversed offsets, no bias", _conv(_TINY, 8, 16, bias=False, flip=True)),
    Sample("sparse_conv", "weight as mmcv stores it", _conv(_STRIDED, 16, 32, layout="mmcv")),
    Sample("sparse_conv", "weight as a network stores it", _conv(_STRIDED, 16, 32, layout="parameter")),
    Sample("sparse_conv", "weight as a network stores it, tiles of 128",
           _conv(prepared(submanifold(300, 1, [6, 9, 8]), 128), 8, 16, layout="parameter")),
    Sample("sparse_conv", "prepared", _conv(prepared(_STRIDED), 8, 16)),
    Sample("sparse_conv", "prepared, tiles of 128", _conv(prepared(submanifold(300, 1, [6, 9, 8]), 128), 8, 16)),
    Sample("sparse_conv_backward_weight", "prepared", _gradient(prepared(_STRIDED), 8, 16)),
    Sample("sparse_conv", "infinite features and NaN", _conv(_STRIDED, 4, 4, special=True), "boundary"),
    Sample("sparse_conv_backward_weight", "reversed offsets", _gradient(_TINY, 8, 16, flip=True)),
    Sample("sparse_conv_backward_weight", "wide", _gradient(_STRIDED, 8, 16, wide=True)),
    Sample("sparse_conv", "submanifold, 248636 sites, 16 channels", _conv(lidar, 16, 16, bias=False), "network",
           demo=True),
    Sample("sparse_conv_backward_weight", "submanifold, 248636 sites, 16 channels", _gradient(lidar, 16, 16),
           "network"),
    *(Sample("sparse_conv", f"submanifold, 248636 sites, {c} channels", _conv(lidar, c, c, bias=False), "network",
             gpu_only=True) for c in (32, 64, 128)),
    *(Sample("sparse_conv_backward_weight", f"submanifold, 248636 sites, {c} channels", _gradient(lidar, c, c),
             "network", gpu_only=True) for c in (32, 64, 128)),
    Sample("sparse_conv", "50000 voxels, 256 channels", _conv(deep_layer, 256, 256, bias=False), "network",
           gpu_only=True),
    *(Sample("sparse_conv", f"backward-data, submanifold, 248636 sites, {c} channels",
             _conv(lidar, c, c, bias=False, flip=True, layout="transposed"), "network", gpu_only=True)
      for c in (16, 32, 64, 128)),
    Sample("sparse_conv", "backward-data, 50000 voxels, 256 channels",
           _conv(deep_layer, 256, 256, bias=False, flip=True, layout="transposed"), "network", gpu_only=True),
    Sample("sparse_conv_backward_weight", "50000 voxels, 256 channels", _gradient(deep_layer, 256, 256), "network",
           gpu_only=True),
]  # fmt: skip

SAMPLES += [
    Sample("sparse_conv_fused", f"{activation}, 8 to 16 channels", _fused(_STRIDED, 8, 16, activation))
    for activation in ACTIVATIONS
]
SAMPLES += [
    Sample("sparse_conv_fused", "prepared, no residual", _fused(prepared(_TINY), 3, 5, "relu", residual=False)),
    Sample("sparse_conv_fused", "no bias", _fused(_TINY, 16, 16, "leaky_relu", bias=False)),
    Sample("sparse_conv_fused", "no sites", _fused(submanifold(0, 1, [4, 5, 6]), 8, 8, "gelu"), "boundary"),
    Sample("sparse_conv_fused", "no channels in", _fused(_TINY, 0, 4, "silu"), "boundary", (torch.float32,)),
    Sample("sparse_conv_fused", "submanifold, 248636 sites, 16 channels",
           _fused(lambda: lidar(), 16, 16, "relu", residual=False), "network"),
]  # fmt: skip


SIZED = [
    Sized("sparse_conv", "submanifold", lambda draw: _conv(submanifold(draw(3000), draw(4), [9, 20, 20]), 16, 16)),
    Sized("sparse_conv", "stride 2", lambda draw: _conv(sparse(draw(3000), draw(4), [9, 20, 20]), 16, 32)),
    Sized("sparse_conv_fused", "submanifold", lambda draw: _fused(
        submanifold(draw(3000), draw(4), [9, 20, 20]), 16, 16, "relu")),
    Sized("sparse_conv_backward_weight", "submanifold", lambda draw: _gradient(
        submanifold(draw(3000), draw(4), [9, 20, 20]), 16, 16)),
]  # fmt: skip


def _bad_calls() -> list[BadCall]:
    features, weight = torch.zeros(20, 3), torch.zeros(5, 3, 3, 3, 3)

    def bad(what: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
        def call() -> Tensor:
            arguments: Any = [_TINY() if a is Rulebook else a for a in args]
            return sparse_conv(*arguments, **options)

        return BadCall(f"sparse_conv: {what}", call, error, match)

    def broken(value: int) -> Callable[[], Tensor]:
        def call() -> Tensor:
            book = _TINY()
            gather = book.gather
            gather[3, 4] = value
            return sparse_conv(features, weight, with_gather(book, gather))

        return call

    return [
        bad("features as a list", TypeError, "features must be a Tensor, got list", [[1.0]], weight, Rulebook),
        bad("features of rank 1", ValueError, r"features must have shape \[N, Cin\]", features[0], weight, Rulebook),
        bad("too few features", ValueError, r"gather must have shape \[K, N\] with .*N = 19", features[1:], weight,
            Rulebook),
        bad("weight of another kernel", ValueError, r"weight must have shape \[Cout, 3, 3, 3, Cin\].*got \[5, 3, 3",
            features, weight[..., 0], Rulebook),
        bad("weight None", TypeError, "weight must be a Tensor, got NoneType", features, None, Rulebook),
        bad("weight of other channels", ValueError, r"weight must have shape .*Cin = 3 as in features.*got .*2\]",
            features, weight[..., :2], Rulebook),
        bad("rulebook as a tensor", TypeError, "rulebook must be a Rulebook, got Tensor", features, weight, features),
        bad("integer features", TypeError, "features must be float32.*got int64", features.long(), weight, Rulebook),
        bad("two dtypes", TypeError, "must have one dtype", features.double(), weight, Rulebook),
        bad("bias of a wrong length", ValueError, r"bias must have shape \[Cout\]", features, weight, Rulebook,
            torch.zeros(4)),
        bad("bias as a number", TypeError, "bias must be a Tensor or None, got float", features, weight, Rulebook, 1.0),
        bad("another device", ValueError, "must be on one device", features.to("meta"), weight, Rulebook),
        BadCall("sparse_conv: a row behind the last", broken(20), IndexError, r"gather\[3, 4\] = 20 is neither -1 nor"),
        BadCall("sparse_conv: a row before the first", broken(-2), IndexError, r"gather\[3, 4\] = -2"),
        BadCall("sparse_conv_fused: an unknown activation", lambda: fused_convolution(
            features, weight.flatten(1, -2), None, None, _TINY().tables, "swish"), ValueError,
            "activation must be 'none', 'relu'.*got 'swish'"),
        BadCall("sparse_conv_fused: a residual of other rows", lambda: fused_convolution(
            features, weight.flatten(1, -2), None, torch.zeros(3, 5), _TINY().tables, "relu"), ValueError,
            r"residual must have shape \[A, Cout\] with A = 20"),
        BadCall("Rulebook: even kernel", lambda: Rulebook.submanifold(torch.zeros(1, 2).int(), 1, 4, 2), ValueError,
                "kernel_size must be odd"),
    ]  # fmt: skip


BAD_CALLS = _bad_calls()

_GATHERS = "rows are gathered in no order, once for every neighbour, and products are small at few channels"
STANDARD = {
    name: Standard(error_scale="row", arithmetic="matrix", why_slower=_GATHERS)
    for name in ("sparse_conv", "sparse_conv_backward_weight", "sparse_conv_fused")
}


def work(operator: str, args: tuple[Any, ...]) -> Work:
    """Features and weight read once, the output written once; of the table only what a compact list would hold."""
    gather = args[{"sparse_conv": 3, "sparse_conv_fused": 4}.get(operator, 2)]
    pairs = int((gather >= 0).sum())
    channels_in = args[0].shape[1]
    forward = operator != "sparse_conv_backward_weight"
    channels_out = args[1].shape[0] if forward else args[1].shape[1]
    element = args[0].element_size()
    if forward:
        moved = (
            bytes_of(args[:4] if operator == "sparse_conv_fused" else args[:3])
            + gather.shape[1] * channels_out * element
        )
    else:
        moved = bytes_of(args[:2]) + gather.shape[0] * channels_in * channels_out * element
    return Work(moved + 4 * pairs, 2 * pairs * channels_in * channels_out)


def baselines(operator: str) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {
        "sparse_conv": _gather_scatter,
        "sparse_conv_fused": _gather_scatter_fused,
    }
    return {"torch": functions.get(operator, _gather_weight)}


def _gather_scatter(
    features: Tensor, weight: Tensor, bias: Tensor | None, gather: Tensor, scatter: Tensor | None, mirrored: bool,
    flip: bool, *plans: Any,
) -> Tensor:  # fmt: skip
    """What one writes in torch: gather, multiply, scatter, offset by offset."""
    out = features.new_zeros(gather.shape[1], weight.shape[0])
    weight = weight.flatten(1, -2).to(features.dtype)
    for k in range(gather.shape[0]):
        outputs = (gather[k] >= 0).nonzero()[:, 0]
        taps = weight[:, -1 - k if flip else k]
        out.index_add_(0, outputs, features[gather[k, outputs]] @ taps.t())
    return out if bias is None else out + bias


def _gather_weight(
    features: Tensor,
    grad_output: Tensor,
    gather: Tensor,
    scatter: Tensor | None,
    mirrored: bool,
    flip: bool,
    *plans: Any,
) -> Tensor:
    parts = []
    for rows in gather:
        outputs = (rows >= 0).nonzero()[:, 0]
        parts.append(grad_output[outputs].t() @ features[rows[outputs]])
    return torch.stack(parts[::-1] if flip else parts, 1)


def _gather_scatter_fused(
    features: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gather: Tensor, tile: int,
    tiles: Any, pairs: Any, activation: str, alpha: float,
) -> Tensor:  # fmt: skip
    out = _gather_scatter(features, weight, bias, gather, gather, False, False)
    return activate(out if residual is None else out + residual, activation, alpha)
