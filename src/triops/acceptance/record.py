"""`TRIOPS_RECORD=DIR`: a running program writes each operator call to a case file in DIR.

The inputs are on disk before the kernel starts, so that even a crash leaves the case that caused it.
`TRIOPS_RECORD_LIMIT=COUNT` or `COUNT,BYTES` (`200,500MB`) ends the recording in time; 1000 calls or 1 GB otherwise.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from triops import _environment, _op
from triops._op import Operator, describe, log
from triops._sample import bytes_of, tensors_of
from triops.acceptance import case_file


class Recorder:
    """Runs kernels for the operator mechanism, and writes down what went in and what came out."""

    def __init__(self, folder: Path, most_calls: int, most_bytes: int) -> None:
        case_file.require_safetensors("TRIOPS_RECORD")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            """It can be written."""
        self.folder, self.most_calls, self.most_bytes = folder, most_calls, most_bytes
        self.calls = self.bytes = 0
        self._full = False
        self._lock = threading.Lock()

    def __call__(self, operator: Operator, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        number = self._number(operator, args)
        if number is None:
            return kernel(*args)
        path = self.folder / f"{number:05d}-{operator.name}-{os.getpid()}{case_file.SUFFIX}"
        device = next((str(t.device) for t in tensors_of(args)), "none")
        about = {"call": describe(operator.parameters, args), "device": device, "torch": torch.__version__}
        case_file.write(path, case_file.Case(operator.name, args, None, about))
        out = kernel(*args)
        case_file.write(path, case_file.Case(operator.name, args, tensors_of(out), about))
        with self._lock:
            self.bytes += bytes_of(out)
        return out

    def _number(self, operator: Operator, args: tuple[Any, ...]) -> int | None:
        """The number of this call among the recorded ones; None: it is not recorded."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None  # nothing can be copied to the host inside a CUDA graph
        size = bytes_of(args)
        with self._lock:
            if self.calls >= self.most_calls or self.bytes + size > self.most_bytes:
                if not self._full:
                    self._full = True
                    log.warning(
                        "TRIOPS_RECORD: %d calls, %.1f MB written to %s; the limit is reached, later calls are not "
                        "recorded (TRIOPS_RECORD_LIMIT=COUNT,BYTES)", self.calls, self.bytes / 1e6, self.folder,
                    )  # fmt: skip
                return None
            self.calls += 1
            self.bytes += size
            return self.calls


def start(folder: str) -> None:
    """Called when `triops` is imported with TRIOPS_RECORD set."""
    try:
        _op.recorder = Recorder(Path(folder), *_environment.record_limit())
    except OSError as error:
        raise ValueError(f"TRIOPS_RECORD must be a folder that can be written, got {folder!r}: {error}") from None
