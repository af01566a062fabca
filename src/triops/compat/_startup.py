"""Activation for every program of one Python, by a file in its site-packages, and what `triops info` says of it."""

from __future__ import annotations

import py_compile
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

from triops.compat import _finder

FILE = "triops_compat.pth"
EXTENSIONS = ("mmcv._ext", "pcdet.ops.iou3d_nms.iou3d_nms_cuda")  # each stands for all of its library

# One line that Python runs at start, with modules that are loaded by then; compiled once, as any import. In a virtual
# environment some versions of Python run it twice, and there must be one finder. Where triops has been removed or moved
# meanwhile, it does nothing.
LINE = (
    "import os, sys, _frozen_importlib_external as e; p = {path!r}; n = {name!r}; m = type(sys)(n); m.__file__ = p; "
    "os.path.isfile(p) and (sys.modules.setdefault(n, m) is not m "
    "or exec(e.SourceFileLoader(n, p).get_code(n), m.__dict__), "
    "sys.modules[n].install(*sys.modules[n].LIBRARIES))\n"
)


def startup_file(folder: str | Path | None = None) -> Path:
    return Path(folder or sysconfig.get_path("purelib")) / FILE


def activate(folder: str | Path | None = None) -> Path:
    """From the next start of Python on, `mmcv` and `pcdet` find their extension modules in triops, where nobody
    compiled them, and `import spconv` works where it is not installed. Programs that import none of them pay nothing:
    triops and torch are imported only when asked for.

    Args:
        folder: site-packages of the Python that runs, unless another is given.

    Returns:
        The file that was written, which `deactivate` removes.
    """
    target, finder = startup_file(folder), str(Path(_finder.__file__).resolve())
    target.write_text(LINE.format(path=finder, name=_finder.__name__), encoding="utf-8")
    # Some installers do not compile, and with PYTHONDONTWRITEBYTECODE every start would do it again.
    with suppress(OSError):
        py_compile.compile(finder)
    return target


def deactivate(folder: str | Path | None = None) -> bool:
    """Undo `activate`. Returns whether there was anything to undo."""
    target = startup_file(folder)
    found = target.is_file()
    target.unlink(missing_ok=True)
    return found


def status() -> list[str]:
    """Whether modules are supplied, and whose a program gets of each library. Imports no other library."""
    finder = _finder.installed()
    here = ", ".join(sorted(finder.libraries)) if finder else "no"
    lines = [
        f"supplied in this process: {here}",
        f"supplied at every start (`triops activate`): {'yes' if startup_file().is_file() else 'no'}",
    ]
    lines += [f"{module}: {_extension_owner(module)}" for module in EXTENSIONS]
    beside = ("cumm", "MinkowskiEngineBackend")  # which come and go with another
    packages = [name for name in _finder.PACKAGES if name not in beside]
    lines += [f"{name}: {_owner(name, _found_elsewhere(name))}" for name in packages]
    return [*lines, f"torchvision: {_torchvision_operators()}"]


def _found_elsewhere(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """What a program would import without triops."""
    for finder in sys.meta_path:
        if not isinstance(finder, _finder.ExtensionFinder | _finder.WrapperFinder):
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None


def _extension_owner(module: str) -> str:
    library, *folders, _ = module.split(".")
    package = _found_elsewhere(library)
    if package is None:
        return f"{library} is not installed"
    places = [str(Path(place, *folders)) for place in package.submodule_search_locations or ()]
    return _owner(library, _found_elsewhere(module, places))


def _torchvision_operators() -> str:
    """Whether its own can be loaded only its import would say."""
    if _found_elsewhere("torchvision") is None:
        return "torchvision is not installed"
    finder = _finder.installed()
    if finder is not None and "torchvision" in finder.libraries:
        return "its own operators where they can be loaded, else those of triops"
    return "its own operators. Remedy where they do not load: `import triops.compat.torchvision`, or `triops activate`"


def _owner(library: str, own: ModuleSpec | None) -> str:
    finder = _finder.installed()
    if own is not None:
        return f"{library}'s own, {own.origin}"
    if finder is not None and library in finder.libraries:
        return "of triops"
    module = "minkowski_engine" if library == "MinkowskiEngine" else library
    return f"none. Remedy: `import triops.compat.{module}` before it, or `triops activate`"
