"""mmdetection3d's KITTI evaluation without CUDA: importing this module replaces its `rotate_iou`, which needs one.

`KittiMetric`, `kitti_eval` and `kitti_eval_coco_style` then run as they are. Import it before they are called. The
extension modules that mmdetection3d takes from mmcv are `triops.compat.mmcv`.
"""

from triops.compat import _finder, _rotate_iou
from triops.compat._extension import Extension


def extension(name: str) -> Extension:
    return Extension(name, _rotate_iou.FUNCTIONS)


_finder.install("mmdet3d")
