"""A job over the frames of a data set: what is done to one frame, what is missing, what went wrong.

A job is a value that engines send to other processes. A frame's output is either one file, which is written whole or
not at all, or several and a record, written last, that says that they are there. So a job can be stopped anywhere and
started again, several may run side by side on parts of the frames, and a frame that is done twice gives the same bytes.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import triops
from triops.data import cpu, files, records
from triops.data.files import Data
from triops.data.frames import Frame, FrameError, FrameRef, Source, check_points
from triops.data.garbage import no_garbage

_SETTINGS = ".job.json"  # no frame has a name that begins so


class JobError(ValueError):
    """A job that cannot be done at all. One sentence."""


@dataclass(frozen=True)
class Output:
    """What is made of a frame.

    Attributes:
        folder: where its files go, below the output of the job.
        contents: names and contents of the files; one, unless there is a record.
        record: one line that says that the files are there, or None where the one file says so itself.
    """

    folder: str
    contents: Sequence[tuple[str, Data]]
    record: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a frame, and where its time went, in seconds.

    Attributes:
        key: the frame's name.
        error: what is wrong with the frame, or None.
        read, compute, write: of loading, of the work itself, of writing.
        waiting: the part of reading and writing in which this thread's core was idle or not its own.
    """

    key: str
    error: str | None = None
    read: float = 0.0
    compute: float = 0.0
    write: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True)
class Job(ABC):
    """What is done to each frame of some sources.

    Attributes:
        sources: the data sets.
        out: folder of the output.
    """

    sources: tuple[Source, ...]
    out: str

    @property
    @abstractmethod
    def place(self) -> str:
        """Folder below `out` where the job keeps track of itself."""

    @property
    @abstractmethod
    def folders(self) -> Sequence[str]:
        """Folders below `out` that its output goes to."""

    @abstractmethod
    def settings(self) -> Mapping[str, object]:
        """What the bytes of its output depend on, except for the frames themselves."""

    @abstractmethod
    def compute(self, ref: FrameRef, frame: Frame) -> Output:
        """What is made of a frame."""

    @abstractmethod
    def done(self, refs: Sequence[FrameRef]) -> set[str]:
        """Keys of those frames that are done."""

    def finish(self, refs: Sequence[FrameRef]) -> str | None:
        """Called when every frame is done or bad: write what is made of all frames together, say what it was."""
        return None

    def start(self) -> None:
        """Compile kernels, make the folders, and refuse to mix with the output of other settings."""
        if files.is_chained(self.out):
            raise JobError(
                f"--out must be a place that files can be written to and read back from, got {self.out}: archives and "
                "caches are for sources. Remedy: --out with a folder or a URL of one link, such as s3://bucket/kitti"
            )
        _compile_kernels()
        for folder in (*self.folders, self.place, self._temporary):
            files.make_folder(files.join(self.out, folder))
        path, wanted = files.join(self.out, self.place, _SETTINGS), json.dumps(self.settings(), indent=1)
        if not files.exists(path):
            self._write(f"{self.place}/{_SETTINGS}", wanted.encode())
        found = files.read(path).decode("utf-8", "replace")
        if found != wanted:
            raise JobError(
                f"{self.out} holds output of other settings ({_difference(found, wanted)}). Remedy: another --out, or "
                f"remove {files.join(self.out, self.place)} and what was written"
            )

    def __call__(self, ref: FrameRef) -> Outcome:
        """Do one frame. A bad frame is part of the outcome; an output that cannot be written is an OSError."""
        begin, idle = time.perf_counter(), _Idle()
        try:
            frame = self.sources[ref.source].load(ref)
            read, waiting = time.perf_counter(), idle.elapsed()
            output = self.compute(ref, frame)
        except OSError as error:
            return self._bad(ref, files.reason(error))
        except ValueError as error:
            return self._bad(ref, str(error))
        computed = time.perf_counter()
        idle = _Idle()
        self.write(ref, output)
        waiting += idle.elapsed()
        written = time.perf_counter()
        return Outcome(ref.key, None, read - begin, computed - read, written - computed, waiting)

    def write(self, ref: FrameRef, output: Output) -> None:
        """Write a frame's output, so that the frame is done when all of it is there and not before."""
        if output.record is None:
            [(name, data)] = output.contents
            self._write(f"{output.folder}/{name}", data)
            return
        files.write(files.join(self.out, output.folder), output.contents)
        records.append(files.join(self.out, self.place), ref.key, output.record)

    def bad(self) -> dict[str, str]:
        """Frames that were found to be bad, by any run, with the reason."""
        folder = files.join(self.out, self.place)
        found = sorted(name for name in files.names(folder) if name.endswith(".error"))
        return {name[:-6]: files.read(files.join(folder, name)).decode("utf-8", "replace") for name in found}

    def forgive(self, keys: Iterable[str]) -> None:
        """Forget that frames were bad, since they are about to be done again."""
        for key in keys:
            files.remove(files.join(self.out, self.place, f"{key}.error"))

    def clean(self) -> None:
        """Remove what killed runs may have left under temporary names. Only when no frame is missing."""
        files.remove_folder(files.join(self.out, self._temporary))

    def _bad(self, ref: FrameRef, error: str) -> Outcome:
        self._write(f"{self.place}/{ref.key}.error", error.encode())
        return Outcome(ref.key, error)

    @property
    def _temporary(self) -> str:
        return f"{self.place}/temporary"

    def _write(self, path: str, data: Data) -> None:
        files.write_whole(files.join(self.out, path), data, files.join(self.out, self._temporary))


def _compile_kernels() -> None:
    """Compile now what frames call, on small input and large, rather than in every process at its first frame."""
    points, boxes = torch.zeros(1, 8192, 3), torch.zeros(1, 16, 7)
    for count in (1, 8192):
        triops.points_in_boxes(points[:, :count], boxes)
    check_points(points[0].numpy(), "")
    cpu.rows_of_boxes(points[0].numpy(), boxes[0].numpy(), False)


class _Idle:
    """Time that passes without this thread running."""

    def __init__(self) -> None:
        self._wall, self._busy = time.perf_counter(), time.thread_time()

    def elapsed(self) -> float:
        return max(time.perf_counter() - self._wall - (time.thread_time() - self._busy), 0.0)


@dataclass
class Tally:
    """What a run has done so far."""

    frames: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    read: float = 0.0
    compute: float = 0.0
    write: float = 0.0
    waiting: float = 0.0
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.frames += 1
        self.seconds = time.monotonic() - self.began
        if outcome.error is not None:
            self.errors[outcome.key] = outcome.error
        self.read += outcome.read
        self.compute += outcome.compute
        self.write += outcome.write
        self.waiting += outcome.waiting

    @property
    def rate(self) -> float:
        """Frames per second."""
        return self.frames / max(self.seconds, 1e-9)

    @property
    def bound(self) -> str:
        """What another core or another disk would help."""
        return "disk" if self.waiting > 0.5 * (self.read + self.compute + self.write) else "CPU"

    def describe(self) -> str:
        """One line: rate, what bounds it, and shares of the time.

        >>> tally = Tally(began=time.monotonic() - 2)
        >>> tally.add(Outcome("000000", None, 0.003, 0.001, 0.006, 0.001))
        >>> tally.describe()
        '0.5 frames/s, bound by CPU (read 30%, compute 10%, write 60%)'
        """
        total = max(self.read + self.compute + self.write, 1e-9)
        parts = ", ".join(f"{name} {getattr(self, name) / total:.0%}" for name in ("read", "compute", "write"))
        rate = f"{self.rate:,.0f}" if self.rate >= 10 else f"{self.rate:.1f}"
        return f"{rate} frames/s, bound by {self.bound} ({parts})"


def source_settings(source: Source) -> dict[str, object]:
    """What output depends on, which is not where a data set lies."""
    fields = {k: v for k, v in vars(source).items() if k not in ("path", "root", "content")}
    return {"kind": type(source).__name__, **fields}


def all_refs(job: Job) -> tuple[list[FrameRef], dict[str, str]]:
    """The frames of all sources in their order, and the sources that cannot be read, with the reason.

    Raises:
        JobError: two frames of one name.
    """
    refs: list[FrameRef] = []
    broken = {}
    for number, source in enumerate(job.sources):
        try:
            refs += source.refs(number)
        except (ValueError, OSError) as error:
            broken[str(getattr(source, "path", getattr(source, "root", number)))] = str(error)
    for names in ([ref.key for ref in refs], [str(ref.sample) for ref in refs]):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise JobError(
                f"two frames are named {twice[0]}: their output would overwrite each other. Remedy: info files that "
                "number their frames alike are jobs of their own, with another --out or split; a frame is listed once"
            )
    return refs, broken


def shard_of(refs: Sequence[FrameRef], shard: tuple[int, int]) -> list[FrameRef]:
    """Part i of n, of every n-th frame, so that parts take about as long as each other."""
    part, parts = shard
    return list(refs[part - 1 :: parts])


def parse_shard(text: str) -> tuple[int, int]:
    """Part and number of parts.

    >>> parse_shard("2/8")
    (2, 8)
    >>> parse_shard("0/8")
    Traceback (most recent call last):
    triops.data.job.JobError: --shard must be i/n with i from 1 to n, got 0/8
    """
    part, slash, parts = text.partition("/")
    if slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part), int(parts)
    raise JobError(f"--shard must be i/n with i from 1 to n, got {text}")


Engine = Callable[[Job, Sequence[FrameRef]], Iterator[Outcome]]


@dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
        frames: of all sources.
        before: of this run's frames, how many were done already.
        tally: of the others.
        broken: sources that cannot be read, with the reason.
        bad: frames that cannot be used, of any run, with the reason.
        missing: frames that other parts still have to do.
        finished: what was written last, when nothing was missing.
    """

    frames: int
    before: int
    tally: Tally
    broken: dict[str, str]
    bad: dict[str, str]
    missing: int
    finished: str | None

    @property
    def good(self) -> bool:
        return not self.broken and not self.bad


def run(
    job: Job, engine: Engine, *, shard: tuple[int, int] = (1, 1), strict: bool = False,
    broken: Mapping[str, str] | None = None, watch: Callable[[Tally, int], None] = lambda tally, total: None,
) -> Result:  # fmt: skip
    """Do what is missing of a job, or of part i of n of it.

    Args:
        engine: what runs it.
        shard: (i, n), i from 1.
        strict: stop at the first bad frame.
        broken: sources that could not even be opened, with the reason.
        watch: called after each frame with what was done, and the number of frames to do.

    Raises:
        FrameError: a bad frame or source, where `strict`.
        JobError: it cannot be done at all.
        OSError: output cannot be written.
    """
    with no_garbage():
        refs, unread = all_refs(job)
    unread = {**(broken or {}), **unread}
    if unread and (strict or not refs):
        raise FrameError("; ".join(unread.values()))
    job.start()
    own = shard_of(refs, shard)
    done = job.done(own)
    before = len(done)
    to_do = [ref for ref in own if ref.key not in done]
    job.forgive(job.bad().keys() & {ref.key for ref in to_do})
    tally = Tally()
    outcomes = engine(job, to_do)
    for outcome in outcomes:
        tally.add(outcome)
        if outcome.error is None:
            done.add(outcome.key)
        watch(tally, len(to_do))
        if strict and outcome.error is not None:
            raise FrameError(f"frame {outcome.key}: {outcome.error}")
    bad = job.bad()
    others = [ref for ref in refs if ref.key not in done]
    good = done | job.done(others) if others else done
    missing = [ref for ref in refs if ref.key not in good and ref.key not in bad]
    finished = None
    if not missing:
        with no_garbage():
            finished = job.finish([ref for ref in refs if ref.key in good])
        job.clean()
    return Result(len(refs), before, tally, unread, bad, len(missing), finished)


def _difference(found: str, wanted: str) -> str:
    try:
        before, now = json.loads(found), json.loads(wanted)
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    except (ValueError, AttributeError):
        return f"{_SETTINGS} is damaged"
    return ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys)
