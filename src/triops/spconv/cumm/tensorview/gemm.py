"""Names of `cumm.tensorview.gemm`: the activations that spconv's `act_type` takes."""

from triops.nn.activation import Activation

__all__ = ["Activation"]
