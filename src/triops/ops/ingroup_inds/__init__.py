"""ingroup_inds: the running number of each element within its group."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.ingroup_inds import reference


def ingroup_inds(group_inds: Tensor) -> Tensor:
    """The number of elements of the same group that come before each element.

    Window transformers (SST, DSVT, FSD) place the voxels of a window by it. The order is stable, so the result is
    the same on every backend and in every run.

    Args:
        group_inds: int32 or int64 tensor [N]: the group of each element, any integers in any order. int32 is sorted in
            half the time on a GPU.

    Returns:
        int32 tensor [N]: 0 for the first element of each group, 1 for the second, and so on.

    Raises:
        ValueError, TypeError: on a wrong rank or dtype, or more than 2**30 elements.

    >>> import torch, triops
    >>> triops.ingroup_inds(torch.tensor([7, -3, 7, 7, -3]))
    tensor([0, 0, 1, 2, 1], dtype=torch.int32)
    """
    return _ingroup_inds(group_inds)  # type: ignore[no-any-return]


def _check_call(group_inds: Tensor) -> None:
    c = _check.Checker("ingroup_inds")
    c.shape("group_inds", group_inds, "N")
    c.dtype("group_inds", group_inds, _check.INDICES)
    if _check.too_many(group_inds.shape[0]):
        c.fail(f"group_inds must be at most 2**30 elements, since indices are int32, got {group_inds.shape[0]}")


def _fake(group_inds: Tensor) -> Tensor:
    return group_inds.new_empty(group_inds.shape, dtype=torch.int32)


_ingroup_inds = _op.define(reference.ingroup_inds, check=_check_call, fake=_fake)
