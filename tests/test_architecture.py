"""Facts about the package's imports: what is shared has a room, and imports go one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import triops
from triops._cpu.cache import is_part_of_the_key

PACKAGE = Path(triops.__file__).parent
MODULES = {
    ".".join(["triops", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
SHARED_OPERATORS = ("rulebook",)  # rooms under ops/ that hold what several operators stand on

# Each layer may import itself and those before it.
LAYERS = ["core", "ops", "nn", "spconv", "compat", "top"]


def layer_of(module: str) -> str:
    first = module.split(".")[1] if "." in module else ""
    if first in ("ops", "nn", "spconv", "compat"):
        return first
    core = first.startswith("_") and first not in ("_info", "_bench", "_demo", "_warmup")
    return "core" if core or first == "scenes" else "top"


def imports_of(module: str) -> Iterator[tuple[str, str, int]]:
    """(module, name, line) of everything that a module imports from the package, inside functions too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "triops":
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule, "", node.lineno) if submodule in MODULES else (node.module, alias.name, node.lineno)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "triops":
                    yield alias.name, "", node.lineno


def operator_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["triops", "ops"] and len(parts) > 2 else None


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    own = LAYERS.index(layer_of(module))
    for other, name, line in imports_of(module):
        if other == "triops" or module == "triops":
            continue  # the public functions are for everybody, and the package itself puts everything together
        assert LAYERS.index(layer_of(other)) <= own, f"{module}:{line} imports {other} {name}, which stands above it"


@pytest.mark.parametrize("module", [m for m in MODULES if operator_of(m)])
def test_no_operator_takes_another_operators_private_names(module: str) -> None:
    for other, name, line in imports_of(module):
        owner = operator_of(other)
        if owner is None or owner == operator_of(module):
            continue
        at = f"{module}:{line} imports {name or other}"
        assert not name.startswith("_"), f"{at}, a private name of {owner}"
        if owner not in SHARED_OPERATORS and not module.endswith(".samples"):
            assert other == f"triops.ops.{owner}", f"{at} from inside of {owner}: give it a room of its own"


def test_what_cpu_kernels_are_compiled_from_is_part_of_their_cache_key() -> None:
    """A constant of any file that a kernel imports, directly or not, is frozen into what the cache holds."""
    kernels = [
        m for m in MODULES if any((other, name) == ("triops._cpu.jit", "jit") for other, name, _ in imports_of(m))
    ]
    assert len(kernels) > 40
    todo, seen = list(kernels), set[str]()
    while todo:
        module = todo.pop()
        if module in MODULES and module != "triops" and module not in seen:
            seen.add(module)
            todo += [other for other, _, _ in imports_of(module)]
    assert not [m for m in seen if not is_part_of_the_key(str(MODULES[m].relative_to(PACKAGE)))]


def test_helpers_of_kernels_that_two_operators_define_alike_have_one_home() -> None:
    """Functions of the same name and the same body in two files of kernels of one backend."""
    seen: dict[tuple[str, str], str] = {}
    for module, path in MODULES.items():
        if not path.name.endswith(("cpu.py", "gpu.py")):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                body = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
                key = path.name[-6:], "\n".join([node.name, ast.dump(node.args), *(ast.dump(n) for n in body)])
                assert key not in seen, f"{node.name} stands in {seen[key]} and in {module}"
                seen[key] = module


def test_the_core_runs_without_what_stands_on_it() -> None:
    """By name, since this is what a newcomer asks first."""
    for module in MODULES:
        if layer_of(module) in ("core", "ops"):
            for other, _, line in imports_of(module):
                assert not other.startswith(("triops.compat", "triops.acceptance", "triops.cli")), f"{module}:{line}"
