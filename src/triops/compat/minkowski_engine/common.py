"""What arguments of layers are made into: `MinkowskiEngine.MinkowskiCommon`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor, nn

StrideType = Union[int, Sequence[int], np.ndarray, torch.IntTensor]  # noqa: UP007 - as programs import it


class MinkowskiModuleBase(nn.Module):
    """The base of the layers, by which programs know them."""


def convert_to_int_list(arg: Any, dimension: int) -> list[int]:
    """One integer per axis, from one for all of them or a sequence, an array or a tensor of them."""
    if isinstance(arg, (Sequence, np.ndarray, Tensor)) and not isinstance(arg, str):
        found = [int(i) for i in arg]
    elif isinstance(arg, (int, float, np.number)):
        found = [int(arg)] * dimension
    else:
        raise ValueError(f"MinkowskiEngine: expected an integer or one per axis, got {arg!r}")
    if len(found) != dimension:
        raise ValueError(f"MinkowskiEngine: expected an integer or one for each of {dimension} axes, got {arg!r}")
    return found


def convert_to_int_tensor(arg: Any, dimension: int) -> Tensor:
    """`convert_to_int_list` as an int32 tensor."""
    return torch.tensor(convert_to_int_list(arg, dimension), dtype=torch.int32)


def get_minkowski_function(name: str, variable: Tensor) -> Any:
    """A function of the compiled module, which is not there; programs import this beside other names."""
    raise NotImplementedError(f"MinkowskiEngineBackend._C.{name}{get_postfix(variable)}: triops does not have it")


def get_postfix(tensor: Tensor) -> str:
    return "GPU" if tensor.is_cuda else "CPU"
