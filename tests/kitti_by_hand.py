"""KITTI's protocol once more, slow and plain: lists, one frame after another, and polygons that are clipped by edges.

What `triops.evaluate.kitti` is compared with; the two share no code.
"""

from __future__ import annotations

import math
from typing import Any

Point = tuple[float, float]
Object = dict[str, Any]  # name, truncated, occluded, alpha, bbox, lhw, xyz, ry, score

MIN_HEIGHTS = [40, 25, 25]
MAX_OCCLUSIONS = [0, 1, 2]
MAX_TRUNCATIONS = [0.15, 0.3, 0.5]
SIMILAR = {"Car": "Van", "Pedestrian": "Person_sitting"}


def corners(box: Object) -> list[Point]:
    """Seen from above: x to the right, z ahead; a rotation around y, which points down, turns x towards -z."""
    length, _, width = box["lhw"]
    x, _, z = box["xyz"]
    cos, sin = math.cos(box["ry"]), math.sin(box["ry"])
    around = [(1, 1), (-1, 1), (-1, -1), (1, -1)]
    return [
        (x + a * length / 2 * cos + b * width / 2 * sin, z - a * length / 2 * sin + b * width / 2 * cos)
        for a, b in around
    ]


def area(polygon: list[Point]) -> float:
    doubled = 0.0
    for (x0, y0), (x1, y1) in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        doubled += x0 * y1 - x1 * y0
    return doubled / 2


def clipped(polygon: list[Point], a: Point, b: Point) -> list[Point]:
    """The part of a polygon to the left of the line from a to b."""

    def side(p: Point) -> float:
        return (b[0] - a[0]) * (p[1] - a[1]) - (b[1] - a[1]) * (p[0] - a[0])

    out = []
    for p, q in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        here, there = side(p), side(q)
        if here >= 0:
            out.append(p)
        if here * there < 0:
            t = here / (here - there)
            out.append((p[0] + t * (q[0] - p[0]), p[1] + t * (q[1] - p[1])))
    return out


def shared_from_above(a: Object, b: Object) -> float:
    if min(a["lhw"]) <= 0 or min(b["lhw"]) <= 0:
        return 0.0
    polygon, cutter = corners(a), corners(b)
    if area(cutter) < 0:
        cutter = cutter[::-1]
    for p, q in zip(cutter, cutter[1:] + cutter[:1], strict=True):
        polygon = clipped(polygon, p, q)
        if not polygon:
            return 0.0
    return abs(area(polygon))


def overlap(kind: str, a: Object, b: Object) -> float:
    if kind == "2D":
        shared = shared_in_image(a, b)
        return shared / (image_area(a) + image_area(b) - shared) if shared else 0.0
    shared = shared_from_above(a, b)
    size_a, size_b = a["lhw"][0] * a["lhw"][2], b["lhw"][0] * b["lhw"][2]
    if kind == "3D":
        top = max(a["xyz"][1] - a["lhw"][1], b["xyz"][1] - b["lhw"][1])
        shared *= max(0.0, min(a["xyz"][1], b["xyz"][1]) - top)
        size_a, size_b = size_a * a["lhw"][1], size_b * b["lhw"][1]
    return shared / (size_a + size_b - shared) if shared else 0.0


def image_area(a: Object) -> float:
    return float((a["bbox"][2] - a["bbox"][0]) * (a["bbox"][3] - a["bbox"][1]))


def shared_in_image(a: Object, b: Object) -> float:
    width = min(a["bbox"][2], b["bbox"][2]) - max(a["bbox"][0], b["bbox"][0])
    height = min(a["bbox"][3], b["bbox"][3]) - max(a["bbox"][1], b["bbox"][1])
    return float(width * height) if width > 0 and height > 0 else 0.0


def role_of_object(item: Object, name: str, level: int) -> str:
    height = item["bbox"][3] - item["bbox"][1]
    hard = (
        item["occluded"] > MAX_OCCLUSIONS[level]
        or item["truncated"] > MAX_TRUNCATIONS[level]
        or height <= MIN_HEIGHTS[level]
    )
    if item["name"] == name:
        return "optional" if hard else "required"
    return "optional" if item["name"] == SIMILAR.get(name) else "none"


def role_of_detection(item: Object, name: str, level: int) -> str:
    if abs(item["bbox"][3] - item["bbox"][1]) < MIN_HEIGHTS[level]:
        return "optional"
    return "required" if item["name"] == name else "none"


def evaluate(
    frames: list[tuple[list[Object], list[Object]]], name: str, kind: str, level: int, min_overlap: float
) -> tuple[float, float, float, float]:
    """AP at 40 and at 11 recall positions, and the same of orientation similarity, in percent."""
    table = [[[overlap(kind, t, d) for d in found] for t in truth] for truth, found in frames]
    scores, required = [], 0
    for (truth, found), values in zip(frames, table, strict=True):
        roles = [role_of_detection(d, name, level) for d in found]
        used = set[int]()
        for i, item in enumerate(truth):
            role = role_of_object(item, name, level)
            required += role == "required"
            if role == "none":
                continue
            fits = [j for j in range(len(found)) if values[i][j] > min_overlap and roles[j] != "none" and j not in used]
            if fits:
                best = max(fits, key=lambda j: (found[j]["score"], -j))
                used.add(best)
                if role == roles[best] == "required":
                    scores.append(found[best]["score"])

    precisions, similarities = [0.0] * 41, [0.0] * 41
    for k, threshold in enumerate(sampled(sorted(scores, reverse=True), required)):
        right, wrong, alike = 0, 0, 0.0
        for (truth, found), values in zip(frames, table, strict=True):
            a, b, c = count(truth, found, values, name, kind, level, min_overlap, threshold)
            right, wrong, alike = right + a, wrong + b, alike + c
        if right + wrong:
            precisions[k], similarities[k] = right / (right + wrong), alike / (right + wrong)
    best_on = [[max(values[k:]) for k in range(41)] for values in (precisions, similarities)]
    figures = [(sum(v[1:]) / 40 * 100, sum(v[::4]) / 11 * 100) for v in best_on]
    return *figures[0], *figures[1]


def sampled(scores: list[float], required: int) -> list[float]:
    """Of falling scores those at which recall is nearest to 0, 1/40, 2/40, ..."""
    chosen: list[float] = []
    for i, score in enumerate(scores):
        target, here, after = len(chosen) / 40, (i + 1) / required, (i + 2) / required
        if i == len(scores) - 1 or after - target >= target - here:
            chosen.append(score)
    return chosen


def count(
    truth: list[Object], found: list[Object], values: list[list[float]], name: str, kind: str, level: int,
    min_overlap: float, threshold: float,
) -> tuple[int, int, float]:  # fmt: skip
    """True positives, false positives and the sum of similarities of one frame."""
    roles = [role_of_detection(d, name, level) if d["score"] >= threshold else "none" for d in found]
    used, right, alike = set[int](), 0, 0.0
    for i, item in enumerate(truth):
        role = role_of_object(item, name, level)
        if role == "none":
            continue
        fits = [j for j in range(len(found)) if values[i][j] > min_overlap and roles[j] != "none" and j not in used]
        proper = [j for j in fits if roles[j] == "required"]
        if proper:
            best = max(proper, key=lambda j: (values[i][j], -j))
            if role == "required":
                right += 1
                alike += (1 + math.cos(item["alpha"] - found[best]["alpha"])) / 2
        elif fits:
            best = fits[0]
        else:
            continue
        used.add(best)
    wrong = 0
    for j, item in enumerate(found):
        inside = kind == "2D" and any(
            t["name"] == "DontCare" and shared_in_image(item, t) > min_overlap * image_area(item) for t in truth
        )
        wrong += roles[j] == "required" and j not in used and not inside
    return right, wrong, alike
