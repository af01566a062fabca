"""The reduced test suite (what is marked `versions`) over pinned environments; outcomes go to outcomes.json.

Usage: python tests_versions/run.py [--keep] [NAME ...]

An environment is made in .venv-versions, used and removed again: torch for Linux comes with gigabytes of CUDA
libraries, so there is never more than one at a time unless --keep asks for it. Interpreters are looked up as
python3.10, python3.11, ... in the PATH.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-versions"
OUTCOMES = Path(__file__).with_name("outcomes.json")
TOOLS = ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100"]


class Environment(NamedTuple):
    python: str
    torch: str
    triton: str
    numpy: str
    numba: str

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-python-{self.python}"


# The oldest, some in between, the newest. The interpreters of Triton up to 3.6 cannot do with NumPy 2.4.
MATRIX = [
    Environment("3.10", "2.8.0", "3.4.0", "2.2.6", "0.68.1"),
    Environment("3.12", "2.9.1", "3.5.1", "2.3.5", "0.68.1"),
    Environment("3.12", "2.11.0", "3.6.0", "2.3.5", "0.68.1"),
    Environment("3.11", "2.13.0", "3.7.1", "2.4.6", "0.68.1"),
    Environment("3.13", "2.15.0", "3.9.0", "2.5.4", "0.68.1"),
    Environment("3.14", "2.15.0", "3.9.0", "2.5.4", "0.68.1"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(e.name for e in MATRIX))
    parser.add_argument("--keep", action="store_true", help="leave the environments for the next run")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - {e.name for e in MATRIX}
    if unknown:
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    green = True
    for environment in MATRIX:
        if not chosen.names or environment.name in chosen.names:
            green = test(environment, chosen.keep) and green
    print(table(read()))
    return 0 if green else 1


def test(environment: Environment, keep: bool) -> bool:
    """Whether all tests passed; the outcome is stored either way."""
    interpreter = shutil.which(f"python{environment.python}")
    if interpreter is None:
        print(f"{environment.name}: not run, as there is no python{environment.python} in the PATH")
        return False
    folder = FOLDER / environment.name
    try:
        python = install(environment, interpreter, folder)
        outcome = run(python, folder)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    entries = {(e["torch"], e["python"]): e for e in read()}
    entries[environment.torch, environment.python] = {
        **environment._asdict(), "date": str(datetime.date.today()), **outcome
    }  # fmt: skip
    ordered = [entries[e.torch, e.python] for e in MATRIX if (e.torch, e.python) in entries]
    OUTCOMES.write_text(json.dumps(ordered, indent=2) + "\n")
    return outcome["passed"] > 0 and outcome["failed"] == 0


def install(environment: Environment, interpreter: str, folder: Path) -> Path:
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.exists() and done.read_text() == str(environment):
        return python
    print(f"{environment.name}: installing into {folder}", flush=True)
    subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    pinned = [f"{name}=={version}" for name, version in environment._asdict().items() if name != "python"]
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    # Together, so that pip compares the pins with the ranges that triops declares.
    subprocess.run([*pip, "--editable", f"{ROOT}[cli,viz]", *TOOLS, *pinned], check=True)
    done.write_text(str(environment))
    return python


def run(python: Path, folder: Path) -> dict[str, Any]:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "tests", "-m", "versions", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    if not report.exists():
        print(f"pytest ended with {done.returncode} and without a report")
        return {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return {
        "passed": total - failed - errors - skipped,
        "failed": failed + errors,
        "skipped": skipped,
        "seconds": round(sum(float(s.get("time", 0)) for s in suites)),
    }


def read() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else []
    return entries


def table(entries: list[dict[str, Any]]) -> str:
    """The support matrix, as the README shows it."""
    columns = ["python", "torch", "triton", "numpy", "numba", "passed", "failed", "date"]
    head = ["Python", "torch", "Triton", "NumPy", "Numba", "passed", "failed", "run on"]
    rows = [head, ["---"] * len(head), *([str(e[c]) for c in columns] for e in entries)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
