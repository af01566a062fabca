"""Faces of other libraries: their compiled extension modules, supplied by triops where nobody compiled them.

`import triops.compat.mmcv` or `import triops.compat.pcdet` does it for the running program, `triops activate` for every
program of this Python. Importing triops alone, or this package, changes nothing.
"""

from triops.compat._startup import activate, deactivate

__all__ = ["activate", "deactivate"]
