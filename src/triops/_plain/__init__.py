"""Functions that need no kernel of their own: vectorised torch, on any device and in any float dtype.

Autograd differentiates them. Half types are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triops._dtypes import compute_dtype


def wide(tensor: Tensor) -> Tensor:
    """A float tensor in the dtype that it is computed in."""
    return tensor.to(compute_dtype(tensor.dtype))


def gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient of each of the tensors behind `function(*tensors)`, also where gradients are switched off."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        output = function(*leaves)
        return torch.autograd.grad(output, leaves, grad_output.to(output.dtype))
