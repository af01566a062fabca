"""spconv without a wheel: importing this module supplies `spconv` and `cumm`, unless they are installed.

Import it before them. `import spconv.pytorch` then gives `triops.spconv.pytorch`; docs/dropin/spconv.md says what
differs.
"""

from triops.compat import _finder

_finder.install("spconv", "cumm")
