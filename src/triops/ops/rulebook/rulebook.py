"""The rulebook of a sparse convolution: which input row meets which output row, under which kernel offset."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from triops.ops.rulebook import sparse_neighbors, submanifold_neighbors
from triops.ops.rulebook.geometry import as_list, output_shape

Ints = int | Sequence[int]


class Rulebook:
    """Sites and neighbour tables that convolutions and poolings share; make one and use it for every layer it fits.

    Attributes:
        in_indices [N, 1 + D], out_indices [A, 1 + D]: batch and position of the input and output sites.
        in_shape, out_shape: the spatial shapes that they live in.
        batch_size, kernel_size: as given, the kernel size one integer an axis.
        gather int32 [K, A]: the input row that meets output row o under offset k, or -1.
        scatter int32 [K, N]: the output row that input row i meets, or -1.
        mirrored: True where scatter is gather.flip(0), as in every submanifold convolution.
    """

    def __init__(
        self, in_indices: Tensor, out_indices: Tensor, in_shape: list[int], out_shape: list[int], batch_size: int,
        kernel_size: list[int], gather: Tensor, scatter: Tensor | None,
    ) -> None:  # fmt: skip
        """Without `scatter` the rulebook is mirrored: its inputs are its outputs."""
        self.in_indices, self.out_indices = in_indices, out_indices
        self.in_shape, self.out_shape = in_shape, out_shape
        self.batch_size, self.kernel_size = batch_size, kernel_size
        self.gather, self._scatter = gather, scatter
        self.mirrored = scatter is None

    @classmethod
    def submanifold(
        cls, indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, dilation: Ints = 1
    ) -> Rulebook:
        """The outputs are the inputs; see `triops.get_indice_pairs` with `subm=True`.

        >>> import torch
        >>> from triops.ops.rulebook.rulebook import Rulebook
        >>> Rulebook.submanifold(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3).gather.tolist()
        [[-1, 0], [0, 1], [1, -1]]
        """
        gather = submanifold_neighbors(indices, batch_size, spatial_shape, kernel_size, dilation)
        axes = indices.shape[1] - 1
        shape = as_list("Rulebook", "spatial_shape", spatial_shape, axes)
        return cls(
            indices, indices, shape, shape, batch_size, as_list("Rulebook", "kernel_size", kernel_size, axes), gather,
            None,
        )  # fmt: skip

    @classmethod
    def sparse(
        cls, indices: Tensor, batch_size: int, spatial_shape: Ints, kernel_size: Ints, stride: Ints = 1,
        padding: Ints = 0, dilation: Ints = 1, out_padding: Ints = 0, transpose: bool = False,
    ) -> Rulebook:  # fmt: skip
        """Every site that an input reaches is an output; see `triops.get_indice_pairs`. On a GPU this waits once,
        for the number of outputs.

        >>> import torch
        >>> from triops.ops.rulebook.rulebook import Rulebook
        >>> Rulebook.sparse(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3, stride=2).gather.tolist()
        [[-1, 0], [-1, 1], [0, -1]]
        """
        out_indices, gather, scatter = sparse_neighbors(
            indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, transpose
        )
        axes = indices.shape[1] - 1
        shape, kernel, step, pad, gap, extra = (
            as_list("Rulebook", name, value, axes)
            for name, value in (
                ("spatial_shape", spatial_shape), ("kernel_size", kernel_size), ("stride", stride),
                ("padding", padding), ("dilation", dilation), ("out_padding", out_padding),
            )
        )  # fmt: skip
        out_shape = output_shape(shape, kernel, step, pad, gap, extra, False, transpose)
        return cls(indices, out_indices, shape, out_shape, batch_size, kernel, gather, scatter)

    @property
    def scatter(self) -> Tensor:
        if self._scatter is None:
            self._scatter = self.gather.flip(0)
        return self._scatter

    @property
    def transposed_table(self) -> Tensor:
        """What the operators take for `scatter`: for a mirrored rulebook the table itself, which spares a copy."""
        return self.gather if self.mirrored else self.scatter

    def inverse(self) -> Rulebook:
        """The rulebook of the inverse convolution, from the outputs back to the inputs. Shares all tensors.

        >>> import torch
        >>> from triops.ops.rulebook.rulebook import Rulebook
        >>> down = Rulebook.sparse(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3, stride=2)
        >>> down.inverse().out_indices.tolist()
        [[0, 2], [0, 3]]
        """
        return Rulebook(
            self.out_indices, self.in_indices, self.out_shape, self.in_shape, self.batch_size, self.kernel_size,
            self.scatter, self.gather,
        )  # fmt: skip

    def __repr__(self) -> str:
        kind = "submanifold" if self.mirrored else "sparse"
        return (
            f"<{kind} rulebook, kernel {self.kernel_size}, {self.in_indices.shape[0]} sites in {self.in_shape} -> "
            f"{self.out_indices.shape[0]} in {self.out_shape}>"
        )


def check_rulebook(operator: str, rulebook: object) -> None:
    if not isinstance(rulebook, Rulebook):
        raise TypeError(f"{operator}: rulebook must be a Rulebook, got {type(rulebook).__name__}")


__all__ = ["Rulebook", "check_rulebook"]
