"""Records of the frames that are done: a line per frame, in as many files as there were processes.

A process appends to a file of its own: one write per frame, where a file per frame would have to be created and
renamed. A line that does not end was being written when its process was killed, and does not count. When nothing is
missing, all records go into one file, in the order of the frames: the same bytes, whoever wrote them.
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Iterable, Mapping

from triops.data import files

_ALL = "all.records"  # before the others in the order of names: a later record of a frame replaces an earlier one
# The file of this process: of a forked one too, on any machine, and behind those of earlier runs.
_STARTED, _PROCESS = f"{time.time_ns():020}", uuid.uuid4().hex
_numbers = itertools.count()


def append(folder: str, key: str, record: str) -> None:
    """Add the record of a frame.

    Args:
        folder: of the records; it exists.
        key: without a space.
        record: one line.
    """
    # An empty line first, so that what a failed write may have left does not run into this one.
    name, line = f"part-{_STARTED}-{os.getpid()}-{_PROCESS}", f"\n{key} {record}\n".encode()
    if files.is_url(folder):  # a store in which nothing can be appended
        files.write(folder, [(f"{name}-{next(_numbers):09}.records", line)])
    else:
        files.append(f"{folder}/{name}.records", line)


def read(folder: str) -> dict[str, str]:
    """The records of all frames that have one, by their keys."""
    while True:
        try:
            parts = [files.read(files.join(folder, name)) for name in _names(folder)]
        except FileNotFoundError:  # another process has just put them together
            continue
        whole = (line for part in parts for line in part.decode("utf-8", "replace").split("\n")[:-1])
        return {key: record for key, _, record in (line.partition(" ") for line in whole if line)}


def put_together(folder: str, keys: Iterable[str], records: Mapping[str, str], temporary: str) -> None:
    """Replace all files by one with the records of the given frames. Only when no frame is missing."""
    others = [name for name in _names(folder) if name != _ALL]
    data = "".join(f"{key} {records[key]}\n" for key in keys).encode()
    files.write_whole(files.join(folder, _ALL), data, temporary)
    for name in others:
        files.remove(files.join(folder, name))


def _names(folder: str) -> list[str]:
    return sorted(name for name in files.names(folder) if name.endswith(".records"))
