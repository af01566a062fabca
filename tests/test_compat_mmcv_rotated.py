"""Facts about rotated boxes, quadrilaterals and sets of points of `mmcv._ext`: by hand, and as mmcv's own tests say."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

import triops
import triops.compat.mmcv
from triops._geometry.polygon.reference import corners, hull, signed_area
from triops._plain import polygons as plain
from triops.ops.diff_iou_rotated.samples import pairs

NEAR = {"rtol": 0.0, "atol": 1e-4}
# mmcv's: a trapezoid, a kite and a diamond; three rectangles
QUADS = torch.tensor([[1.0, 1, 3, 4, 4, 4, 4, 1], [2, 2, 3, 4, 4, 2, 3, 1], [7, 7, 8, 8, 9, 7, 8, 6]])
RECTANGLES = torch.tensor([[0.0, 0, 0, 2, 2, 2, 2, 0], [2, 1, 2, 4, 4, 4, 4, 1], [7, 6, 7, 8, 9, 8, 9, 6]])
POINTS = torch.tensor([[1.0, 1, 2, 2, 1, 2, 2, 1, 1, 3, 3, 1, 2, 3, 3, 2, 1.5, 1.5]])
POINTS = torch.cat([POINTS, POINTS + 0.5])
SQUARES = torch.tensor([[1.0, 1, 1, 2, 2, 2, 2, 1], [1, 1, 1, 3, 3, 3, 3, 1]])


@pytest.fixture
def ext():
    return triops.compat.mmcv.extension("mmcv._ext")


def corners_of(boxes: Tensor) -> Tensor:
    """Rectangles [N, 5] -> [N, 4, 2], counter-clockwise."""
    cos, sin = boxes[:, 4:].cos(), boxes[:, 4:].sin()
    x = boxes[:, 2:3] / 2 * boxes.new_tensor([-1.0, 1, 1, -1])
    y = boxes[:, 3:4] / 2 * boxes.new_tensor([-1.0, -1, 1, 1])
    return boxes[:, None, :2] + torch.stack([x * cos - y * sin, x * sin + y * cos], -1)


# Quadrilaterals


@pytest.mark.parametrize(("mode", "first"), [(0, 0.0714), (1, 0.1111)])
def test_overlaps_of_quadrilaterals(ext, mode, first):
    expected = torch.tensor([[first, 1, 0], [0, 0.5 if mode == 0 else 1, 0], [0, 0, 0.5 if mode == 0 else 1]])
    ious = torch.empty(9)
    ext.box_iou_quadri(QUADS, RECTANGLES, ious, mode_flag=mode, aligned=False)
    torch.testing.assert_close(ious.view(3, 3), expected, **NEAR)
    ious = torch.empty(3)
    ext.box_iou_quadri(QUADS, RECTANGLES, ious, mode_flag=mode, aligned=True)
    torch.testing.assert_close(ious, expected.diagonal(), **NEAR)


def test_overlaps_of_rectangles_are_those_of_box_iou_rotated(ext):
    first, second, _ = pairs((60,), 5)(torch.float32)
    ious = torch.empty(60 * 60)
    quads = [corners_of(b).flatten(1) for b in (first, second)]
    ext.box_iou_quadri(*quads, ious, mode_flag=0, aligned=False)
    torch.testing.assert_close(ious.view(60, 60), triops.box_iou_rotated(first, second), rtol=0, atol=1e-5)


@pytest.mark.parametrize("labels", [False, True])
def test_suppression_of_quadrilaterals_does_not_look_at_labels(ext, labels):
    dets, scores = torch.cat([QUADS, RECTANGLES[:1]]), torch.tensor([0.7, 0.8, 0.5, 0.9])
    order = scores.argsort(descending=True)
    if labels:
        dets = torch.cat([dets, torch.tensor([[1.0], [0], [1], [0]])], 1)
    kept = ext.nms_quadri(dets, scores, order, dets[order], 0.3, int(labels))
    assert kept.tolist() == [3, 1, 2]


def test_suppression_of_rectangles_is_nms_rotated(ext):
    boxes = pairs((80,), 5, spread=0.5)(torch.float32)[0]
    scores = torch.rand(80, generator=torch.Generator().manual_seed(0))
    kept = ext.nms_quadri(corners_of(boxes).flatten(1), scores, scores, boxes, 0.2, 0)
    assert kept.tolist() == triops.nms_rotated(boxes, scores, 0.2).tolist()


# Sets of points


def test_a_hull_goes_around_counter_clockwise_and_leaves_out_what_is_inside():
    index = hull(POINTS[:1].view(1, 9, 2))[0].tolist()
    around = [i for k, i in enumerate(index) if i != index[k - 1]]
    assert around == [5, 7, 6, 4, 0]  # (3, 1), (3, 2), (2, 3), (1, 3), (1, 1)
    assert signed_area(corners(POINTS.view(2, 9, 2), hull(POINTS.view(2, 9, 2)))).tolist() == [3.5, 3.5]


def test_a_hull_of_equal_points_or_of_points_in_line_has_no_area():
    for points in (torch.ones(1, 9, 2), torch.arange(9.0)[None, :, None] * torch.tensor([1.0, 2.0])):
        assert signed_area(corners(points, hull(points))).item() == 0


def test_overlaps_of_sets_of_points(ext):
    ious = torch.empty(2, 2)
    ext.convex_iou(POINTS, SQUARES, ious)
    torch.testing.assert_close(ious, torch.tensor([[0.2857, 0.8750], [0.0588, 0.4286]]), **NEAR)
    ext.convex_iou(POINTS, SQUARES.view(2, 4, 2).flip(1).reshape(2, 8), turned := torch.empty(2, 2))
    torch.testing.assert_close(turned, ious)


def test_generalised_overlaps_and_their_gradients_are_those_of_mmcv_where_sides_coincide_too(ext):
    output = torch.empty(2, 19)
    ext.convex_giou(POINTS, SQUARES, output)
    torch.testing.assert_close(output[:, 18], torch.tensor([0.2857, 0.3831]), **NEAR)
    expected = torch.tensor([
        [0.0204, 0.0408, 0, 0, 0, 0, 0, 0, 0.0612, -0.0408, -0.0408, 0.0816, -0.0408, -0.0816, -0.0816, -0.0408, 0, 0],
        [-0.1848, -0.1848, 0, 0, 0, 0, 0, 0, -0.1076, -0.0801, -0.0801, -0.1076, -0.0367, -0.0734, -0.0734, -0.0367,
         0, 0],
    ])  # fmt: skip
    torch.testing.assert_close(output[:, :18], expected, **NEAR)


def test_the_gradient_of_generalised_overlaps_by_gradcheck():
    g = torch.Generator().manual_seed(1)
    points = torch.rand(6, 9, 2, generator=g, dtype=torch.float64) * 4 + 1
    polygons = corners_of(torch.tensor([[3.0, 3, 3, 2, 0.3]], dtype=torch.float64)).expand(6, 4, 2)
    assert torch.autograd.gradcheck(lambda p: plain.convex_giou(p, polygons), points.requires_grad_())


def test_rectangles_of_least_area(ext):
    points = POINTS.clone()
    points[1] = points[0]
    points[1, 2:4] = 8
    polygons = torch.empty(2, 8)
    ext.min_area_polygons(points, polygons)
    expected = torch.tensor([[3.0, 1, 1, 1, 1, 3, 3, 3], [8, 8, 2.3243, 0.0541, 0.0541, 1.6757, 5.7297, 9.6216]])
    torch.testing.assert_close(polygons, expected, **NEAR)


def test_the_rectangle_around_a_rectangle_is_itself():
    boxes = pairs((50,), 5)(torch.float64)[0]
    own = corners_of(boxes)
    found = triops.min_area_polygons(torch.cat([own, own, boxes[:, None, :2]], 1).flatten(1)).view(-1, 4, 2)
    torch.testing.assert_close(found.mean(1), boxes[:, :2])
    torch.testing.assert_close(signed_area(found).abs(), boxes[:, 2] * boxes[:, 3])


def test_no_rows_give_no_rows(ext):
    ext.convex_iou(POINTS[:0], SQUARES, ious := torch.empty(0, 2))
    ext.convex_giou(POINTS[:0], SQUARES[:0], torch.empty(0, 19))
    ext.min_area_polygons(POINTS[:0], torch.empty(0, 8))
    ext.box_iou_quadri(QUADS[:0], RECTANGLES, torch.empty(0), mode_flag=0, aligned=False)
    assert ious.shape == (0, 2)


# Vertices of what two rectangles share


def diff_iou_of_mmcv(ext, first: Tensor, second: Tensor) -> Tensor:
    """mmcv's Python around the kernel: vertices, which of them are valid, sorted, and the shoelace formula."""
    one, two = (corners_of(b.view(-1, 5)).view(*b.shape[:2], 4, 2) for b in (first, second))
    step1, step2 = one.roll(-1, -2) - one, two.roll(-1, -2) - two

    def cross(a: Tensor, b: Tensor) -> Tensor:
        return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]

    apart = two[:, :, None] - one[:, :, :, None]
    area = cross(step1[:, :, :, None], step2[:, :, None])
    t, u = cross(apart, step2[:, :, None]) / area, cross(apart, step1[:, :, :, None]) / area
    crossed = (area != 0) & (t > 0) & (t < 1) & (u > 0) & (u < 1)
    crossings = torch.where(crossed[..., None], one[:, :, :, None] + t[..., None] * step1[:, :, :, None], 0.0)

    def inside(points: Tensor, box: Tensor) -> Tensor:
        found = torch.ones_like(points[..., 0], dtype=torch.bool)
        for side in (box[..., 1:2, :] - box[..., :1, :], box[..., 3:, :] - box[..., :1, :]):
            along = ((points - box[..., :1, :]) * side).sum(-1) / side.square().sum(-1)
            found &= (along > -1e-6) & (along < 1 + 1e-6)
        return found

    vertices = torch.cat([one, two, crossings.flatten(2, 4).view(*first.shape[:2], 16, 2)], 2)
    mask = torch.cat([inside(one, two), inside(two, one), crossed.flatten(2)], 2)
    count = mask.sum(2).int()
    mean = (vertices * mask[..., None]).sum(2, keepdim=True) / count[..., None, None]
    index = ext.diff_iou_rotated_sort_vertices_forward(vertices - mean, mask, count).long()
    assert index.shape == (*first.shape[:2], 9)
    chosen = vertices.gather(2, index[..., None].expand(*index.shape, 2))
    shared = cross(chosen[:, :, :-1], chosen[:, :, 1:]).sum(2).abs() / 2
    return shared / (first[..., 2] * first[..., 3] + second[..., 2] * second[..., 3] - shared)


def test_sorted_vertices_give_the_overlap_of_any_two_rectangles(ext):
    first, second, _ = pairs((2, 200), 5, spread=1.5)(torch.float64)  # in float32 mmcv's Python loses corners
    second[0, :50] = first[0, :50]
    second[0, 50:60, 4] = first[0, 50:60, 4] + math.pi / 2
    second[0, 60:70, 4] = first[0, 60:70, 4]
    found = diff_iou_of_mmcv(ext, first, second)
    torch.testing.assert_close(found, triops.diff_iou_rotated(first, second), rtol=0, atol=1e-4)


def test_vertices_are_sorted_by_angle_from_the_x_axis_and_the_first_is_repeated(ext):
    vertices, mask = torch.zeros(1, 3, 24, 2), torch.zeros(1, 3, 24, dtype=torch.bool)
    vertices[0, 0, [1, 5, 8, 20]] = torch.tensor([[-1.0, -1], [1, 1], [-1, 1], [1, -1]])
    mask[0, 0, [1, 5, 8, 20]] = True
    mask[0, 1, :2] = True  # two are no polygon
    index = ext.diff_iou_rotated_sort_vertices_forward(vertices=vertices, mask=mask, num_valid=mask.sum(2).int())
    assert index.dtype == torch.int32
    assert index[0].tolist() == [[5, 8, 1, 20, 5, 9, 9, 9, 9], [8] * 9, [8] * 9]


def test_mmcvs_functions_become_the_operator():
    module = ModuleType("mmcv.ops.diff_iou_rotated")
    module.diff_iou_rotated_2d = lambda box1, box2: None
    module.diff_iou_rotated_3d = lambda box3d1, box3d2: None
    triops.compat.mmcv.replace_wrappers(module)
    first, second, _ = pairs((1, 9), 7)(torch.float32)
    first.requires_grad_()
    found = module.diff_iou_rotated_3d(first, second.half())  # as autocast mixes them
    assert torch.equal(found, triops.diff_iou_rotated(first, second.half().float()))
    assert found.requires_grad
    assert not hasattr(module, "points_in_boxes_all")
