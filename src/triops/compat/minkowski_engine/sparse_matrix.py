"""Products with a sparse matrix: `MinkowskiEngine.sparse_matrix_functions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import triops
from triops.compat.minkowski_engine.rows import reduced


def spmm(
    rows: Tensor, cols: Tensor, vals: Tensor, size: Sequence[int], mat: Tensor, is_sorted: bool = False,
    cuda_spmm_alg: int = 1,
) -> Tensor:  # fmt: skip
    """The matrix of size `size` that has `vals` at `rows` and `cols`, times `mat`. Differentiable in `mat`.

    >>> import torch
    >>> from triops.compat.minkowski_engine import spmm
    >>> spmm(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), torch.ones(3), [2, 2], torch.tensor([[1.0], [10.0]]))
    tensor([[11.],
            [10.]])
    """
    taken = triops.gather_points(mat, cols.long())
    return reduced(taken * vals[:, None], rows.long(), int(size[0]), "sum")


def spmm_average(rows: Tensor, cols: Tensor, size: Sequence[int], mat: Tensor, cuda_spmm_alg: int = 1) -> Tensor:
    """The mean of the rows `cols` of `mat` that go to each of `rows`."""
    return reduced(triops.gather_points(mat, cols.long()), rows.long(), int(size[0]), "mean")


class MinkowskiSPMMFunction:
    @staticmethod
    def apply(
        rows: Tensor, cols: Tensor, vals: Tensor, size: Sequence[int], mat: Tensor, cuda_spmm_alg: int = 1
    ) -> Tensor:
        return spmm(rows, cols, vals, size, mat)


class MinkowskiSPMMAverageFunction:
    @staticmethod
    def apply(rows: Tensor, cols: Tensor, size: Sequence[int], mat: Tensor, cuda_spmm_alg: Any = 1) -> Tensor:
        return spmm_average(rows, cols, size, mat)


__all__ = ["MinkowskiSPMMAverageFunction", "MinkowskiSPMMFunction", "spmm", "spmm_average"]
