"""The gate between two runs on one machine: what a case took before, in time and workspace, and what it may take now.

A baseline file has the fields of a report.json that the gate reads, so that a report.json is a baseline, too. On a CPU
times of two runs cannot be compared: another program takes its share. There a case is timed in turns with a yardstick,
a fixed piece of work in NumPy on as many threads, and the ratio of the two is compared.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triops.acceptance.standard import is_regression

FORMAT = 1
_FIELDS = ("seconds", "ratio", "noise", "workspace")

Key = tuple[str, ...]  # operator, case, backend, dtype


class BaselineError(ValueError):
    """A file that this run cannot be compared with."""


@dataclass(frozen=True)
class Measured:
    seconds: float
    ratio: float | None = None  # to the yardstick, on a CPU
    noise: float = 0.0  # of the ratio, as a share
    workspace: int | None = None  # bytes

    @property
    def yardstick(self) -> float:
        """Seconds that the yardstick took beside the case."""
        return self.seconds / self.ratio if self.ratio else 1.0


def slower(before: Measured, now: Measured) -> float | None:
    """The time that the case should have taken, if it took longer; None where it did not.

    Longer is: by more than 5 us below 100 us, by more than 4 % above, and on a CPU also by more than the noise of both
    ratios.

    >>> slower(Measured(1e-3), Measured(1.05e-3)), slower(Measured(1e-3), Measured(1.03e-3))
    (0.001, None)
    >>> slower(Measured(1e-3, ratio=2.0), Measured(2e-3, ratio=2.0))  # the yardstick, too, took twice as long
    """
    expected = before.ratio * now.yardstick if before.ratio and now.ratio else before.seconds
    explained = expected * (1 + before.noise + now.noise)
    return expected if is_regression(expected, now.seconds) and now.seconds > explained else None


def larger(before: Measured, now: Measured) -> bool:
    """Whether the workspace grew by more than 4 % and 64 KiB; below that, Python's own objects may be seen."""
    if before.workspace is None or now.workspace is None:
        return False
    return now.workspace - before.workspace > max(0.04 * before.workspace, 2**16)


def read(path: Path, device: str, environment: dict[str, str]) -> dict[Key, Measured]:
    """What each case of a baseline file or a report.json took; refused where it is of another machine."""
    try:
        found = json.loads(path.read_text())
        theirs, theirs_on = found["environment"]["cpu" if device == "cpu" else "gpu"], found["device"]
        cases = {_key(c): _measured(c) for c in found["cases"] if c["seconds"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise BaselineError(f"{path}: not a baseline or report.json of `triops check` ({reason})") from None
    ours = environment["cpu" if device == "cpu" else "gpu"]
    if theirs_on != device or theirs != ours:
        raise BaselineError(f"{path} was taken on {theirs_on}, {theirs}; this is {device}, {ours}: no comparison")
    return cases


def save(path: Path, device: str, environment: dict[str, str], cases: dict[Key, Measured]) -> None:
    """Write a baseline; cases that the file holds and this run did not measure stay.

    Raises:
        BaselineError: the file is there and of another machine, or no baseline at all.
    """
    kept = read(path, device, environment) if path.exists() else {}
    whole = {
        "format": FORMAT, "device": device, "environment": environment,
        "cases": [_row(key, measured) for key, measured in sorted({**kept, **cases}.items())],
    }  # fmt: skip
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(whole, indent=1) + "\n")
    partial.replace(path)


def _row(key: Key, measured: Measured) -> dict[str, Any]:
    operator, case, backend, dtype = key
    numbers = {name: getattr(measured, name) for name in _FIELDS}
    return {"operator": operator, "case": case, "backend": backend, "dtype": dtype, **numbers}


def _key(case: dict[str, Any]) -> Key:
    return (case["operator"], case["case"], case["backend"], case["dtype"])


def _measured(case: dict[str, Any]) -> Measured:
    ratio, workspace = case.get("ratio"), case.get("workspace")
    return Measured(
        float(case["seconds"]), None if ratio is None else float(ratio), float(case.get("noise") or 0),
        None if workspace is None else int(workspace),
    )  # fmt: skip
