"""Names of `spconv.pytorch.hash`: a table from integers to numbers."""

from __future__ import annotations

import torch
from torch import Tensor


class HashTable:
    """A table from int32 or int64 keys to 32- or 64-bit values, on any device.

    Kept as sorted keys, so that keys always come in ascending order. `max_size` is taken and not needed: the table
    grows.

    >>> import torch
    >>> table = HashTable(torch.device("cpu"), torch.int64, torch.float32)
    >>> table.insert(torch.tensor([7, 3]), torch.tensor([0.5, 1.5]))
    >>> table.query(torch.tensor([3, 4, 7]))
    (tensor([1.5000, 0.0000, 0.5000]), tensor([False,  True, False]))
    """

    def __init__(
        self, device: torch.device | str, key_dtype: torch.dtype, value_dtype: torch.dtype, max_size: int = -1
    ) -> None:
        if key_dtype not in (torch.int32, torch.int64):
            raise TypeError(f"HashTable: key_dtype must be int32 or int64, got {key_dtype}")
        self.device = torch.device(device)
        self.is_cpu = self.device.type == "cpu"
        self.key_dtype = key_dtype
        self.value_dtype = value_dtype
        self.max_size = max_size
        self._keys = torch.empty(0, dtype=key_dtype, device=device)
        self._values = torch.empty(0, dtype=value_dtype, device=device)

    def insert(self, keys: Tensor, values: Tensor | None = None) -> None:
        """Put keys [N] with their values [N] in, 0 if there are none. Of equal keys the last one stays."""
        given = keys.new_zeros(keys.shape, dtype=self.value_dtype) if values is None else values
        # a stable sort that begins with the newest: the first of equal keys is the last one inserted
        joined, order = torch.cat([keys.to(self.key_dtype).flip(0), self._keys]).sort(stable=True)
        first = torch.ones_like(joined, dtype=torch.bool)
        first[1:] = joined[1:] != joined[:-1]
        self._keys = joined[first]
        self._values = torch.cat([given.to(self.value_dtype).flip(0), self._values])[order[first]]

    def query(self, keys: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The values of keys [N], written to `values` if given, and bool [N]: whether a key is missing (then 0)."""
        place, missing = self._find(keys)
        found = self._values.new_zeros(keys.shape)
        found[~missing] = self._values[place[~missing]]
        return (found if values is None else values.copy_(found)), missing

    def insert_exist_keys(self, keys: Tensor, values: Tensor) -> Tensor:
        """Change the values of keys that are there; uint8 [N]: 1 where a key is missing."""
        place, missing = self._find(keys)
        self._values[place[~missing]] = values[~missing].to(self.value_dtype)
        return missing.to(torch.uint8)

    def assign_arange_(self) -> Tensor:
        """Number the keys from 0 in ascending order; returns their count [1]."""
        self._values = torch.arange(len(self._keys), dtype=self.value_dtype, device=self.device)
        return self._count()

    def items(self, max_size: int = -1) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and their count [1]."""
        end = len(self._keys) if max_size < 0 else max_size
        return self._keys[:end].clone(), self._values[:end].clone(), self._count().clamp(max=end)

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        wanted = keys.to(self.key_dtype)
        place = torch.searchsorted(self._keys, wanted)
        missing = torch.ones_like(wanted, dtype=torch.bool)
        inside = place < len(self._keys)
        missing[inside] = self._keys[place[inside]] != wanted[inside]
        return place, missing

    def _count(self) -> Tensor:
        dtype = torch.int64 if self.is_cpu else self.key_dtype
        return torch.tensor([len(self._keys)], dtype=dtype, device=self.device)


__all__ = ["HashTable"]
