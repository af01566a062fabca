"""Names of `spconv.test_utils`: random sparse data, grids of parameters and comparisons for tests of layers."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class TestCase(unittest.TestCase):
    """Comparisons of arrays, or of dictionaries of them."""

    def assertAllEqual(self, a: Any, b: Any) -> None:
        """Equal shapes and values; NaN equals NaN."""
        self._same_shape(a, b)
        np.testing.assert_array_equal(a, b)

    def assertAllClose(self, a: Any, b: Any, rtol: float = 1e-6, atol: float = 1e-6, msg: str = "") -> None:
        """Equal shapes, and values within `atol + rtol * abs(b)`."""
        if isinstance(a, dict) != isinstance(b, dict):
            raise ValueError(f"assertAllClose: expected two dictionaries or none, got {type(a)} and {type(b)}. {msg}")
        if not isinstance(a, dict):
            a, b = {"": a}, {"": b}
        if a.keys() != b.keys():
            self.fail(f"keys {[*a]} and {[*b]}. {msg}")
        for key in a:
            self._same_shape(a[key], b[key], f"{key} {msg}")
            np.testing.assert_allclose(a[key], b[key], rtol, atol, err_msg=f"{key} {msg}")

    def _same_shape(self, a: Any, b: Any, msg: str = "") -> None:
        if np.shape(a) != np.shape(b):
            self.fail(f"shapes {np.shape(a)} and {np.shape(b)}. {msg}")


def params_grid(*params: Sequence[Any]) -> list[list[Any]]:
    """Every combination of one value of each sequence; the last changes fastest.

    >>> params_grid([1, 2], "ab")
    [[1, 'a'], [1, 'b'], [2, 'a'], [2, 'b']]
    """
    return [list(values) for values in itertools.product(*params)]


def generate_sparse_data(
    shape: Sequence[int], num_points: Sequence[int], num_channels: int, integer: bool = False,
    data_range: Sequence[float] = (-1, 1), with_dense: bool = True, dtype: DTypeLike = np.float32, shape_scale: int = 1,
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Random sites and features, the same as spconv's for the same `np.random.seed`.

    Args:
        shape: the grid.
        num_points: number of sites of each batch element, at most as many as the grid has.
        num_channels: channels of the features.
        integer: whole numbers instead of uniformly distributed ones.
        data_range: the features' bounds, the upper one excluded.
        with_dense: also return the features as a dense array.
        dtype: of the features.
        shape_scale: sites are multiples of it.

    Returns:
        "features" [N, num_channels], "indices" int32 [N, D + 1] with the batch element behind the position, and
        "features_dense" [B, num_channels, *shape].
    """
    axes = np.meshgrid(*[np.arange(size // shape_scale) for size in shape])
    sites = np.stack(axes, axis=-1).reshape(-1, len(shape)) * shape_scale
    chosen = []
    for element, number in enumerate(num_points):
        np.random.shuffle(sites)
        chosen.append(np.pad(sites[:number], ((0, 0), (0, 1)), constant_values=element))
    indices = np.concatenate(chosen)
    draw: Any = np.random.randint if integer else np.random.uniform
    features = draw(*data_range, size=(int(np.sum(num_points)), num_channels)).astype(dtype)
    made = {"features": features, "indices": indices.astype(np.int32)}
    if with_dense:
        dense = np.zeros((len(num_points), *shape, num_channels), dtype)
        dense[(indices[:, -1], *indices[:, :-1].T)] = features
        made["features_dense"] = np.ascontiguousarray(np.moveaxis(dense, -1, 1))
    return made
