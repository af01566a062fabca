"""Names of `spconv.pytorch.conv`: the convolutions of `triops.nn` that read a checkpoint as spconv 2.x does."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Module

from triops import nn
from triops.spconv import constants
from triops.spconv._version import NUMBERS as SPCONV_VERSION_NUMBERS
from triops.spconv.constants import FILTER_HWIO
from triops.spconv.pytorch.modules import SparseModule


class SparseConvolution(SparseModule, nn.SparseConvolution):
    """See `triops.nn.SparseConvolution`.

    Kernels of one offset and stride 1 are the exception that makes this class. spconv 2.x keeps their weight as
    [out_channels, 1, ..., in_channels] like any other, but multiplies by the same numbers laid out as
    [in_channels, out_channels] (https://github.com/traveller59/spconv/issues/450). Networks were trained with that, so
    their checkpoints mean that.

    Checkpoints of spconv 1 and of mmcv, which store [*kernel_size, in_channels, out_channels], load as well: their
    shape tells them apart. Where it cannot (kernel_size and channels all equal), or for spconv 2.0 and 2.1 with
    [*kernel_size, out_channels, in_channels], the environment variable SPCONV_SAVED_WEIGHT_LAYOUT says what they are,
    as it does for spconv: RSCK or RSKC.
    """

    @property
    def conv1x1(self) -> bool:
        """Whether the layer is a matrix product: one offset, and sites that stay."""
        return self.volume == 1 and math.prod(self.stride) == 1

    def kernel(self) -> Tensor:
        if self.conv1x1:
            return self.weight.view(self.in_channels, self.out_channels).t().reshape(self.weight_shape)
        return self.weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        # mmdetection3d puts a reader of its own into SparseModule, which turns the weights of mmcv itself
        read_elsewhere = SparseModule._load_from_state_dict is not Module._load_from_state_dict
        if isinstance(weight, Tensor) and not read_elsewhere:
            state_dict[prefix + "weight"] = self._own_layout(weight)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _own_layout(self, weight: Tensor) -> Tensor:
        """The weight of a checkpoint as [out_channels, *kernel_size, in_channels]."""
        if weight.is_quantized or not weight.is_floating_point():
            self._fail(f"weight must be a float tensor, got {weight.dtype}: triops has no quantised layers", TypeError)
        channels = self.in_channels, self.out_channels
        shapes = {
            "KRSC": self.weight_shape,
            "RSCK": [*self.kernel_size, *channels],
            "RSKC": [*self.kernel_size, *channels[::-1]],
        }
        got = list(weight.shape)
        layout = constants.SAVED_WEIGHT_LAYOUT or next((name for name, shape in shapes.items() if shape == got), "")
        if layout == "RSKC" and not constants.SAVED_WEIGHT_LAYOUT:
            # Layers with as many input as output channels would be taken for RSCK, so the user has to say it.
            self._fail(
                f"weight must have shape {shapes['KRSC']} or, of spconv 1 and mmcv, {shapes['RSCK']}, got {got}; "
                "if the checkpoint is of spconv 2.0 or 2.1, set the environment variable "
                "SPCONV_SAVED_WEIGHT_LAYOUT=RSKC"
            )
        if layout in ("", "KRSC") or shapes[layout] != got:
            return weight  # torch names the shapes that do not fit
        if self.conv1x1:  # all versions multiply by the numbers laid out as [in_channels, out_channels]
            return weight.reshape(self.weight_shape)
        return weight.movedim(-1 if layout == "RSCK" else -2, 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "conv1x1" in state:  # a member of spconv's own class
            raise TypeError(
                f"{type(self).__name__}: a whole module pickled by spconv cannot be loaded; "
                "save its state_dict with spconv, build the module anew and load that"
            )
        super().__setstate__(state)  # type: ignore[no-untyped-call]


class SubMConv1d(SparseConvolution, nn.SubMConv1d):
    """See `triops.nn.SubMConv1d`."""


class SubMConv2d(SparseConvolution, nn.SubMConv2d):
    """See `triops.nn.SubMConv2d`."""


class SubMConv3d(SparseConvolution, nn.SubMConv3d):
    """See `triops.nn.SubMConv3d`."""


class SubMConv4d(SparseConvolution, nn.SubMConv4d):
    """See `triops.nn.SubMConv4d`."""


class SparseConv1d(SparseConvolution, nn.SparseConv1d):
    """See `triops.nn.SparseConv1d`."""


class SparseConv2d(SparseConvolution, nn.SparseConv2d):
    """See `triops.nn.SparseConv2d`."""


class SparseConv3d(SparseConvolution, nn.SparseConv3d):
    """See `triops.nn.SparseConv3d`."""


class SparseConv4d(SparseConvolution, nn.SparseConv4d):
    """See `triops.nn.SparseConv4d`."""


class SparseConvTranspose1d(SparseConvolution, nn.SparseConvTranspose1d):
    """See `triops.nn.SparseConvTranspose1d`."""


class SparseConvTranspose2d(SparseConvolution, nn.SparseConvTranspose2d):
    """See `triops.nn.SparseConvTranspose2d`."""


class SparseConvTranspose3d(SparseConvolution, nn.SparseConvTranspose3d):
    """See `triops.nn.SparseConvTranspose3d`."""


class SparseConvTranspose4d(SparseConvolution, nn.SparseConvTranspose4d):
    """See `triops.nn.SparseConvTranspose4d`."""


class SparseInverseConv1d(SparseConvolution, nn.SparseInverseConv1d):
    """See `triops.nn.SparseInverseConv1d`."""


class SparseInverseConv2d(SparseConvolution, nn.SparseInverseConv2d):
    """See `triops.nn.SparseInverseConv2d`."""


class SparseInverseConv3d(SparseConvolution, nn.SparseInverseConv3d):
    """See `triops.nn.SparseInverseConv3d`."""


class SparseInverseConv4d(SparseConvolution, nn.SparseInverseConv4d):
    """See `triops.nn.SparseInverseConv4d`."""


DEFAULT_SPARSE_CONV_TYPES = {
    SubMConv1d, SubMConv2d, SubMConv3d, SubMConv4d, SparseConv1d, SparseConv2d, SparseConv3d, SparseConv4d,
    SparseInverseConv1d, SparseInverseConv2d, SparseInverseConv3d, SparseInverseConv4d, SparseConvTranspose1d,
    SparseConvTranspose2d, SparseConvTranspose3d, SparseConvTranspose4d,
}  # fmt: skip

__all__ = [
    "DEFAULT_SPARSE_CONV_TYPES",
    "FILTER_HWIO",
    "SPCONV_VERSION_NUMBERS",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
    "nullcontext",
]
