"""Whether an eager call may go straight to its kernel, or PyTorch's dispatcher has to see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad, profiler

_AUTOGRAD = torch._C.DispatchKey.AutogradOther  # excluded together with all of autograd's keys


def plain() -> bool:
    """Nothing stands between a call and its kernel: no mode, transform, tracer, dual level or profiler.

    What a call's own tensors may ask for is looked at in `Signature.key`, autograd in `Operator`. Autocast is not
    asked about: operators do not take part in it, their public functions do.
    """
    return not (
        _len_torch_dispatch_stack()  # FakeTensorMode, make_fx, FunctionalTensorMode, a user's TorchDispatchMode
        or _len_torch_function_stack()  # TorchFunctionMode, torch.set_default_device
        or _are_functorch_transforms_active()  # torch.func: vmap, grad, jvp, functionalize
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled  # which records what the dispatcher calls
        or _get_tracing_state() is not None  # torch.jit.trace
    )


def below_autograd() -> bool:
    """Inside of a kernel that the dispatcher calls: nothing is recorded, whatever grad mode says."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)


def has_tangent(args: tuple[Any, ...]) -> bool:
    """Whether forward-mode AD runs through one of the arguments."""
    return forward_ad._current_level >= 0 and any(
        isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args
    )
