"""torch's gradcheck of a function's `apply`: `MinkowskiEngine.utils.gradcheck`."""

from __future__ import annotations

from typing import Any

import torch


def gradcheck(func: Any, inputs: Any, **kwargs: Any) -> bool:
    return torch.autograd.gradcheck(lambda *args: func.apply(*args), inputs, **kwargs)


__all__ = ["gradcheck"]
