"""KITTI's calibration files, and boxes between the camera's frame and the LiDAR's.

A box of a label is the middle of its bottom, in the camera's frame (x right, y down, z ahead), with the heading around
y. A box of triops is in the LiDAR's frame (x ahead, y left, z up), with the heading from x towards y.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_LENGTH_WIDTH_HEIGHT = np.array([0, 2, 1])  # of a label's length, height, width
_SHAPES = {"P2": (3, 4), "R0_rect": (3, 3), "Tr_velo_to_cam": (3, 4)}


class CalibrationError(ValueError):
    """A calibration file that cannot be read. The message names the file and the entry."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What boxes and points need of a calibration file.

    Attributes:
        projection [3, 4]: from the rectified camera's frame to pixels of the left colour camera (`P2`).
        rectification [3, 3]: `R0_rect`.
        lidar_to_camera [3, 4]: before rectification (`Tr_velo_to_cam`).
    """

    projection: Floats
    rectification: Floats
    lidar_to_camera: Floats

    def lidar_to_rectified(self) -> Floats:
        """From the LiDAR's frame to the rectified camera's: [4, 4]."""
        matrix = np.eye(4)
        matrix[:3] = self.rectification @ self.lidar_to_camera
        return matrix

    def project(self, points: Floats) -> tuple[Floats, Floats]:
        """Pixels [N, 2] and depths [N] of points [N, 3] in the rectified camera's frame."""
        homogeneous = points @ self.projection[:, :3].T + self.projection[:, 3]
        return homogeneous[:, :2] / homogeneous[:, 2:], points[:, 2]


def parse_calibration(text: str, source: str = "calibration") -> Calibration:
    """The calibration that a file's text holds.

    Raises:
        CalibrationError: an entry is missing, too short or too long, or not of finite numbers.

    >>> parse_calibration("P2: 1 0 0", "000007.txt")
    Traceback (most recent call last):
    triops.data.kitti_calibration.CalibrationError: 000007.txt: P2 must be 12 finite numbers, got '1 0 0'
    """
    entries = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = []
    for name, shape in _SHAPES.items():
        if name not in entries:
            raise CalibrationError(f"{source}: {name} is missing")
        try:
            values = np.array(entries[name].split(), np.float64)
        except ValueError:
            values = np.empty(0)
        if values.size != shape[0] * shape[1] or not np.isfinite(values).all():
            raise CalibrationError(
                f"{source}: {name} must be {shape[0] * shape[1]} finite numbers, got {entries[name].strip()[:60]!r}"
            )
        found.append(values.reshape(shape))
    return Calibration(*found)


def format_calibration(calibration: Calibration) -> str:
    """The text of a calibration file; the other cameras and the inertial unit get plausible entries."""
    entries = {
        **{f"P{camera}": calibration.projection for camera in range(4)},
        "R0_rect": calibration.rectification,
        "Tr_velo_to_cam": calibration.lidar_to_camera,
        "Tr_imu_to_velo": np.eye(3, 4),
    }
    return "".join(f"{name}: {' '.join(f'{v:.12e}' for v in np.ravel(matrix))}\n" for name, matrix in entries.items())


def to_lidar(
    location: Floats, dimensions: Floats, rotation_y: Floats, lidar_to_rectified: Floats, source: str = "calibration"
) -> Floats:  # fmt: skip
    """Boxes [N, 7] in the LiDAR's frame, z at the bottom, of boxes in the rectified camera's.

    Args:
        location [N, 3], dimensions [N, 3] (length, height, width), rotation_y [N]: as in a label file.
        lidar_to_rectified [4, 4].
        source: where that is from, for messages.

    Raises:
        CalibrationError: there is no way back.
    """
    try:
        rotation, shift = _inverse(lidar_to_rectified.astype(np.float64, copy=False).tobytes())
    except np.linalg.LinAlgError:
        raise CalibrationError(f"{source}: the way from the LiDAR to the camera has no inverse") from None
    boxes = np.empty((len(location), 7))
    centre = boxes[:, :3]
    np.matmul(location, rotation, centre)
    centre += shift
    boxes[:, 3:6] = dimensions[:, _LENGTH_WIDTH_HEIGHT]
    boxes[:, 6] = wrap(-rotation_y - np.pi / 2)
    return boxes


@lru_cache(maxsize=256)
def _inverse(lidar_to_rectified: bytes) -> tuple[Floats, Floats]:
    """Rotation [3, 3], transposed, and shift [3] of the way back. All frames of one drive share a calibration."""
    back = np.linalg.inv(np.frombuffer(lidar_to_rectified).reshape(4, 4)).astype(np.float64, copy=False)
    return back[:3, :3].T, back[:3, 3]


def to_camera(boxes: Floats, lidar_to_rectified: Floats) -> tuple[Floats, Floats, Floats]:
    """location, dimensions and rotation_y of boxes [N, 7] in the LiDAR's frame, z at the bottom."""
    location = boxes[:, :3] @ lidar_to_rectified[:3, :3].T + lidar_to_rectified[:3, 3]
    return location, boxes[:, [3, 5, 4]], wrap(-boxes[:, 6] - np.pi / 2)


def wrap(angle: Floats) -> Floats:
    """The same angle from -pi up to pi."""
    wrapped: Floats = angle - np.floor(angle / (2 * np.pi) + 0.5) * (2 * np.pi)
    return wrapped
