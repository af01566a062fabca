"""A bird's-eye grid over boxes, so that a point is tested only against those of its cell."""
