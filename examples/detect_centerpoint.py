"""CenterPoint of mmdetection3d, unmodified, on triops: built from its own config, trained on one synthetic scene.

python examples/detect_centerpoint.py --steps 30
"""

from detectors import main

if __name__ == "__main__" and not main("centerpoint"):
    raise SystemExit("the loss did not fall")
