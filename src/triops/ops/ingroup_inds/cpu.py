"""ingroup_inds on CPU: a counter per group, in one pass; groups that are far apart are numbered by a sort first.

One thread: the counters of a pass depend on everything before it, and a pass takes a few nanoseconds per element.
"""

import numpy as np
import torch

from triops._cpu.jit import jit
from triops._cpu.memory import as_numpy

SPREAD = 16  # counters per element up to which they are cheaper than a sort


def ingroup_inds(group_inds):
    groups = as_numpy(group_inds)
    out = torch.empty(len(groups), dtype=torch.int32)
    if len(groups) == 0:
        return out
    lowest, highest = int(groups.min()), int(groups.max())
    if highest - lowest < SPREAD * len(groups) + 1024:
        _count(groups, lowest, np.zeros(highest - lowest + 1, np.int32), out.numpy())
    else:
        _count_sorted(groups, np.argsort(groups, kind="stable"), out.numpy())
    return out


@jit
def _count(groups, lowest, counters, out):
    for i in range(groups.shape[0]):
        group = np.uint64(groups[i] - lowest)
        out[i] = counters[group]
        counters[group] += 1


@jit
def _count_sorted(groups, order, out):
    rank = 0
    for k in range(order.shape[0]):
        if k and groups[order[k]] != groups[order[k - 1]]:
            rank = 0
        out[order[k]] = rank
        rank += 1
