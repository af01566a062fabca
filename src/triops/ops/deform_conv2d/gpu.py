"""deform_conv2d on GPU: see the forward, the backward, and what they share (`sampling_gpu`)."""

from triops.ops.deform_conv2d.backward_gpu import deform_conv2d_backward
from triops.ops.deform_conv2d.forward_gpu import deform_conv2d

__all__ = ["deform_conv2d", "deform_conv2d_backward"]
