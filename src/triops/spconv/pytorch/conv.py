"""Names of `spconv.pytorch.conv`: the convolutions of `triops.nn` that read a checkpoint as spconv 2.x does."""

import math

from torch import Tensor

from triops import nn


class SparseConvolution(nn.SparseConvolution):
    """See `triops.nn.SparseConvolution`.

    Kernels of one offset and stride 1 are the exception that makes this class. spconv 2.x keeps their weight as
    [out_channels, 1, ..., in_channels] like any other, but multiplies by the same numbers laid out as
    [in_channels, out_channels] (https://github.com/traveller59/spconv/issues/450). Networks were trained with that, so
    their checkpoints mean that.
    """

    def kernel(self) -> Tensor:
        if self.volume == 1 and math.prod(self.stride) == 1:
            return self.weight.view(self.in_channels, self.out_channels).t().reshape(self.weight_shape)
        return self.weight


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


__all__ = [
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
]
