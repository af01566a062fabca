"""Operators for detection on points, voxels and boxes: Numba on CPU, Triton on GPU, plain torch everywhere."""

from triops import _environment
from triops._op import reference_backend
from triops.ops.ball_query import ball_query
from triops.ops.batch_norm_act import batch_norm_act
from triops.ops.bbox_overlaps import bbox_overlaps
from triops.ops.bev_pool import BevPoolIndex, bev_pool, bev_pool_index
from triops.ops.border_align import border_align, border_align_backward, border_align_forward
from triops.ops.box_iou_rotated import box_iou_rotated, boxes_iou3d, boxes_iou_bev, boxes_overlap_bev
from triops.ops.chamfer_distance import chamfer_distance, chamfer_distance_backward
from triops.ops.convex_iou import box_iou_quadri, convex_iou
from triops.ops.deform_conv2d import deform_conv2d, deform_conv2d_backward
from triops.ops.deform_roi_pool import deform_roi_pool
from triops.ops.diff_iou_rotated import diff_iou_rotated, diff_iou_rotated_2d, diff_iou_rotated_3d
from triops.ops.dynamic_scatter import dynamic_scatter, dynamic_scatter_backward, dynamic_scatter_forward
from triops.ops.furthest_point_sample import furthest_point_sample, furthest_point_sample_with_dist
from triops.ops.gather_points import gather_points, gather_points_backward, group_points
from triops.ops.get_indice_pairs import get_indice_pairs, sparse_output_shape
from triops.ops.ingroup_inds import ingroup_inds
from triops.ops.knn import knn, three_nn
from triops.ops.min_area_polygons import min_area_polygons
from triops.ops.ms_deform_attn import ms_deform_attn, ms_deform_attn_backward
from triops.ops.nms import batched_nms, nms, nms3d, nms3d_normal, nms_quadri, nms_rotated, soft_nms
from triops.ops.points_in_boxes import points_in_boxes, points_in_boxes_all
from triops.ops.points_in_polygons import points_in_polygons
from triops.ops.prroi_pool import prroi_pool
from triops.ops.roi_align import roi_align
from triops.ops.roi_align_rotated import riroi_align_rotated, roi_align_rotated
from triops.ops.roi_pool import roi_pool
from triops.ops.roiaware_pool3d import roiaware_pool3d, roiaware_pool3d_backward, roiaware_pool3d_forward
from triops.ops.roipoint_pool3d import roipoint_pool3d
from triops.ops.sigmoid_focal_loss import sigmoid_focal_loss
from triops.ops.site_neighbors import site_neighbors
from triops.ops.sparse_conv import Rulebook, sparse_conv
from triops.ops.sparse_dense import site_rows, sparse_to_dense
from triops.ops.sparse_pool import sparse_avg_pool, sparse_max_pool
from triops.ops.three_interpolate import three_interpolate, three_interpolate_backward
from triops.ops.vector_pool import vector_pool
from triops.ops.voxel_query import voxel_query
from triops.ops.voxelize import dynamic_voxelize, grid_size, voxelize, voxelize_padded

__version__ = "0.2.0"
__all__ = [
    "BevPoolIndex",
    "Rulebook",
    "ball_query",
    "batch_norm_act",
    "batched_nms",
    "bbox_overlaps",
    "bev_pool",
    "bev_pool_index",
    "border_align",
    "border_align_backward",
    "border_align_forward",
    "box_iou_quadri",
    "box_iou_rotated",
    "boxes_iou3d",
    "boxes_iou_bev",
    "boxes_overlap_bev",
    "chamfer_distance",
    "chamfer_distance_backward",
    "convex_iou",
    "deform_conv2d",
    "deform_conv2d_backward",
    "deform_roi_pool",
    "diff_iou_rotated",
    "diff_iou_rotated_2d",
    "diff_iou_rotated_3d",
    "dynamic_scatter",
    "dynamic_scatter_backward",
    "dynamic_scatter_forward",
    "dynamic_voxelize",
    "furthest_point_sample",
    "furthest_point_sample_with_dist",
    "gather_points",
    "gather_points_backward",
    "get_indice_pairs",
    "grid_size",
    "group_points",
    "ingroup_inds",
    "knn",
    "min_area_polygons",
    "ms_deform_attn",
    "ms_deform_attn_backward",
    "nms",
    "nms3d",
    "nms3d_normal",
    "nms_quadri",
    "nms_rotated",
    "points_in_boxes",
    "points_in_boxes_all",
    "points_in_polygons",
    "prroi_pool",
    "reference_backend",
    "riroi_align_rotated",
    "roi_align",
    "roi_align_rotated",
    "roi_pool",
    "roiaware_pool3d",
    "roiaware_pool3d_backward",
    "roiaware_pool3d_forward",
    "roipoint_pool3d",
    "sigmoid_focal_loss",
    "site_neighbors",
    "site_rows",
    "soft_nms",
    "sparse_avg_pool",
    "sparse_conv",
    "sparse_max_pool",
    "sparse_output_shape",
    "sparse_to_dense",
    "three_interpolate",
    "three_interpolate_backward",
    "three_nn",
    "vector_pool",
    "voxel_query",
    "voxelize",
    "voxelize_padded",
]

_environment.warn_of_unknown_names()
if (_folder := _environment.record_folder()) is not None:
    from triops.acceptance import record as _record

    _record.start(_folder)
