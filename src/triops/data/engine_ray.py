"""Jobs on a Ray cluster, through Ray Data: it schedules, retries, and takes work away from nodes that die.

Sources and output must be reachable from every node under the same path: a shared file system, or a URL.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triops.data.frames import FrameRef
from triops.data.job import Job, JobError, Outcome

CONNECT_SECONDS = 10
FRAMES_PER_TASK = 16  # a task takes Ray some milliseconds; what a lost task has done is found done by the next


@dataclass(frozen=True)
class RayEngine:
    """Runs a job on a Ray cluster.

    Attributes:
        address: of the cluster; None starts one on this machine, or joins the one that this program is connected to.
        workers: most tasks at a time; 0 for as many as the cluster has cores.
    """

    address: str | None = None
    workers: int = 0

    def __call__(self, job: Job, refs: Sequence[FrameRef]) -> Iterator[Outcome]:
        try:
            import ray
            import ray.data
        except ImportError:
            raise JobError("--engine ray needs Ray Data. Remedy: pip install 'triops[ray]'") from None
        if not refs:
            return
        started = not ray.is_initialized()
        if started:
            _check_reachable(self.address)
            try:
                ray.init(address=self.address, log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise JobError(f"no Ray cluster at {self.address}: {error}") from None
        context = ray.data.DataContext.get_current()
        before, context.enable_progress_bars = context.enable_progress_bars, False
        try:
            rows = [{"ref": pickle.dumps(ref)} for ref in refs]
            blocks = -(-len(rows) // FRAMES_PER_TASK)
            frames = ray.data.from_items(rows, override_num_blocks=blocks)
            # Ray Data tries a task that a worker or a node took with it again, as often as it takes.
            outcomes = frames.map(_Frame(job), num_cpus=1, concurrency=self.workers or None)
            for row in outcomes.iter_rows():
                yield Outcome(**{**row, "error": row["error"] or None})
        finally:
            context.enable_progress_bars = before
            if started:
                ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Refuse an address where nobody listens: Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if "://" in host or not colon or not port.isdecimal():
        return  # not of a host: Ray knows what it means
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise JobError(f"no Ray cluster at {address}: {error}") from None


@dataclass(frozen=True)
class _Frame:
    """Does the frame of a row."""

    job: Job

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import torch

        torch.set_num_threads(1)
        outcome = self.job(pickle.loads(row["ref"]))  # written by the engine itself
        return {**asdict(outcome), "error": outcome.error or ""}
