"""Import hooks that supply extension modules which nothing else supplies.

After `triops activate` every start of Python runs this file, which must cost next to nothing to programs that import
neither mmcv nor pcdet. So triops is imported when an extension module is, and of the standard library only what every
start has loaded anyway: no `typing`, no `importlib.abc`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

# The two functions in it ask for the current CUDA device before they look at their tensors.
CUDA_ONLY = "mmcv.ops.points_in_boxes"


def face(fullname: str) -> str | None:
    """The module of triops that stands in for an extension module; None for every other module."""
    package, _, leaf = fullname.rpartition(".")
    if fullname == "mmcv._ext":
        return "triops.compat.mmcv"
    if package.startswith("pcdet.ops.") and leaf.endswith(("_cuda", "_ext")):
        return "triops.compat.pcdet"
    return None


class ExtensionLoader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = import_module(str(face(spec.name))).extension(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module is complete as created."""


class ExtensionFinder:
    """Stands last in `sys.meta_path`, so that a compiled module, which the others find, wins."""

    def __init__(self) -> None:
        self.libraries: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if face(fullname) is None or fullname.partition(".")[0] not in self.libraries:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # came after us, and may know better
            if finder.find_spec(fullname, path, target) is not None:
                return None
        return ModuleSpec(fullname, ExtensionLoader(), origin="triops")  # type: ignore[arg-type]  # the old protocol


class WrapperLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        extension: Any = getattr(module, "ext_module", None)
        if extension is not None and is_ours(extension):
            import_module("triops.compat.mmcv").replace_wrappers(module)


class WrapperFinder:
    """Stands first in `sys.meta_path`: has the wrappers replaced as soon as their module is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != CUDA_ONLY:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = WrapperLoader(spec.loader.name, spec.loader.path)
        return spec


def is_ours(module: ModuleType) -> bool:
    return module.__spec__ is not None and isinstance(module.__spec__.loader, ExtensionLoader)


def installed() -> ExtensionFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, ExtensionFinder)), None)


def install(*libraries: str) -> None:
    """Supply the extension modules of "mmcv", "pcdet" or both from now on."""
    finder = installed()
    if finder is None:
        finder = ExtensionFinder()
        sys.meta_path.append(finder)
        sys.meta_path.insert(0, WrapperFinder())
    finder.libraries.update(libraries)


def uninstall() -> None:
    """Supply nothing any more. Modules that are imported already stay."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, ExtensionFinder | WrapperFinder)]
