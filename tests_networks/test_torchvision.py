"""Detectors of torchvision without its compiled operators, on triops: they predict, they train, as the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "torchvision_models.py"
# Apart from the packages of this environment, which import a torchvision that they find.
TORCHVISION = Path(sys.prefix) / "torchvision"


def test_they_predict_and_train() -> None:
    path = os.pathsep.join([str(TORCHVISION), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert list(seen) == ["Faster R-CNN", "Mask R-CNN", "RetinaNet", "FCOS", "SSDlite"]
    for name, network in seen.items():
        assert len(network["losses"]) >= 2, name
        assert network["loss"] < 1e-5, name
        assert network["finite"], name
        assert network["gradients"] == network["weights"], name
        assert network["gradient"] < 1e-3, name
        assert network["boxes"] == network["boxes of the reference"], name
        assert min(network["boxes"]) > 0, name
