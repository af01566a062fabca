"""Geometry that several operators share, once per backend: 3D boxes and grids over them, rectangles."""
