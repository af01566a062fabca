"""Names of `spconv.pytorch.conv`: the convolutions of `triops.nn` that read a checkpoint as spconv 2.x does."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import triops.spconv.cumm.tensorview as tv
from triops import nn
from triops._dtypes import autocast_dtype
from triops.nn.activation import Activation
from triops.nn.sparse_tensor import SparseConvTensor
from triops.ops.rulebook.geometry import Ints
from triops.spconv import constants
from triops.spconv._version import NUMBERS as SPCONV_VERSION_NUMBERS
from triops.spconv.constants import FILTER_HWIO
from triops.spconv.core import ConvAlgo
from triops.spconv.pytorch.layer import Layer
from triops.spconv.pytorch.modules import SparseModule


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("SparseConvolution: spconv's layers have no second derivative; those of triops.nn have")


def _once(grad: Tensor) -> Tensor | None:
    """A hook: where a graph of the gradient is made, it ends here."""
    return _Once.apply(grad) if torch.is_grad_enabled() else None  # type: ignore[no-untyped-call]


class SparseConvolution(Layer, nn.SparseConvolution):
    """See `triops.nn.SparseConvolution` and `Layer`. As in spconv, there is no second derivative; in evaluation mode a
    layer stays out of autocast and takes `add_input` with `algo=ConvAlgo.Native` alone.

    Kernels of one offset and stride 1 are the exception that makes this class. spconv 2.x keeps their weight as
    [out_channels, 1, ..., in_channels] like any other, but multiplies by the same numbers laid out as
    [in_channels, out_channels] (https://github.com/traveller59/spconv/issues/450). Networks were trained with that, so
    their checkpoints mean that.

    Checkpoints of spconv 1 and of mmcv, which store `[*kernel_size, in_channels, out_channels]`, load as well: their
    shape tells them apart. Where it cannot (kernel_size and channels all equal), or for spconv 2.0 and 2.1 with
    `[*kernel_size, out_channels, in_channels]`, the environment variable SPCONV_SAVED_WEIGHT_LAYOUT says what they
    are, as it does for spconv: RSCK or RSKC.
    """

    RECORDED_AS = "SparseConvolution"
    WINDOW = (*Layer.WINDOW, "output_padding")

    @property
    def conv1x1(self) -> bool:
        """Whether the layer is a matrix product: one offset, and sites that stay."""
        return self.volume == 1 and (self.subm or math.prod(self.stride) == 1)

    def _check_window(self) -> None:
        if self.conv1x1 and not self.subm and any(self.padding):
            self._fail(f"padding must be 0 with a kernel of one offset, got {self.padding}")

    def forward(self, input: SparseConvTensor, add_input: SparseConvTensor | None = None) -> SparseConvTensor:
        if self.conv1x1 and not self.inverse:  # torch's own product of matrices
            return super().forward(input, add_input)
        self._check_call(input)
        if add_input is not None and not self.training and self.algo is not ConvAlgo.Native:
            self._fail("add_input must be None in evaluation mode, unless the layer has algo=ConvAlgo.Native")
        features, begun = input.features, self._begun(input)
        if self.training or autocast_dtype(features) == features.dtype or features.dtype != self.weight.dtype:
            output = super().forward(input, add_input)
        else:
            with torch.autocast(features.device.type, enabled=False):
                output = super().forward(input, add_input)
        self._done(input, output, begun)
        if output.features.requires_grad and not torch.compiler.is_compiling():
            output.features.register_hook(_once)
        return self._checked(output)

    def _pointwise(self, features: Tensor) -> Tensor:
        output = torch.mm(features, self.weight.view(self.in_channels, self.out_channels))
        return output if self.bias is None else output.add_(self.bias)

    def _recorded_parameters(self, input: SparseConvTensor) -> dict[str, Any]:
        more = {"subm": self.subm, "transposed": self.transposed, "input_channels": self.in_channels}
        return {**super()._recorded_parameters(input), **more, "out_channels": self.out_channels}

    def extra_repr(self) -> str:
        window, _, algo = super().extra_repr().rpartition(", ")
        bias = "" if self.bias is not None else ", bias=False"
        act = "" if self.act_type is Activation.None_ else f", act={self.act_type}"
        return f"{self.in_channels}, {self.out_channels}, {window}{bias}, {algo}{act}"

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


class _Transpose(SparseConvolution):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
        dilation: Ints = 1, groups: int = 1, bias: bool = True, indice_key: str | None = None, algo: Any = None,
        fp32_accum: bool | None = None, record_voxel_count: bool = False, large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        arguments: Any = (  # without nn's output_padding, which spconv's layers do not take
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, indice_key, algo,
            fp32_accum, record_voxel_count, large_kernel_fast_algo, name,
        )  # fmt: skip
        super().__init__(*arguments)


class SparseConvTranspose1d(_Transpose, nn.SparseConvTranspose1d):
    """See `triops.nn.SparseConvTranspose1d`."""


class SparseConvTranspose2d(_Transpose, nn.SparseConvTranspose2d):
    """See `triops.nn.SparseConvTranspose2d`."""


class SparseConvTranspose3d(_Transpose, nn.SparseConvTranspose3d):
    """See `triops.nn.SparseConvTranspose3d`."""


class SparseConvTranspose4d(_Transpose, nn.SparseConvTranspose4d):
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
    "tv",
]
