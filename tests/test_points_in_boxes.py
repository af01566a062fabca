"""points_in_boxes: facts by hand, and properties of the geometry."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, run, small

import triops
from triops import scenes
from triops._geometry.box import cpu as box_cpu
from triops._geometry.box import reference as box
from triops._geometry.box_grid import cpu as box_grid
from triops.ops.points_in_boxes import cpu as points_in_boxes_cpu
from triops.ops.points_in_boxes import gpu as points_in_boxes_gpu
from triops.ops.points_in_boxes.samples import SAMPLES

BACKENDS = ["reference", "cpu", "gpu"]


def first(points: list[list[float]], boxes: list[list[float]], backend: str = "cpu", **options: object) -> list[int]:
    how = options.get("z_origin", "center"), options.get("margin", 0.0)
    args = (torch.tensor([points]), torch.tensor([boxes]), *how)
    return run(backend, "points_in_boxes", args)[0].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
class TestByHand:
    def test_the_centre_is_inside_and_far_away_is_not(self, backend: str) -> None:
        assert first([[1.0, 2, 3], [50.0, 2, 3]], [[1.0, 2, 3, 4, 2, 1, 0.3]], backend) == [0, -1]

    def test_the_lowest_index_wins(self, backend: str) -> None:
        box = [0.0, 0, 0, 2, 2, 2, 0]
        assert first([[0.5, 0.5, 0.5]], [[9.0, 9, 9, 1, 1, 1, 0], box, box], backend) == [1]

    def test_faces_in_z_are_inside_and_faces_in_x_and_y_are_not(self, backend: str) -> None:
        points = [[0.0, 0, 1], [0.0, 0, -1], [2.0, 0, 0], [-2.0, 0, 0], [0.0, 1, 0], [0.0, -1, 0]]
        assert first(points, [[0.0, 0, 0, 4, 2, 2, 0]], backend) == [0, 0, -1, -1, -1, -1]

    def test_heading_turns_from_x_towards_y(self, backend: str) -> None:
        # a box 4 long, turned by 45 degrees, reaches to (1.3, 1.3) and not to (1.3, -1.3)
        assert first([[1.3, 1.3, 0], [1.3, -1.3, 0]], [[0.0, 0, 0, 4, 1, 1, math.pi / 4]], backend) == [0, -1]

    def test_a_quarter_turn_swaps_length_and_width(self, backend: str) -> None:
        points = [[0.0, 1.9, 0], [1.9, 0, 0]]
        for turns in (-3, -1, 1, 3, 5):
            assert first(points, [[0.0, 0, 0, 4, 2, 2, turns * math.pi / 2]], backend) == [0, -1]

    def test_z_origin_bottom_lifts_the_box(self, backend: str) -> None:
        points, boxes = [[0.0, 0, 1.9], [0.0, 0, -0.1]], [[0.0, 0, 0, 2, 2, 2, 0]]
        assert first(points, boxes, backend, z_origin="bottom") == [0, -1]
        assert first(points, boxes, backend) == [-1, 0]

    def test_margin_widens_x_and_y_only(self, backend: str) -> None:
        points = [[1.05, 0, 0], [0.0, 1.05, 0], [0.0, 0, 1.05]]
        assert first(points, [[0.0, 0, 0, 2, 2, 2, 0]], backend, margin=0.1) == [0, 0, -1]

    def test_batches_do_not_see_each_other(self, backend: str) -> None:
        points = torch.zeros(2, 1, 3)
        boxes = torch.tensor([[[0.0, 0, 0, 1, 1, 1, 0]], [[5.0, 0, 0, 1, 1, 1, 0]]])
        assert run(backend, "points_in_boxes", (points, boxes, "center", 0.0)).tolist() == [[0], [-1]]

    def test_all_lists_every_box(self, backend: str) -> None:
        boxes = torch.tensor([[[0.0, 0, 0, 4, 2, 2, 0], [1.0, 0, 0, 4, 2, 2, 0], [9.0, 0, 0, 1, 1, 1, 0]]])
        points = torch.tensor([[[0.0, 0, 0], [2.5, 0, 0]]])
        got = run(backend, "points_in_boxes_all", (points, boxes, "center", 0.0))
        assert got.tolist() == [[[True, True, False], [False, True, False]]]


def test_no_boxes_give_minus_one_and_no_points_give_nothing() -> None:
    assert triops.points_in_boxes(torch.zeros(1, 3, 3), torch.zeros(1, 0, 7)).tolist() == [[-1, -1, -1]]
    assert triops.points_in_boxes(torch.zeros(1, 0, 3), torch.zeros(1, 4, 7)).shape == (1, 0)
    assert triops.points_in_boxes_all(torch.zeros(1, 3, 3), torch.zeros(1, 0, 7)).shape == (1, 3, 0)


def test_more_than_two_million_points() -> None:
    """Peers go wrong above 2,097,152 points."""
    count = 2_097_152 + 500
    points = torch.zeros(1, count, 3)
    points[0, -1, 0] = 9.0
    index = triops.points_in_boxes(points, torch.tensor([[[0.0, 0, 0, 1, 1, 1, 0]]]))
    assert index[0, -1] == -1
    assert index[0, :-1].eq(0).all()


class TestCrowdedBoxes:
    """Boxes that lie on top of each other reach into the same cells of the CPU's grid."""

    def clustered(self, count: int, points: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        boxes = torch.tensor([0.0, 0, 0, 4, 2, 1.5, 0]).repeat(1, count, 1)
        boxes[..., :3] += torch.rand(1, count, 3, generator=g) * 0.2
        return torch.rand(1, points, 3, generator=g) * 6 - 3, boxes

    @pytest.mark.parametrize("points", [1, 100])
    def test_more_equal_boxes_than_fit_every_cell_of_a_grid(self, points: int) -> None:
        """2**18 + 1 boxes in each of 2**14 cells are more than a uint32 counts."""
        boxes = torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0]]]).repeat(1, 2**18 + 1, 1)
        assert triops.points_in_boxes(torch.zeros(1, points, 3), boxes).eq(0).all()
        assert triops.points_in_boxes_all(torch.zeros(1, points, 3), boxes).all()

    @pytest.mark.parametrize("count", [200, 2000])
    def test_the_reference_s_answer(self, count: int) -> None:
        points, boxes = self.clustered(count, 300)
        for operator in ("points_in_boxes", "points_in_boxes_all"):
            args = points, boxes, "center", 0.0
            assert torch.equal(run("cpu", operator, args), run("reference", operator, args))

    def test_the_lists_of_the_grid_grow_with_the_input_and_not_with_the_overlap(self) -> None:
        for count in (2_000, 8_000):
            boxes = self.clustered(count, 0)[1][0].numpy()
            *_, bits, first, box, _ = box_grid.build_grid(boxes, False, 0.0, 100)
            assert count <= first[4**bits] <= len(box) < 5 * (count + 100) + 2**14

    @pytest.mark.parametrize("count", [2_000, 8_000])
    def test_about_as_fast_as_brute_force(self, count: int) -> None:
        points, boxes = self.clustered(count, 100)
        out = np.empty((1, 100), np.int32)

        def seconds(call: Callable[[], object]) -> float:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin

        def grid() -> None:
            triops.points_in_boxes(points, boxes)

        def brute_force() -> None:
            points_in_boxes_cpu._brute_force(points.numpy(), boxes.numpy(), False, 0.0, out)

        grid(), brute_force()  # compile
        assert min(seconds(grid) for _ in range(9)) < 5 * min(seconds(brute_force) for _ in range(9))


@pytest.mark.parametrize("operator", ["points_in_boxes", "points_in_boxes_all"])
def test_batches_go_through_the_gpu_s_workspace_in_rounds(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    args = torch.rand(5, 40, 3, generator=g), torch.rand(5, 7, 7, generator=g), "center", 0.0
    expected = run("reference", operator, args)
    for batches in (1, 2, 4):
        monkeypatch.setattr(points_in_boxes_gpu, "WORKSPACE", batches * (64 * 64 * 2 * 4 + 7 * 8 * 4))
        assert torch.equal(run("gpu", operator, args).cpu(), expected)


def test_numpy_numbers_are_numbers() -> None:
    points, boxes = torch.tensor([[[1.05, 0, 0]]]), torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0]]])
    assert triops.points_in_boxes(points, boxes, margin=np.float64(0.1)).tolist() == [[0]]
    assert triops.points_in_boxes(points, boxes, margin=np.float32(0.125)).tolist() == [[0]]


class TestCosineAndSine:
    ANGLES = torch.cat(
        [
            torch.linspace(-20, 20, 10_001, dtype=torch.float64),
            torch.arange(-100, 101) * (torch.pi / 4),
            torch.tensor([0.0, -0.0, 1e-300, 1e5, -8e5, 123_456_789.0], dtype=torch.float64),
        ]
    ).double()

    def test_right_to_the_last_bit_or_the_one_before(self) -> None:
        cos, sin = box.cos_sin(self.ANGLES[:-1])
        assert (cos - self.ANGLES[:-1].cos()).abs().max() < 2.3e-16
        assert (sin - self.ANGLES[:-1].sin()).abs().max() < 2.3e-16

    def test_the_same_bits_on_numba(self) -> None:
        cos, sin = box.cos_sin(self.ANGLES)
        numba = torch.tensor([box_cpu.cos_sin(a) for a in self.ANGLES.tolist()], dtype=torch.float64)
        assert torch.equal(numba[:, 0], cos)
        assert torch.equal(numba[:, 1], sin)

    def test_not_finite_gives_nan(self) -> None:
        cos, sin = box.cos_sin(torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64))
        assert cos.isnan().all()
        assert sin.isnan().all()


# Coordinates on a coarse lattice, so that points on faces, edges and corners are common.
lattice = st.integers(-12, 12).map(lambda i: i / 4)
size = st.integers(0, 12).map(lambda i: i / 2)
heading = st.one_of(st.integers(-8, 8).map(lambda i: i * math.pi / 4), st.floats(-10, 10, width=32))
a_point = st.tuples(lattice, lattice, lattice).map(list)
a_box = st.tuples(lattice, lattice, lattice, size, size, size, heading).map(list)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(a_point, min_size=1, max_size=40), st.lists(a_box, min_size=1, max_size=10), st.sampled_from(BACKENDS[1:])
)  # fmt: skip
def test_kernels_equal_the_reference_on_and_around_faces(points: list, boxes: list, backend: str) -> None:
    assert first(points, boxes, backend) == first(points, boxes, "reference")


@settings(max_examples=40, deadline=None)
@given(st.lists(a_point, min_size=2, max_size=30), st.lists(a_box, min_size=1, max_size=8), st.randoms())
def test_permuting_the_points_permutes_the_answer(points: list, boxes: list, random: object) -> None:
    order = list(range(len(points)))
    random.shuffle(order)  # type: ignore[attr-defined]
    answer = first(points, boxes)
    assert first([points[i] for i in order], boxes) == [answer[i] for i in order]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-3.1, 3.1), st.floats(-50, 50), st.floats(-50, 50))
def test_turning_and_shifting_the_scene_changes_nothing(seed: int, turn: float, x: float, y: float) -> None:
    """Away from the faces, where rounding may decide."""
    g = torch.Generator().manual_seed(seed)
    points = torch.rand(1, 200, 3, generator=g, dtype=torch.float64) * 10 - 5
    boxes = torch.rand(1, 8, 7, generator=g, dtype=torch.float64) * 6 - 3
    boxes[..., 3:6] = boxes[..., 3:6].abs() + 0.1
    wide = triops.points_in_boxes_all(points, boxes, margin=1e-6)
    narrow = triops.points_in_boxes_all(points, boxes, margin=-1e-6)
    clear = (wide == narrow).all(-1)
    rotation = torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]], dtype=torch.float64)
    moved, moved_boxes = points.clone(), boxes.clone()
    for target in (moved, moved_boxes):
        target[..., :2] = target[..., :2] @ rotation + torch.tensor([x, y])
    moved_boxes[..., 6] += turn
    before, after = triops.points_in_boxes(points, boxes), triops.points_in_boxes(moved, moved_boxes)
    assert torch.equal(before[clear], after[clear])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_first_is_the_lowest_of_all(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    points = torch.rand(2, 100, 3, generator=g) * 6 - 3
    boxes = torch.rand(2, 12, 7, generator=g) * 5
    every = triops.points_in_boxes_all(points, boxes)
    lowest = torch.where(every.any(-1), every.int().argmax(-1), -1)
    assert torch.equal(triops.points_in_boxes(points, boxes).long(), lowest)


def test_the_scene_is_the_seed_scale_and_repeats() -> None:
    scene, again = scenes.lidar_scene(), scenes.lidar_scene()
    assert scene.points.shape == (272_414, 3)
    assert scene.boxes.shape == (66, 7)
    assert torch.equal(scene.points, again.points)
    assert not torch.equal(scene.points, scenes.lidar_scene(seed=1).points)
    inside = triops.points_in_boxes(scene.points[None], scene.boxes[None]) >= 0
    assert 0.01 < inside.float().mean() < 0.3, "a sweep hits its cars, and mostly not"


@pytest.mark.parametrize("few", [0, 2**40], ids=["grid", "all pairs"])
def test_both_ways_of_a_gpu_give_the_answer(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points_in_boxes_gpu, "FEW_PAIRS", few)
    for sample in small(SAMPLES):
        args = sample.make(torch.float32)
        assert_same(*(run(backend, sample.operator, args) for backend in ("gpu", "reference")), str(sample))
