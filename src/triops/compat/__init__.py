"""Modules of other libraries, supplied by triops where nobody compiled or installed them.

`import triops.compat.mmcv` (or `.mmdet3d`, `.pcdet`, `.bevfusion`, `.spconv`, `.torchsparse`, `.minkowski_engine`,
`.torch_scatter`, `.torch_cluster`, `.pointops`, `.pointnet2`, `.ms_deform_attn`, `.detectron2`, `.torchvision`) does it
for the running program, `triops activate` for every program of this Python. Importing triops alone, or this package,
changes nothing.
"""

from triops.compat._startup import activate, deactivate

__all__ = ["activate", "deactivate"]
