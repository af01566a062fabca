"""Names of `spconv.pytorch.ops`: the shapes of outputs."""

from collections.abc import Sequence

from triops.ops.get_indice_pairs import sparse_output_shape
from triops.spconv.core import ConvAlgo


def get_conv_output_size(
    input_size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    """See `triops.sparse_output_shape`."""
    return sparse_output_shape(input_size, kernel_size, stride, padding, dilation)


def get_deconv_output_size(
    input_size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], output_padding: Sequence[int],
) -> list[int]:  # fmt: skip
    """See `triops.sparse_output_shape` with `transpose=True`."""
    return sparse_output_shape(input_size, kernel_size, stride, padding, dilation, output_padding, transpose=True)


__all__ = ["ConvAlgo", "get_conv_output_size", "get_deconv_output_size"]
