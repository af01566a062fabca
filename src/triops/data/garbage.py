"""Python's garbage collector, where it only costs time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Pause the garbage collector where a record per box is made and kept.

    It would walk over every object of the process, torch's included, for longer than the records take; and afterwards
    over all that was made meanwhile, unless that counts as old.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            if gc.get_freeze_count() == 0:  # nobody else's objects are set aside
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()
