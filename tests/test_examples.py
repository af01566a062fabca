"""The examples that need nothing but triops keep their promise, in few steps; the others say what they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from triops.compat import _finder

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_borders_refine_the_boxes_of_borderdet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from borderdet_head import main

    coarse, refined = main(["--steps", "30"])
    assert refined > coarse + 0.02


@pytest.fixture
def supplied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an example supplies to itself is gone behind it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    _finder.uninstall()
    _finder.install("spconv", "cumm", "torch_scatter")
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("spconv", "cumm", "torch_scatter", *(path.stem for path in EXAMPLES.iterdir())):
            del sys.modules[name]


def test_backbones_of_openpcdet_learn_where_objects_stand(supplied: None) -> None:
    from train_openpcdet_backbones import main

    histories = main(["--steps", "3", "--points", "1500"])
    assert set(histories) == {"VoxelBackBone8x", "VoxelResBackBone8x"}
    for history in histories.values():
        assert history[-1] < history[0]


def test_a_point_transformer_learns_to_tell_ground_from_objects(supplied: None) -> None:
    from train_point_transformer import main

    history = main(["--steps", "3", "--points", "1500"])
    assert history[-1] < history[0]


def test_a_head_learns_boxes_from_their_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from train_rotated_iou_loss import main

    losses, _ = main(["--steps", "25", "--boxes", "64"])
    assert losses[-1] < losses[0] - 0.1


def test_a_detector_learns_and_draws_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from train_detector import main

    history, _ = main(["--steps", "16", "--batch", "1", "--picture", str(tmp_path / "found.png")])
    assert sum(history[-4:]) < 0.7 * sum(history[:4])
    if find_spec("matplotlib"):
        assert (tmp_path / "found.png").stat().st_size > 20_000


@pytest.mark.skipif(find_spec("mmdet3d") is not None, reason="mmdetection3d is installed")
def test_a_detector_without_mmdetection3d_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "detect_second.py")], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("mmdetection3d is not installed: pip install 'triops[mmdet3d]'")
