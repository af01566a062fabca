"""Names of `spconv.pytorch.constants`."""

import torch

PYTORCH_VERSION = [int(part) for part in torch.__version__.split("+")[0].split(".")[:2]]
TORCH_HAS_AMP = True


def is_amp_enabled() -> bool:
    return bool(torch.is_autocast_enabled())


__all__ = ["PYTORCH_VERSION", "TORCH_HAS_AMP", "is_amp_enabled"]
