"""A network layer by layer: `MinkowskiEngine.utils.summary`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def summary(model: nn.Module, summary_input: Any) -> tuple[int, int]:
    """Print every layer's output and its parameters; return how many parameters there are, and how many learn."""
    text, counts = minkowski_summary_string(model, summary_input)
    print(text)
    return counts


def minkowski_summary_string(model: nn.Module, summary_input: Any) -> tuple[str, tuple[int, int]]:
    lines = [f"{'layer':<40} {'output':>20} {'parameters':>14}"]
    total = learning = 0

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal total, learning
        own = list(module.parameters(recurse=False))
        count = sum(p.numel() for p in own)
        total += count
        learning += sum(p.numel() for p in own if p.requires_grad)
        shapes = [list(o.shape) for o in (output if isinstance(output, (list, tuple)) else [output])]
        lines.append(f"{type(module).__name__:<40} {', '.join(map(str, shapes)):>20} {count:>14,}")

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules()
        if not isinstance(module, (nn.Sequential, nn.ModuleList))
    ]
    try:
        with torch.no_grad():
            model(summary_input)
    finally:
        for hook in hooks:
            hook.remove()
    lines.append(f"parameters: {total:,}, of which learn: {learning:,}")
    return "\n".join(lines), (total, learning)


__all__ = ["minkowski_summary_string", "summary"]
