"""Pointcept's `pointops`: importing this module supplies names for it, so that Pointcept imports without a compiler.

None of its operators is there yet; each says so when it is called. SparseUNet and Point Transformer V3 call none.
"""

from triops.compat import _finder
from triops.compat._extension import Extension


def extension(name: str) -> Extension:
    return Extension(name, {})


_finder.install("pointops")
