"""Which torchsparse a program was written for: up to 2.0 coordinates have the batch in their last column and count in
voxels of the input at every stride; in 2.1 they have it in the first, and count in strides.

Every sparse tensor carries its generation, `OLD` or `NEW`, and so do the tensors made of it. Of a tensor that a program
makes it is, in this order, what `use` or TRIOPS_TORCHSPARSE says; 2.1 where a `spatial_range` is given; what is known
of the package that makes it; the older one where anybody has asked for a name that only this had; 2.1.
"""

from __future__ import annotations

import sys
import warnings

from torch import Tensor

from triops import _environment

OLD, NEW = "1.4", "2.1"

PACKAGES = {"mmdet3d": OLD}
_old_names_asked = False
_said: str | None = _environment.torchsparse_generation()
_looked = False  # whether the columns of a tensor were looked at
_OURS = "triops.compat.torchsparse"


def use(version: str | None) -> None:
    """Take every tensor made from now on for one of torchsparse "1.4" (and 1.x, 2.0) or "2.1"; None: as found out.

    >>> import triops.compat.torchsparse as torchsparse
    >>> torchsparse.use("1.4")
    >>> torchsparse.use(None)
    """
    global _said
    if version not in (OLD, NEW, None):
        raise ValueError(f"torchsparse.use: version must be '{OLD}', '{NEW}' or None, got {version!r}")
    _said = version


def chosen() -> str | None:
    """What the user has said, if anything."""
    return _said


def of_caller() -> str:
    """The generation of the code that called into this package."""
    if _said is not None:
        return _said
    return PACKAGES.get(_package_of_caller(), OLD if _old_names_asked else NEW)


def note_old_name() -> None:
    """The program asks for a name that 2.1 does not have."""
    global _old_names_asked
    _old_names_asked = True


def _package_of_caller() -> str:
    frame = sys._getframe(1)
    while True:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_OURS) or frame.f_back is None:
            return name.partition(".")[0]
        frame = frame.f_back


def look_at_columns(coords: Tensor, generation: str) -> None:
    """Warn, once per process, where nobody has said the generation and the batch seems to be in the other column."""
    global _looked
    if _looked or _said is not None:
        return
    _looked = True
    batch, other = (coords[:, 0], coords[:, -1]) if generation == NEW else (coords[:, -1], coords[:, 0])
    if _like_a_batch(other) and not _like_a_batch(batch):
        theirs = "first" if generation == NEW else "last"
        warnings.warn(
            f"torchsparse: these are taken for coordinates of torchsparse {generation}, with the batch in the {theirs} "
            "column, but it seems to be in the other one. Say which interface the program was written for: "
            f"TRIOPS_TORCHSPARSE={OLD if generation == NEW else NEW} (or {generation}, which ends this warning)",
            RuntimeWarning,
            stacklevel=2,
        )


def _like_a_batch(column: Tensor) -> bool:
    return column.shape[0] < 2 or bool((column[0] == 0) & (column[1:] >= column[:-1]).all())
