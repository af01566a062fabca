"""`TRIOPS_RECORD=DIR`: a running program writes its operator calls to case files in DIR, each different call once.

The inputs are on disk before the kernel starts, so that even a crash leaves the case that caused it. Calls are the same
if operator, parameters and data are; with `TRIOPS_RECORD_MODE=shapes`, which writes no data, if operator, parameters,
shapes, dtypes and strides are. How often each was called is in `calls-PID.json`.
`TRIOPS_RECORD_LIMIT=COUNT` or `COUNT,BYTES` (`200,500MB`) ends the recording in time; 1000 cases or 1 GB otherwise.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from triops import _environment, _op
from triops._op import Operator, describe, log
from triops._sample import bytes_of, tensors_of
from triops.acceptance import case_file

COUNTS = "calls-{}.json"


class Recorder:
    """Runs kernels for the operator mechanism, and writes down what went in and what came out."""

    def __init__(self, folder: Path, most_cases: int, most_bytes: int, *, shapes_only: bool = False) -> None:
        if not shapes_only:
            case_file.require_safetensors("TRIOPS_RECORD")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            """It can be written."""
        self.folder, self.most_cases, self.most_bytes, self.shapes_only = folder, most_cases, most_bytes, shapes_only
        self.cases = self.bytes = 0
        self._names: dict[bytes, str] = {}  # of the files that hold a call
        self._counts: Counter[str] = Counter()
        self._process, self._next_save = os.getpid(), 1
        self._full = False
        self._lock = threading.Lock()

    def __call__(self, operator: Operator, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return kernel(*args)  # nothing can be copied to the host inside a CUDA graph
        path = self._new_file(operator, args)
        if path is None:
            return kernel(*args)
        device = next((str(t.device) for t in tensors_of(args)), "none")
        about = {"call": describe(operator.parameters, args), "device": device, "torch": torch.__version__}
        try:
            if self.shapes_only:
                case_file.write_described(path, operator.name, args, self.cases, about)
            else:
                case_file.write(path, case_file.Case(operator.name, args, None, about))
        except OSError as error:
            self._give_up(error)
            return kernel(*args)
        out = kernel(*args)
        if self.shapes_only:
            return out
        try:
            case_file.write(path, case_file.Case(operator.name, args, tensors_of(out), about))
        except OSError as error:
            self._give_up(error)
        with self._lock:
            self.bytes += bytes_of(out)
        return out

    def save_counts(self) -> None:
        """Write how often each case was called by this process."""
        if self._counts and os.getpid() == self._process and self.folder.is_dir():
            text = json.dumps(dict(sorted(self._counts.items())), indent=1)
            try:
                case_file.write_whole(self.folder / COUNTS.format(self._process), f"{text}\n".encode())
            except OSError as error:
                self._give_up(error)

    def _new_file(self, operator: Operator, args: tuple[Any, ...]) -> Path | None:
        """Where to write this call; None: it is there already, or the limit is reached. Counts it."""
        key = case_file.digest(operator.name, args, self.shapes_only)
        size = 0 if self.shapes_only else bytes_of(args)
        with self._lock:
            if self._process != os.getpid():  # a forked process counts its own calls
                self._process, self._next_save = os.getpid(), 1
                self._counts.clear()
            name, new = self._names.get(key), False
            if name is None:
                if self.cases >= self.most_cases or self.bytes + size > self.most_bytes:
                    self._say_full()
                    return None
                self.cases += 1
                self.bytes += size
                suffix = case_file.SHAPES_SUFFIX if self.shapes_only else case_file.SUFFIX
                name, new = f"{self.cases:05d}-{operator.name}-{os.getpid()}{suffix}", True
                self._names[key] = name
            self._counts[name] += 1
            if self._counts.total() >= self._next_save:  # now and then: a program that is killed says no goodbye
                self._next_save *= 2
                self.save_counts()
            return self.folder / name if new else None

    def _give_up(self, error: OSError) -> None:
        """The program that is recorded goes on, whatever becomes of the disk."""
        self.most_cases = 0
        if not self._full:
            self._full = True
            log.warning("TRIOPS_RECORD: %s cannot be written (%s); later calls are not recorded", self.folder, error)

    def _say_full(self) -> None:
        if not self._full:
            self._full = True
            log.warning(
                "TRIOPS_RECORD: %d cases, %.1f MB written to %s; the limit is reached, later ones are not recorded "
                "(TRIOPS_RECORD_LIMIT=COUNT,BYTES)", self.cases, self.bytes / 1e6, self.folder,
            )  # fmt: skip


def counts_in(folder: Path) -> Counter[str]:
    """How often each case file of a folder was called, by all processes together. Damaged counts are skipped."""
    total: Counter[str] = Counter()
    for path in folder.glob(COUNTS.format("*")):
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            total.update({name: n for name, n in found.items() if type(n) is int and n > 0})
    return total


def start(folder: str) -> None:
    """Called when `triops` is imported with TRIOPS_RECORD set."""
    try:
        recorder = Recorder(
            Path(folder), *_environment.record_limit(), shapes_only=_environment.record_shapes_only()
        )  # fmt: skip
    except OSError as error:
        raise ValueError(f"TRIOPS_RECORD must be a folder that can be written, got {folder!r}: {error}") from None
    atexit.register(recorder.save_counts)
    _op.recorder = recorder
