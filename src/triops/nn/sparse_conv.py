"""Sparse convolutions as modules: submanifold, strided, transposed and inverse, in one to four dimensions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triops import _check
from triops._dtypes import autocast, autocast_dtype
from triops.nn._window import Window
from triops.nn.activation import Activation
from triops.nn.sparse_tensor import SAME_SITES, SparseConvTensor, equal_sites
from triops.ops.rulebook import Rulebook
from triops.ops.rulebook.geometry import MAX_EXTENT, Ints
from triops.ops.sparse_conv import fused_convolution, preferred_tile, sparse_conv


class SparseConvolution(Window):
    """The base of all sparse convolutions; see `triops.sparse_conv`.

    Args:
        ndim: number of spatial dimensions.
        in_channels, out_channels: channels of the features.
        kernel_size, stride, padding, dilation, output_padding: an integer, or one for each axis.
        groups: must be 1.
        bias: whether to add a learned bias.
        subm: a submanifold convolution: the outputs are the inputs' sites, whatever the padding.
        transposed: a transposed convolution: every input site makes all the output sites that its window reaches.
        inverse: undoes the change of sites of the layer that left its rulebook under `indice_key`.
        indice_key: the name under which the rulebook is left for later layers, and looked for. A layer finds it only
            where its geometry and input fit, else it says what differs.
        algo, fp32_accum, large_kernel_fast_algo: taken for the sake of programs written for spconv, without effect:
            there is one algorithm, and it accumulates in float32 (float64 for float64).
        record_voxel_count: keep the largest number of output sites seen in a buffer.
        act_type, act_alpha: an activation behind the sum of convolution, bias and `add_input`, and its slope where it
            has one; see `Activation`.
        act_beta: taken for the sake of programs written for spconv, without effect.
        name: what errors call the layer.

    `weight` is `[out_channels, *kernel_size, in_channels]`, `bias` [out_channels]: the layout of spconv 2's
    checkpoints. Under autocast, features, weight and bias take autocast's dtype, unless they are float64. No input
    sites, or none left, give no output sites.
    """

    def __init__(
        self, ndim: int, in_channels: int, out_channels: int, kernel_size: Ints = 3, stride: Ints = 1,
        padding: Ints = 0, dilation: Ints = 1, groups: int = 1, bias: bool = True, subm: bool = False,
        output_padding: Ints = 0, transposed: bool = False, inverse: bool = False, indice_key: str | None = None,
        algo: Any = None, fp32_accum: bool | None = None, record_voxel_count: bool = False,
        act_type: Any = Activation.None_, act_alpha: float = 0, act_beta: float = 0,
        large_kernel_fast_algo: bool = False, name: str | None = None, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        inverse = _check.Checker(type(self).__name__).flag("inverse", inverse)
        super().__init__(
            ndim, kernel_size, stride, padding, dilation, output_padding, subm, transposed, indice_key,
            False if inverse else record_voxel_count, name,
        )  # fmt: skip
        check = _check.Checker(self.label)
        if check.integer("groups", groups) != 1:
            self._fail(f"groups must be 1, got {groups}")
        in_channels = check.integer("in_channels", in_channels, 1, MAX_EXTENT)
        out_channels = check.integer("out_channels", out_channels, 1, MAX_EXTENT)
        bias = check.flag("bias", bias)
        if self.subm + self.transposed + inverse > 1:
            self._fail("at most one of subm, transposed and inverse may be True")
        if any(p >= max(s, d) for p, s, d in zip(self.output_padding, self.stride, self.dilation, strict=True)) and any(
            self.output_padding
        ):
            self._fail(f"output_padding must be smaller than stride or dilation, got {self.output_padding}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.groups = groups
        self.inverse = inverse
        self.algo = algo
        self.fp32_accum = fp32_accum
        self.act_type = Activation.of(act_type)
        self.act_alpha = act_alpha
        self.act_beta = act_beta
        self.weight = nn.Parameter(torch.empty(self.weight_shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @property
    def weight_shape(self) -> list[int]:
        """The shape of the parameter `weight`; a subclass may store it otherwise."""
        return [self.out_channels, *self.kernel_size, self.in_channels]

    def kernel(self) -> Tensor:
        """`weight` as [out_channels, *kernel_size, in_channels], however it is stored."""
        return self.weight

    def reset_parameters(self) -> None:
        fan_in = self.in_channels * self.volume
        bound = math.sqrt(3.0) * (nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(fan_in))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def is_inverseable(self) -> bool:
        """Whether an inverse convolution can find this layer's rulebook."""
        return self.indice_key is not None and not self.subm

    def forward(self, input: SparseConvTensor, add_input: SparseConvTensor | None = None) -> SparseConvTensor:
        """The convolved tensor; `add_input`, of the same sites, is added to it before the activation."""
        self._check_input(input)
        features = input.features
        if features.shape[1] != self.in_channels:
            self._fail(f"input must have {self.in_channels} channels, got {features.shape[1]}")
        if self._keeps_sites():  # every site meets itself alone
            self._check_add_input(add_input, input.indices)
            output = input.replace_feature(self._pointwise(features))
            if self.indice_key is not None and not self.subm:  # an inverse convolution may ask for the way back
                same = Rulebook.submanifold(input.indices, input.batch_size, input.spatial_shape, self.kernel_size)
                output.indice_dict = self._passed_on(input, same)
        else:
            weight = self.kernel()
            differentiated = torch.is_grad_enabled() and (
                weight.requires_grad or features.requires_grad or (add_input is not None)
                or (self.bias is not None and self.bias.requires_grad)
            )  # fmt: skip
            tile = preferred_tile(autocast_dtype(features), self.in_channels, self.out_channels)
            made, rulebook = self._rulebooks(input, lambda found: found.prepared(backward=differentiated, tile=tile))
            if self.subm or torch.is_grad_enabled():  # else no layer behind this one reads its plans: let them go
                made = rulebook
            self._check_add_input(add_input, made.out_indices)
            if not differentiated and (add_input is not None or self.act_type is not Activation.None_):
                return self._output(input, self._fused(features, weight, rulebook, add_input), made)
            output = self._output(input, sparse_conv(features, weight, rulebook, self.bias), made)
        if add_input is not None:
            output = output + add_input
        if self.act_type is not Activation.None_:
            output = output.replace_feature(self.act_type(output.features, self.act_alpha))
        return output

    if TYPE_CHECKING:
        __call__ = forward

    def _check_add_input(self, add_input: SparseConvTensor | None, sites: Tensor) -> None:
        if add_input is not None and not equal_sites(add_input.indices, sites):
            self._fail(f"add_input and the output must have {SAME_SITES}")

    def _pointwise(self, features: Tensor) -> Tensor:
        """The layer where every site meets itself alone: a product of matrices."""
        return F.linear(features, self.kernel().flatten(1), self.bias)

    def _fused(
        self, features: Tensor, weight: Tensor, rulebook: Rulebook, add_input: SparseConvTensor | None
    ) -> Tensor:
        """Convolution, sum and activation as one operator, where no gradient is asked for."""
        return fused_convolution(
            autocast(features), autocast(weight.flatten(1, -2)), None if self.bias is None else autocast(self.bias),
            None if add_input is None else autocast(add_input.features), rulebook.tables, self.act_type.operator_name,
            float(self.act_alpha),
        )  # fmt: skip

    def _keeps_sites(self) -> bool:
        """A kernel of one offset that reaches no other site: the outputs are the inputs' rows, in their order."""
        alone = self.volume == 1 and not self.inverse
        return alone and (self.subm or (set(self.stride) == {1} and not any(self.padding + self.output_padding)))

    def extra_repr(self) -> str:
        without_bias = ", bias=False" if self.bias is None else ""
        activation = "" if self.act_type is Activation.None_ else f", act_type={self.act_type}"
        return f"{self.in_channels}, {self.out_channels}, {super().extra_repr()}{without_bias}{activation}"


class KernelFirstWeight(SparseConvolution):
    """A convolution whose `weight` is stored as `[*kernel_size, in_channels, out_channels]`, as mmcv and spconv 1 do.

    >>> class SubMConv3dOfMmcv(KernelFirstWeight, SubMConv3d): pass
    >>> SubMConv3dOfMmcv(4, 8, 3).weight.shape
    torch.Size([3, 3, 3, 4, 8])
    """

    @property
    def weight_shape(self) -> list[int]:
        return [*self.kernel_size, self.in_channels, self.out_channels]

    def kernel(self) -> Tensor:
        return self.weight.movedim(-1, 0)


class _Fixed(SparseConvolution):
    """A convolution of a fixed number of dimensions: `DIMENSIONS`."""

    DIMENSIONS = 0


class _SubMConv(_Fixed):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
        dilation: Ints = 1, groups: int = 1, bias: bool = True, indice_key: str | None = None, algo: Any = None,
        fp32_accum: bool | None = None, large_kernel_fast_algo: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            self.DIMENSIONS, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            subm=True, indice_key=indice_key, algo=algo, fp32_accum=fp32_accum, name=name,
        )  # fmt: skip


class _SparseConv(_Fixed):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
        dilation: Ints = 1, groups: int = 1, bias: bool = True, indice_key: str | None = None, algo: Any = None,
        fp32_accum: bool | None = None, record_voxel_count: bool = False, large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            self.DIMENSIONS, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            indice_key=indice_key, algo=algo, fp32_accum=fp32_accum, record_voxel_count=record_voxel_count, name=name,
        )  # fmt: skip


class _SparseConvTranspose(_Fixed):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
        dilation: Ints = 1, groups: int = 1, bias: bool = True, indice_key: str | None = None, algo: Any = None,
        fp32_accum: bool | None = None, record_voxel_count: bool = False, large_kernel_fast_algo: bool = False,
        name: str | None = None, output_padding: Ints = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            self.DIMENSIONS, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            output_padding=output_padding, transposed=True, indice_key=indice_key, algo=algo, fp32_accum=fp32_accum,
            record_voxel_count=record_voxel_count, name=name,
        )  # fmt: skip


class _SparseInverseConv(_Fixed):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Ints, indice_key: str | None, bias: bool = True,
        algo: Any = None, fp32_accum: bool | None = None, large_kernel_fast_algo: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            self.DIMENSIONS, in_channels, out_channels, kernel_size, bias=bias, inverse=True, indice_key=indice_key,
            algo=algo, fp32_accum=fp32_accum, name=name,
        )  # fmt: skip


class SubMConv1d(_SubMConv):
    """Submanifold convolution on a line; see `SparseConvolution`."""

    DIMENSIONS = 1


class SubMConv2d(_SubMConv):
    """Submanifold convolution in the plane; see `SparseConvolution`."""

    DIMENSIONS = 2


class SubMConv3d(_SubMConv):
    """Submanifold convolution in space: the outputs are the inputs' sites; see `SparseConvolution`.

    >>> import torch
    >>> from triops.nn import SparseConvTensor
    >>> sites = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    >>> SubMConv3d(4, 8, 3, indice_key="subm1")(SparseConvTensor(torch.rand(2, 4), sites, [5, 5, 5], 1))
    SparseConvTensor(2 sites, 8 channels, spatial_shape=[5, 5, 5], batch_size=1)
    """

    DIMENSIONS = 3


class SubMConv4d(_SubMConv):
    """Submanifold convolution in four dimensions; see `SparseConvolution`."""

    DIMENSIONS = 4


class SparseConv1d(_SparseConv):
    """Sparse convolution on a line; see `SparseConvolution`."""

    DIMENSIONS = 1


class SparseConv2d(_SparseConv):
    """Sparse convolution in the plane; see `SparseConvolution`."""

    DIMENSIONS = 2


class SparseConv3d(_SparseConv):
    """Sparse convolution in space: an output site wherever a window holds an input site; see `SparseConvolution`.

    >>> import torch
    >>> from triops.nn import SparseConvTensor
    >>> sites = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    >>> SparseConv3d(4, 8, 3, stride=2, padding=1)(SparseConvTensor(torch.rand(2, 4), sites, [5, 5, 5], 1))
    SparseConvTensor(8 sites, 8 channels, spatial_shape=[3, 3, 3], batch_size=1)
    """

    DIMENSIONS = 3


class SparseConv4d(_SparseConv):
    """Sparse convolution in four dimensions; see `SparseConvolution`."""

    DIMENSIONS = 4


class SparseConvTranspose1d(_SparseConvTranspose):
    """Transposed sparse convolution on a line; see `SparseConvolution`."""

    DIMENSIONS = 1


class SparseConvTranspose2d(_SparseConvTranspose):
    """Transposed sparse convolution in the plane; see `SparseConvolution`."""

    DIMENSIONS = 2


class SparseConvTranspose3d(_SparseConvTranspose):
    """Transposed sparse convolution in space; see `SparseConvolution`."""

    DIMENSIONS = 3


class SparseConvTranspose4d(_SparseConvTranspose):
    """Transposed sparse convolution in four dimensions; see `SparseConvolution`."""

    DIMENSIONS = 4


class SparseInverseConv1d(_SparseInverseConv):
    """Inverse convolution on a line; see `SparseInverseConv3d`."""

    DIMENSIONS = 1


class SparseInverseConv2d(_SparseInverseConv):
    """Inverse convolution in the plane; see `SparseInverseConv3d`."""

    DIMENSIONS = 2


class SparseInverseConv3d(_SparseInverseConv):
    """Back from the output sites of the layer with this `indice_key` to its input sites; see `SparseConvolution`.

    >>> import torch
    >>> from triops.nn import SparseConvTensor, SparseSequential
    >>> down_up = SparseSequential(SparseConv3d(4, 8, 3, 2, indice_key="down"), SparseInverseConv3d(8, 4, 3, "down"))
    >>> sites = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    >>> down_up(SparseConvTensor(torch.rand(2, 4), sites, [5, 5, 5], 1)).indices.tolist()
    [[0, 1, 1, 1], [0, 1, 1, 2]]
    """

    DIMENSIONS = 3


class SparseInverseConv4d(_SparseInverseConv):
    """Inverse convolution in four dimensions; see `SparseInverseConv3d`."""

    DIMENSIONS = 4
