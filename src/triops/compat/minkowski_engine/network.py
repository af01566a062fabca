"""The base that programs make their networks of: `MinkowskiEngine.MinkowskiNetwork`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class MinkowskiNetwork(nn.Module, ABC):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.D = D

    @abstractmethod
    def forward(self, x: Any) -> Any: ...


__all__ = ["MinkowskiNetwork"]
