"""`torchsparse.backbones`."""

from triops.compat.torchsparse.backbones.resnet import SparseResNet21D
from triops.compat.torchsparse.backbones.unet import SparseResUNet42

__all__ = ["SparseResNet21D", "SparseResUNet42"]
