"""A frame of a data set: its points and boxes, whatever they were stored as."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from triops._geometry.box.reference import ZOrigin
from triops.data import cpu

_LITTLE_ENDIAN = np.dtype("<f4")
_SAFE = {"frame": re.compile(r"\w[\w.+-]*"), "class": re.compile(r"\w[\w.+-]*(?: [\w.+-]+)*")}
_LONGEST = 100  # bytes of a name: a file's name, which has 255, may hold two


class FrameError(ValueError):
    """A frame that cannot be used. The message names the file and what is wrong."""


@dataclass(frozen=True, eq=False)
class Frame:
    """Points and boxes in the LiDAR's frame.

    Attributes:
        points [N, C]: float32; x, y and z first. Whether they are finite is for jobs to check: see `check_points`.
        boxes [T, 7 or more]: float32; centre, sizes, heading from x towards y, then what else the data set has (a
            velocity).
        names [T]: classes.
        z_origin: whether the third field of a box is its "center" or its "bottom".
        difficulty [T]: int; -1 where it is beyond the hardest level.
        bbox [T, 4]: box in the image, or None.
        score [T]: or None.
        source: where the points are from, for messages.
    """

    points: npt.NDArray[np.float32]
    boxes: npt.NDArray[np.float32]
    names: list[str]
    z_origin: ZOrigin
    difficulty: list[int]
    bbox: npt.NDArray[np.float32] | None = None
    score: list[float] | None = None
    source: str = "points"

    def boxes_from(self, z_origin: ZOrigin) -> npt.NDArray[np.float32]:
        """The boxes with z at their center or at their bottom."""
        if z_origin == self.z_origin:
            return self.boxes
        moved = self.boxes.copy()
        half = moved[:, 5] * np.float32(0.5)
        moved[:, 2] += half if z_origin == "center" else -half
        return moved


@dataclass(frozen=True)
class FrameRef:
    """Where a frame is, small enough to be sent to another process.

    Attributes:
        key: its name, which names its output too.
        sample: what databases call it: mmdetection3d a number, OpenPCDet KITTI's six digits.
        source: number of the source that loads it.
        payload: what the source needs to load it.
    """

    key: str
    sample: int | str
    source: int
    payload: Any = None


class Source(Protocol):
    """A data set. Objects are sent to other processes: they hold where things are, not what is in them."""

    @property
    def dataset(self) -> str: ...

    @property
    def split(self) -> str: ...

    def classes(self) -> list[str]: ...

    def refs(self, number: int) -> list[FrameRef]: ...

    def load(self, ref: FrameRef) -> Frame: ...


def safe_name(name: str, what: str, kind: Literal["frame", "class"] = "frame") -> str:
    """The name, if it can be a part of a file's name: letters of any script, digits, `_.+-`, in a class spaces too.

    >>> safe_name("../../etc", "class")
    Traceback (most recent call last):
    triops.data.frames.FrameError: class '../../etc' cannot be part of a file's name
    """
    if not _SAFE[kind].fullmatch(name):
        raise FrameError(f"{what} {name[:60]!r} cannot be part of a file's name")
    if len(name.encode()) > _LONGEST:
        raise FrameError(f"{what} {name[:60]!r}... is longer than {_LONGEST} bytes")
    return name


def as_sample(name: str) -> int | str:
    """What mmdetection3d calls a frame: a number where its name is one."""
    return int(name) if name.isascii() and name.isdecimal() else name


def points_of(data: bytes, features: int, source: str) -> npt.NDArray[np.float32]:
    """float32 [N, features] of a file of points.

    >>> points_of(bytes(20), 4, "000007.bin")
    Traceback (most recent call last):
    triops.data.frames.FrameError: 000007.bin: 20 bytes are not whole points of 4 float32: truncated?
    """
    if len(data) % (4 * features):
        raise FrameError(f"{source}: {len(data)} bytes are not whole points of {features} float32: truncated?")
    return np.frombuffer(data, _LITTLE_ENDIAN).reshape(-1, features)


def xyz_of(points: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x, y and z of points [N, C], in memory of their own."""
    found = np.empty((len(points), 3), np.float32)
    for axis in range(3):  # five times as fast as a copy of the three columns together
        found[:, axis] = points[:, axis]
    return found


def check_points(points: npt.NDArray[np.float32], source: str) -> None:
    """Refuse points [N, C] whose x, y or z is infinite or NaN.

    >>> check_points(np.full((2, 3), np.nan, np.float32), "000007.bin")
    Traceback (most recent call last):
    triops.data.frames.FrameError: 000007.bin: 2 points are not finite, the first is number 0
    """
    flat = points.reshape(-1).view()
    flat.flags.writeable = False  # one kernel, whether it was read from a file or computed
    if cpu.all_finite(flat):
        return
    bad = ~np.isfinite(points[:, :3]).all(1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise FrameError(f"{source}: {int(bad.sum())} points are not finite, the first is number {row}")


def check_boxes(boxes: npt.NDArray[np.float32], source: str) -> npt.NDArray[np.float32]:
    """The boxes, if all their numbers are finite."""
    if np.isfinite(boxes).all():
        return boxes
    bad = int(np.flatnonzero(~np.isfinite(boxes).all(1))[0])
    raise FrameError(f"{source}: box {bad} must be finite, got {boxes[bad].tolist()}")
