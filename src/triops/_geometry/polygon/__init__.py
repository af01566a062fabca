"""Convex polygons: the hull of points, and the area that two hulls share."""
