"""Overlap of axis-aligned rectangles (x1, y1, x2, y2): one definition per backend."""
