"""Checks of the values in a rulebook's tables: every entry is -1 or a row."""

from __future__ import annotations

import torch
from torch import Tensor

from triops import _check


def valid_rows(operator: str, name: str, table: Tensor, count: int) -> Tensor:
    """The table with -1 for every row outside [0, count); on a CPU, and with TRIOPS_CHECK=1, an IndexError."""
    if table.device.type == "cpu" or _check.strict():
        refuse_rows_outside(operator, name, table, count)
    return torch.where((table >= 0) & (table < count), table, -1)


def refuse_rows_outside(operator: str, name: str, table: Tensor, count: int) -> None:
    outside = ((table < -1) | (table >= count)).nonzero()
    if len(outside):
        at = outside[0].tolist()
        raise IndexError(
            f"{operator}: {name}{at} = {int(table[tuple(at)])} is neither -1 nor a row of {count} "
            f"({len(outside)} entries are so)"
        )
