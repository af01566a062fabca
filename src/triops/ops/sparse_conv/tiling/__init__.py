"""How the GPU kernels of the convolution cut their work."""
