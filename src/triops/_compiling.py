"""A line for whoever waits: kernels are being compiled, and will be only once.

Compilation is not heard of until it has taken two seconds in silence. The line then goes to stderr where that is a
terminal, and else to the logger "triops" at level INFO; the command line shows it in its own way.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SILENCE = 2.0  # seconds of compilation before the first line, and between two

show: Callable[[str], None] | None = None  # what shows a line; None: as above

count = 0  # compilations of this process so far

_lock = threading.Lock()
_silent = 0.0  # seconds of finished compilations since the last line
_last_line = 0.0  # when it was shown
_said: set[str] = set()


class _Thread(threading.local):
    depth = 0  # a kernel's helpers are compiled while the kernel is
    since = 0.0
    timer = threading.Timer(0.0, print)  # not started


_thread = _Thread()


@contextmanager
def compiling(module: str, processor: str) -> Iterator[None]:
    """Around the compilation of a kernel of this module, for the "CPU" or the "GPU"."""
    started(module, processor)
    try:
        yield
    finally:
        ended()


@contextmanager
def shown_by(how: Callable[[str], None]) -> Iterator[None]:
    """Within, lines are shown in this way."""
    global show
    before, show = show, how
    try:
        yield
    finally:
        show = before


def started(module: str, processor: str) -> None:
    global count
    _thread.depth += 1
    if _thread.depth == 1:
        count += 1
        text = f"compiling {_subject(module)} for this {processor}, once"
        _thread.since = time.monotonic()
        _thread.timer = threading.Timer(max(SILENCE - _silent, 0.0), _say, (text,))
        _thread.timer.daemon = True
        _thread.timer.start()


def ended() -> None:
    global _silent
    _thread.depth -= 1
    if _thread.depth == 0:
        _thread.timer.cancel()
        with _lock:
            _silent += time.monotonic() - max(_thread.since, _last_line)


def _subject(module: str) -> str:
    """The operator that a module belongs to: its folder under `ops`. Of a module that operators share, the caller's.

    >>> _subject("triops.ops.nms.cpu"), _subject("triops._cpu.sort")
    ('nms', 'kernels')
    """
    for name in (module, *_callers()):
        parts = name.split(".")
        if parts[:2] == ["triops", "ops"] and len(parts) > 2:
            return parts[2]
    return "kernels"


def _callers() -> Iterator[str]:
    """The modules on this thread's stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back


def _say(text: str) -> None:
    global _silent, _last_line
    with _lock:
        _silent, _last_line = 0.0, time.monotonic()
        if text in _said:
            return
        _said.add(text)
    if show is not None:
        show(text)
    elif sys.stderr is not None and sys.stderr.isatty():
        print(f"triops: {text}", file=sys.stderr, flush=True)
    else:
        logging.getLogger("triops").info("%s", text)
