"""Geometry that several operators share, once per backend: 3D boxes, rotated rectangles, axis-aligned rectangles."""
