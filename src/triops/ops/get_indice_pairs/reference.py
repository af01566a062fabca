"""The specification of get_indice_pairs."""

import torch
from torch import Tensor

from triops.ops.rulebook.reference import find_pairs


def get_indice_pairs(
    indices: Tensor, batch_size: int, spatial_shape: list[int], kernel_size: list[int], stride: list[int],
    padding: list[int], dilation: list[int], out_padding: list[int], subm: bool, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """indices [L, 1 + D] -> out_indices [A, 1 + D], indice_pairs int32 [K, 2, L] (-1 behind), indice_num int32 [K]."""
    out_indices, pairs = find_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
    )
    indice_pairs = indices.new_full((len(pairs), 2, len(indices)), -1, dtype=torch.int32)
    for k, (inputs, outputs) in enumerate(pairs):
        indice_pairs[k, 0, : len(inputs)] = inputs.int()
        indice_pairs[k, 1, : len(outputs)] = outputs.int()
    indice_num = indices.new_tensor([len(inputs) for inputs, _ in pairs], dtype=torch.int32)
    return out_indices, indice_pairs, indice_num
