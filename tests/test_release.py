"""What a release is made of fits together: the README for package indexes, pinned tools, commands of the workflow."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_of_package_indexes_has_no_relative_links(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = ModuleType("hatchling.metadata.plugin.interface")  # of the build alone
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.syspath_prepend(str(ROOT))
    from hatch_build import absolute

    text = absolute(read("README.md"), "https://host/triops")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert "](https://host/triops/raw/main/docs/images/scene.png)" in text
    assert "](https://host/triops/blob/main/docs/dropin.md)" in text


def test_the_workflow_runs_commands_that_make_has() -> None:
    commands = re.findall(r"run: make ([\w-]+)", read(".github/workflows/ci.yml"))
    assert {"demo", "test"} <= {*commands}
    assert all(re.search(rf"^{command}:", read("Makefile"), re.MULTILINE) for command in commands)
    assert {*re.findall(r"^make ([\w-]+)", read("README.md"), re.MULTILINE)} <= {*commands}, "the README's commands"


def test_the_release_is_described() -> None:
    from triops import __version__

    found = re.search(rf"^## {re.escape(__version__)} .*?(?=^## )", read("CHANGELOG.md"), re.MULTILINE | re.DOTALL)
    assert found is not None
    summary = found[0].split("### ")[0]
    assert len(summary.split()) > 40, "a summary comes before the topics"


def test_pre_commit_has_the_ruff_of_the_development_environment() -> None:
    versions = {*re.findall(r"ruff==([\d.]+)", read(".pre-commit-config.yaml") + read("constraints.txt"))}
    assert len(versions) == 1


def test_the_container_holds_what_the_package_is_built_of() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", read("Dockerfile"), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert all((ROOT / name).exists() for name in names)
    assert {f"!{name}" for name in names} == {*read(".dockerignore").split()} - {"**"}


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", read(name))
    assert targets
    assert all((ROOT / target).exists() for target in targets)
