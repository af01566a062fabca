"""get_indice_pairs on CPU: the pairs that the rulebook's kernels find, in rows filled up with -1."""

import math

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import in_huge_pages
from triops._cpu.threads import run
from triops.ops.rulebook.cpu import copy_sites, find_pairs


def get_indice_pairs(
    indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
):
    found = find_pairs(
        indices, batch_size, spatial_shape, kernel_size, stride, padding, dilation, out_padding, subm, transpose
    )
    volume, count = math.prod(kernel_size), indices.shape[0]
    pairs = torch.empty((volume, 2, count), dtype=torch.int32)
    in_huge_pages(pairs)
    start = np.arange(volume) * 2 * count
    flat = pairs.numpy().reshape(-1)
    if subm:
        out_indices, num = copy_sites(indices), found.write(start, start + count, flat)
    else:
        num = found.count().astype(np.int32)
        out_indices = torch.from_numpy(found.write(start, start + count, flat))
    run(_fill_tails, volume, max(1, 200_000 // max(count, 1)), num, flat, count)
    return out_indices, pairs, torch.from_numpy(num)


@jit
def _fill_tails(begin, end, num, flat, count):
    for k in range(begin, end):
        flat[2 * k * count + num[k] : (2 * k + 1) * count] = -1
        flat[(2 * k + 1) * count + num[k] : (2 * k + 2) * count] = -1
