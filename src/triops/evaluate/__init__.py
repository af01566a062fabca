"""Metrics of detectors: KITTI's protocol, and centre-distance matching as in nuScenes."""

from triops.evaluate.kitti_protocol import KittiResult, kitti
from triops.evaluate.nuscenes import NuscenesResult, nuscenes_style
from triops.evaluate.sources import BadFrame

__all__ = ["BadFrame", "KittiResult", "NuscenesResult", "kitti", "nuscenes_style"]
