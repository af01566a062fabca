"""mmdetection3d without CUDA and a compiler: its KITTI evaluation, and the extension modules that it had before 1.0.

Importing this module replaces `rotate_iou` of the evaluation, which needs CUDA, so that `KittiMetric`, `kitti_eval` and
`kitti_eval_coco_style` run as they are: import it before they are called. It supplies the extension modules under
`mmdet3d.ops` of 0.x, unless they are compiled. Those that mmdetection3d takes from mmcv are `triops.compat.mmcv`.
"""

from triops.compat import _finder, _rotate_iou
from triops.compat._extension import Extension


def extension(name: str) -> Extension:
    leaf = name.rpartition(".")[2]
    if leaf == "rotate_iou":
        return Extension(name, _rotate_iou.FUNCTIONS)
    from triops.compat import _mmdet3d_ops  # the evaluation needs none of it

    return Extension(name, _mmdet3d_ops.FUNCTIONS[leaf])


_finder.install("mmdet3d")
