"""A pinned counter: how a number that only a GPU knows, the size of a result, gets to the host."""

from __future__ import annotations

import threading

import torch

from triops._gpu.launch import is_compiling

SPINS = 2000  # about 0.2 ms
ANY_NUMBER = 2  # of sites and the like: batch norm wants more than one


class PinnedCounter:
    """A number that a kernel writes straight into the host's memory, and the one synchronisation that waits for it."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.number = torch.empty(1, dtype=torch.int32, device="cpu" if cuda else device, pin_memory=cuda)
        self.seen = self.number.numpy() if cuda else None
        self.awaited = False

    def expect(self) -> torch.Tensor:
        """-> where the kernel is to write it"""
        self.awaited = True
        if self.seen is not None:
            self.seen[0] = -1
        return self.number

    def wait(self) -> int:
        if is_compiling():  # nothing was launched that would write it
            self.awaited = False
            return ANY_NUMBER
        if self.seen is None:
            number = int(self.number)
        else:
            for _ in range(SPINS):  # an event would cost more than most waits
                if self.seen[0] >= 0:
                    break
            else:
                torch.cuda.current_stream().synchronize()
            number = int(self.seen[0])
        self.awaited = False
        return number


_counters = threading.local()  # kept for the next call of the thread


def pinned_counter(device: torch.device) -> PinnedCounter:
    """The one of this thread and device."""
    known: dict[torch.device, PinnedCounter] = _counters.__dict__.setdefault("by_device", {})
    found = known.get(device)
    if found is None or found.awaited:  # a call that failed half-way may still be written to
        found = known[device] = PinnedCounter(device)
    return found
