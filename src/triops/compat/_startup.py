"""Activation for every program of one Python, by a file in its site-packages, and what `triops info` says of it."""

from __future__ import annotations

import sysconfig
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from triops.compat import _finder

FILE = "triops_compat.pth"

# One line that Python runs at start. Where triops has been removed or moved meanwhile, it does nothing.
LINE = (
    "import os, sys, types; p = {path!r}; m = types.ModuleType({name!r}); m.__file__ = p; "
    "os.path.isfile(p) and (sys.modules.setdefault(m.__name__, m), "
    "exec(compile(open(p, encoding='utf-8').read(), p, 'exec'), m.__dict__), m.install('mmcv', 'pcdet'))\n"
)


def startup_file(folder: str | Path | None = None) -> Path:
    return Path(folder or sysconfig.get_path("purelib")) / FILE


def activate(folder: str | Path | None = None) -> Path:
    """From the next start of Python on, `mmcv` and `pcdet` find their extension modules in triops, where nobody
    compiled them. Programs that import neither pay nothing: triops and torch are imported only when asked for.

    Args:
        folder: site-packages of the Python that runs, unless another is given.

    Returns:
        The file that was written, which `deactivate` removes.
    """
    target = startup_file(folder)
    target.write_text(LINE.format(path=str(Path(_finder.__file__).resolve()), name=_finder.__name__), encoding="utf-8")
    return target


def deactivate(folder: str | Path | None = None) -> bool:
    """Undo `activate`. Returns whether there was anything to undo."""
    target = startup_file(folder)
    found = target.is_file()
    target.unlink(missing_ok=True)
    return found


def status() -> list[str]:
    """Whether extension modules are supplied, and whose `mmcv._ext` a program gets. Imports no other library."""
    finder = _finder.installed()
    here = ", ".join(sorted(finder.libraries)) if finder else "no"
    lines = [
        f"supplied in this process: {here}",
        f"supplied at every start (`triops activate`): {'yes' if startup_file().is_file() else 'no'}",
    ]
    mmcv = find_spec("mmcv")
    if mmcv is None:
        return [*lines, "mmcv._ext: mmcv is not installed"]
    compiled = PathFinder.find_spec("mmcv._ext", mmcv.submodule_search_locations)
    if compiled is not None:
        owner = f"mmcv's own, {compiled.origin}"
    elif finder is not None and "mmcv" in finder.libraries:
        owner = "of triops"
    else:
        owner = "none. Remedy: `import triops.compat.mmcv` before mmcv.ops, or `triops activate`"
    return [*lines, f"mmcv._ext: {owner}"]
