"""The activations that a sparse convolution can apply to its output."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import Tensor

from triops._activations import activate


class Activation(Enum):
    """An activation by the name and number that spconv's `act_type` has.

    >>> import torch
    >>> Activation.LeakyReLU(torch.tensor([-2.0, 3.0]), alpha=0.5)
    tensor([-1.,  3.])
    """

    None_ = 0
    ReLU = 1
    Sigmoid = 2
    LeakyReLU = 3
    GELU = 4  # spconv has neither this one nor the next
    SiLU = 5

    @property
    def operator_name(self) -> str:
        """What `triops.ops.sparse_conv` calls it."""
        return {"None_": "none", "LeakyReLU": "leaky_relu"}.get(self.name, self.name.lower())

    def __call__(self, features: Tensor, alpha: float = 0.0) -> Tensor:
        """The activation of each feature; `alpha` is the slope of LeakyReLU below 0."""
        return activate(features, self.operator_name, alpha)

    @classmethod
    def of(cls, value: Any) -> Activation:
        """The activation that a value means: one of these, or one of the same name in another library; None is none."""
        if value is None:
            return cls.None_
        found = cls.__members__.get(getattr(value, "name", ""))
        if found is None:
            raise ValueError(f"act_type must be one of {', '.join(cls.__members__)}, got {value!r}")
        return found
