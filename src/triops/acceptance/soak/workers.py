"""Processes that run calls, and the loop that watches them: a crash and a hang are findings like any other."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from triops import _sample
from triops.acceptance.soak.calls import PUBLIC, Spec, draw, targets
from triops.acceptance.soak.execute import Verdict, device_is_lost, run_round
from triops.acceptance.soak.summary import Failure, Summary

START_SECONDS = 300.0  # for the imports of a fresh process, on a busy machine
MEMORY = 8 * 2**30  # bytes of a process: a malformed call may ask for any amount
WEIGHTS = {"cuda": 8, "cuda-stream": 8, "cuda-graph": 4, "cpu": 6, "reference": 1, "interpreter": 1}
AT_ONCE = (1, 1, 1, 2, 3, 4)  # calls of a round, each on a thread of its own
ALONE = ("cuda-graph", "interpreter")  # backends whose calls run on no other thread's side


@dataclass(frozen=True)
class Settings:
    seed: int
    backends: tuple[str, ...]
    targets: tuple[str, ...] = ()  # all of them if none
    calls: int | None = None
    seconds: float | None = None
    processes: int = 1
    timeout: float = 120.0  # seconds for one round
    most_failures: int = 20  # after which the soak stops
    failures_per_target: int = 3  # after which a target is no longer drawn
    folder: Path | None = None  # of the case files of failures
    modules: tuple[str, ...] = ()  # imported first, in every process


# Inside of a worker process


def _serve(connection: Connection, log: str, settings: Settings) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that watches
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    on_gpu = any(b.startswith("cuda") for b in settings.backends)
    _limit_memory(on_gpu, settings.processes)
    for module in settings.modules:
        importlib.import_module(module)
    _sample.all_samples()  # imported now, not on a call's time
    with contextlib.suppress(ImportError):  # and what the first calls would import
        importlib.import_module("numba")
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            job, *arguments = connection.recv()
            try:
                answer: Any = run_round(*arguments) if job == "run" else _save(*arguments)
            except Exception:  # a call that cannot be drawn is a finding too
                answer = traceback.format_exc()
            connection.send(answer)


def _limit_memory(on_gpu: bool, processes: int) -> None:
    if on_gpu:
        import torch

        torch.cuda.set_per_process_memory_fraction(0.6 / processes)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        # Of memory that can be written: CUDA reserves addresses without end.
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def _save(spec: Spec, folder: Path, about: dict[str, Any]) -> str:
    """The case file of a call, for `triops replay`; "" where a file cannot hold it."""
    from triops.acceptance import case_file

    call = draw(spec)
    if call.operator is None or call.bad is not None:
        return ""
    path = folder / f"{spec.target}-{spec.backend}-{spec.seed}{case_file.SUFFIX}"
    try:
        case_file.write(path, case_file.Case(call.operator, call.args, None, about))
    except (TypeError, ValueError, RuntimeError, NotImplementedError, ImportError):
        return ""
    return str(path)


# The process that watches


class _Worker:
    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        handle, self.log = tempfile.mkstemp(suffix=".log", prefix="triops-soak-")
        os.close(handle)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.log, settings), daemon=True)
        self.process.start()
        theirs.close()
        self.job: _Job | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self.ready = False

    def give(self, job: _Job, seconds: float) -> None:
        self.job, self.deadline = job, time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it has died: the loop will see
            self.connection.send(job.message)

    def stop(self, ask_where: bool = False) -> str:
        """End the process. -> why it ended, with the last words of its log."""
        if ask_where and self.process.is_alive() and self.process.pid and hasattr(signal, "SIGUSR1"):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        if self.process.is_alive() and not ask_where:
            self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()
        code = self.process.exitcode or 0
        with open(self.log, errors="replace") as file:
            words = file.read()[-3000:].strip()
        os.unlink(self.log)
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"{name}\n{words}" if words else name


@dataclass
class _Group:
    """Calls that killed their process together, and are tried one by one."""

    specs: tuple[Spec, ...]
    what: str
    left: int
    guilty: bool = False


@dataclass
class _Job:
    message: tuple[Any, ...]
    specs: tuple[Spec, ...]
    group: _Group | None = None
    failure: Failure | None = None  # whose case is to be saved


@dataclass
class Soak:
    """Draws rounds of calls, hands them to workers, and collects what they find."""

    settings: Settings
    tell: Callable[[Summary, str], None] = lambda summary, target: None
    summary: Summary = field(init=False)

    def __post_init__(self) -> None:
        for module in self.settings.modules:
            importlib.import_module(module)
        chosen = self.settings.targets or tuple(targets())
        unknown = [t for t in chosen if t not in targets()]
        if unknown:
            raise ValueError(f"no target {', '.join(unknown)}; there are {', '.join(targets())}")
        self.summary = Summary(self.settings.seed, self.settings.backends, chosen)
        self._rounds = self._drawn_rounds(chosen)
        self._waiting: deque[_Job] = deque()
        self._given = 0
        self._failures_of: dict[str, int] = {}

    def run(self) -> Summary:
        """Until the calls, the time or the failures are enough, or Ctrl-C."""
        started = time.monotonic()
        workers: list[_Worker] = []
        try:
            while True:
                enough = self._enough(time.monotonic() - started)
                busy = [w for w in workers if w.job is not None or not w.ready]
                if enough and not self._waiting and not any(w.job for w in workers):
                    break
                if len(workers) < self.settings.processes and not (enough and not self._waiting):
                    workers.append(_Worker(self.settings))
                for worker in workers:
                    if worker.ready and worker.job is None and (job := self._next(enough)):
                        worker.give(job, self.settings.timeout)
                        busy.append(worker)
                self._watch(workers, busy)
                self.summary.seconds = time.monotonic() - started
        except KeyboardInterrupt:
            self.summary.interrupted = True
        finally:
            for worker in workers:
                worker.process.kill()
                worker.stop()
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def _enough(self, seconds: float) -> bool:
        s = self.settings
        return (
            (s.calls is not None and self._given >= s.calls)
            or (s.seconds is not None and seconds >= s.seconds)
            or len(self.summary.failures) >= s.most_failures
            or all(self._is_given_up(t) for t in self.summary.targets)
        )

    def _next(self, enough: bool) -> _Job | None:
        if self._waiting:
            return self._waiting.popleft()
        if enough:
            return None
        specs = next(self._rounds)
        self._given += len(specs)
        return _Job(("run", specs), specs)

    def _drawn_rounds(self, chosen: Sequence[str]) -> Iterator[tuple[Spec, ...]]:
        """Every target comes once before any comes again."""
        rng, deck = Random(self.settings.seed), list[str]()
        while True:
            count, same = rng.choice(AT_ONCE), rng.random() < 0.4
            specs: list[Spec] = []
            while len(specs) < count:
                if not deck:
                    deck = rng.sample(list(chosen), len(chosen))
                target = specs[0].target if same and specs else deck.pop()
                backend = self._backend(rng, target)
                specs.append(Spec(target, backend, rng.getrandbits(32)))
            alone = [s for s in specs if s.backend in ALONE]
            together = [s for s in specs if s.backend not in ALONE]
            for found in (*((s,) for s in alone), tuple(together)):
                kept = tuple(s for s in found if not self._is_given_up(s.target))
                if kept:
                    yield kept
            if all(self._is_given_up(t) for t in chosen):
                return

    def _backend(self, rng: Random, target: str) -> str:
        from triops._op import OPERATORS

        backends = list(self.settings.backends)
        if target.startswith(PUBLIC):
            backends = [b for b in backends if b not in ALONE] or ["cpu"]
        elif OPERATORS[target].dynamic_output and len(backends) > 1:
            backends = [b for b in backends if b != "cuda-graph"]
        return rng.choices(backends, [WEIGHTS[b] for b in backends])[0]

    def _is_given_up(self, target: str) -> bool:
        return self._failures_of.get(target, 0) >= self.settings.failures_per_target

    def _watch(self, workers: list[_Worker], busy: list[_Worker]) -> None:
        """Wait for the next answer, death or deadline."""
        now = time.monotonic()
        pause = max(0.0, min([w.deadline - now for w in busy] + [1.0]))
        ready = wait([w.connection for w in busy], pause)
        for worker in list(busy):
            if worker.connection in ready:
                try:
                    answer = worker.connection.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    self._died(worker, "crashed: " + worker.stop())
                    continue
                if not worker.ready:
                    worker.ready = True
                else:
                    job, worker.job = worker.job, None
                    assert job is not None
                    self._answered(job, answer)
                    if isinstance(answer, list) and device_is_lost(answer):
                        workers.remove(worker)
                        worker.process.kill()
                        worker.stop()
            elif time.monotonic() > worker.deadline:
                workers.remove(worker)
                seconds = self.settings.timeout
                self._died(worker, f"did not come back within {seconds:g} s: {worker.stop(ask_where=True)}")

    def _answered(self, job: _Job, answer: Any) -> None:
        if job.failure is not None:
            job.failure.case = answer if Path(answer).is_file() else ""
            return
        if isinstance(answer, str):  # a traceback
            for spec in job.specs:
                self._fail((spec,), f"could not be drawn or judged: {answer.strip()}", "", "")
            return
        verdicts: list[Verdict] = answer
        for spec, verdict in zip(job.specs, verdicts, strict=True):
            if job.group is None:
                self.summary.count(spec, verdict)
            if verdict.failures:
                together = job.specs if len(job.specs) > 1 else (spec,)
                self._fail((spec, *(s for s in together if s != spec)), "; ".join(verdict.failures), verdict.kind,
                           verdict.call)  # fmt: skip
        self._settle(job, guilty=any(v.failures for v in verdicts))
        self.tell(self.summary, job.specs[0].target)

    def _died(self, worker: _Worker, what: str) -> None:
        job = worker.job
        if job is None:
            raise RuntimeError(f"a worker process cannot start: it {what}")
        if job.failure is not None:
            return
        if job.group is None:
            for spec in job.specs:
                self.summary.count(spec, None)
        if len(job.specs) > 1:
            group = _Group(job.specs, what, len(job.specs))
            self._waiting.extend(_Job(("run", (spec,)), (spec,), group) for spec in job.specs)
        else:
            self._fail(job.specs, what, "", "")
            self._settle(job, guilty=True)

    def _settle(self, job: _Job, guilty: bool) -> None:
        group = job.group
        if group is None:
            return
        group.left -= 1
        group.guilty |= guilty
        if group.left == 0 and not group.guilty:
            self._fail(group.specs, f"only at once: {group.what}", "", "")

    def _fail(self, specs: tuple[Spec, ...], what: str, kind: str, call: str) -> None:
        modules = "".join(f" --import {m}" for m in self.settings.modules)
        command = f"python -m triops.acceptance.soak{modules} --repeat {' '.join(map(str, specs))}"
        failure = Failure(specs[0].target, specs[0].backend, specs[0].seed, kind, call, what, command)
        self.summary.failures.append(failure)
        self._failures_of[specs[0].target] = self._failures_of.get(specs[0].target, 0) + 1
        self.tell(self.summary, specs[0].target)
        if self.settings.folder is not None:
            about = {"why": what, "repeat": command}
            self._waiting.append(_Job(("save", specs[0], self.settings.folder, about), specs[:1], failure=failure))


def prepare_environment(backends: Sequence[str]) -> None:
    """What worker processes inherit: Triton's interpreter, chosen before Triton is imported, and threads of torch that
    sleep while they wait, since most references are too short to be worth a spin."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if "interpreter" in backends:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("Triton is already loaded without its interpreter: set TRITON_INTERPRET=1")
        os.environ["TRITON_INTERPRET"] = "1"
