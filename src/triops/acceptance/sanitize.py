"""`python -m triops.acceptance.sanitize`: the soak's calls of GPU kernels under compute-sanitizer.

Each tool runs over each kind of call in processes of its own, for their share of the time:
    memcheck   accesses outside of buffers; every tensor is an allocation of its own
    racecheck  races in shared memory
    initcheck  reads of memory that nobody wrote
    small      small calls of every operator, half of them on streams of their own
    graphs     small calls, captured in CUDA graphs and replayed (in torch's own pools: no capture allocates otherwise)
    network    the network-scale samples
What the time did not reach is named. First of all a planted fault, a Triton kernel that writes beside its buffer, must
be found: a sanitizer that finds nothing there would find nothing anywhere. Exit status 1 on any finding. Where there is
no GPU or no compute-sanitizer it says so, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from triops._arguments import UsageError, writable_file

MODULE = "triops.acceptance.sanitize"
TOOLS = ("memcheck", "racecheck", "initcheck")
SCENES = {"small": 2, "graphs": 2, "network": 3}  # and the processes that share its operators
LOG_SHOWN = 20_000  # characters
FOUND = 86  # the exit status by which the sanitizer says that it found something
SAID = re.compile(r"=========.*(Invalid|Misaligned|Uninitialized|hazard|Race reported)")  # how findings begin
GRACE = 240.0  # seconds beyond its share after which a process is given up, unless another number is asked for
SECONDS = 600.0


@dataclass
class Result:
    tool: str
    scene: str
    calls: int = 0
    operators: int = 0
    missed: list[str] = field(default_factory=list)  # operators that the time was too short for
    refused: list[str] = field(default_factory=list)  # calls that raised, in words
    seconds: float = 0.0
    findings: str = ""  # what the sanitizer said
    problem: str = ""  # why there is no answer

    @property
    def passed(self) -> bool:
        return not self.findings and not self.problem

    def __str__(self) -> str:
        head = f"{self.tool}, {self.scene}: {self.calls} calls of {self.operators} operators in {self.seconds:.0f} s"
        words = [f"FINDINGS in {_kernels(self.findings)}"] if self.findings else []
        words += [self.problem] if self.problem else []
        words = words or ["clean"]
        words += [f"not reached: {', '.join(self.missed)}"] if self.missed else []
        words += [f"{len(self.refused)} calls raised, first {self.refused[0]}"] if self.refused else []
        return f"{head}: {'; '.join(words)}"


def _kernels(log: str) -> str:
    """The kernels that a log names, and how often."""
    counts = Counter(name[:80] for name in re.findall(r"\bat (?:0x[0-9a-f]+ in )?(\S.*?)\+0x[0-9a-f]+", log))
    return ", ".join(f"{name} ({n})" for name, n in counts.most_common()) or "no kernel that it names"


# Inside of a sanitized process


def run_calls(scene: str, seconds: float, seed: int, out: Path, part: int = 0) -> None:
    """Calls until the time is up, each operator once before any comes again; what was done goes to a JSON file.

    part: which of the scene's processes this is.
    """
    import triops  # noqa: F401
    from triops import _sample
    from triops._op import OPERATORS

    rng = Random(seed)
    names = [n for n, op in OPERATORS.items() if "gpu" in op.backends]
    if scene == "graphs":
        names = [n for n in names if not OPERATORS[n].dynamic_output]
    if scene == "network":
        scales = {s.operator for s in _sample.all_samples() if s.scale == "network"}
        names = [n for n in names if n in scales]
    names = names[part :: SCENES[scene]]
    done: dict[str, int] = dict.fromkeys(names, 0)
    refused: list[str] = []
    started = time.monotonic()
    deck: list[str] = []
    while time.monotonic() - started < seconds and not (scene == "network" and min(done.values(), default=1)):
        deck = deck or rng.sample(names, len(names))
        name = deck.pop()
        out.write_text(json.dumps({"done": done, "refused": refused, "running": name}))
        try:
            _one_call(name, scene, rng)
        except Exception as error:  # the sanitizer judges, but what raises was not looked at
            refused.append(f"{name}: {type(error).__name__}: {error}"[:300])
        done[name] += 1
        out.write_text(json.dumps({"done": done, "refused": refused}))


def _one_call(name: str, scene: str, rng: Random) -> None:
    from triops import _sample
    from triops._op import OPERATORS
    from triops.acceptance.soak.calls import draw_arguments, draw_network

    args = draw_network(rng, name) if scene == "network" else draw_arguments(rng, name)
    operator, moved = OPERATORS[name], _sample.to_device(args, "cuda")
    if scene == "graphs":
        _captured(operator, moved)
    elif rng.random() < 0.5:
        operator(*moved)
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            operator(*moved)
    torch.cuda.synchronize()


def _captured(operator: Any, args: tuple[Any, ...]) -> None:
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        operator(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            operator(*args)
    except RuntimeError:  # it waits for the GPU
        torch.cuda.set_stream(current)
        torch.cuda.synchronize()
        return
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()


def run_fault() -> None:
    """A Triton kernel that fills 1,024 numbers of a buffer of 13."""
    from triops.acceptance.fault_gpu import fill

    fill(torch.empty(13, device="cuda"), 1024)
    torch.cuda.synchronize()


# Outside


def find_sanitizer() -> str | None:
    """The program, on the path or where CUDA is usually installed."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", "/opt/cuda"]
    found = shutil.which("compute-sanitizer")
    for root in (Path(r) for r in roots if r):
        for place in ("bin", "compute-sanitizer", "extras/compute-sanitizer"):
            path = root / place / "compute-sanitizer"
            found = found or (str(path) if os.access(path, os.X_OK) and path.is_file() else None)
    return found


def sanitized(
    sanitizer: str, tool: str, scene: str, seconds: float, seed: int, part: int = 0, grace: float = GRACE
) -> Result:
    """One process under one tool."""
    result = Result(tool, scene)
    with tempfile.TemporaryDirectory(prefix="triops-sanitize-") as folder:
        out, log = Path(folder) / "calls.json", Path(folder) / "log"
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
        command += ["--log-file", str(log), "--target-processes", "application-only"]
        if tool == "memcheck":
            command += ["--report-api-errors", "no"]  # torch asks for what may be missing, and handles it
        command += [sys.executable, "-m", MODULE, "--inside", scene, "--seconds", str(seconds), "--seed", str(seed)]
        command += ["--part", str(part), "--json", str(out)]
        environment = dict(os.environ)
        if scene != "graphs":
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        started = time.monotonic()
        status, stdout, stderr = _run_for(seconds + grace, command, environment)
        result.seconds = time.monotonic() - started
        words = log.read_text(errors="replace") if log.is_file() else stdout
        counts: dict[str, Any] = {"done": {}, "refused": []}
        with contextlib.suppress(OSError, ValueError):  # not begun, or ended while it wrote
            counts = json.loads(out.read_text())
        result.calls, result.refused = sum(counts["done"].values()), counts["refused"]
        result.operators = sum(1 for n in counts["done"].values() if n)
        result.missed = [name for name, n in counts["done"].items() if not n]
        judge(result, status, words, stderr)
        if status is None and not result.findings:
            where = f", in a call of {counts['running']}" if counts.get("running") else ""
            result.problem = f"did not end within {seconds + grace:.0f} s{where}"
    return result


def _run_for(seconds: float, command: list[str], environment: dict[str, str]) -> tuple[int | None, str, str]:
    """The exit status, None where the time was up, and what was printed."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and the process that it looks at
        stdout, stderr = process.communicate()
        return None, stdout, stderr
    return process.returncode, stdout, stderr


def merged(results: list[Result]) -> Result:
    """Those of one tool and one scene as one."""
    whole = Result(results[0].tool, results[0].scene)
    for result in results:
        whole.calls += result.calls
        whole.operators += result.operators
        whole.missed += result.missed
        whole.refused += result.refused
        whole.seconds = max(whole.seconds, result.seconds)
    whole.findings = "\n".join(r.findings for r in results if r.findings)
    whole.problem = "; ".join(r.problem for r in results if r.problem)
    return whole


def judge(result: Result, status: int | None, log: str, stderr: str) -> None:
    """What the exit status, the sanitizer's log and the program's own words say together."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", log)
    hazards = int(summary[1]) if summary else 0
    unfinished = summary is None and SAID.search(log)  # given up before it could count
    if status == FOUND or hazards or unfinished:
        result.findings = log.strip()[:LOG_SHOWN] or f"exit status {status}"
    elif summary is None:
        result.problem = f"no summary, exit status {status}: {(log + stderr).strip()[-1500:]}"
    elif status != 0:
        result.problem = f"exit status {status}: {stderr.strip()[-1500:]}"
    elif result.scene != "fault" and result.calls == 0:
        result.problem = f"no call was made: {stderr.strip()[-1500:]}"


def planted_fault_is_found(sanitizer: str) -> Result:
    """Passed where memcheck finds the fault."""
    result = sanitized(sanitizer, "memcheck", "fault", 0, 0)
    if not result.problem and "Invalid __global__ write" not in result.findings:
        result.problem = f"the planted fault was not found: {result.findings or 'clean'}"
    if not result.problem:
        result.findings = ""
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m triops.acceptance.sanitize", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=SECONDS, help="to draw calls for, in all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once; each then gets more of the time")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="again for more; all if none")
    parser.add_argument("--scene", action="append", choices=SCENES, help="again for more; all if none")
    parser.add_argument("--seed", type=int, default=0, help="which calls")
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds beyond its share that a last call may take")
    parser.add_argument("--no-warmup", action="store_true", help="do not compile the kernels beforehand")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--inside", choices=(*SCENES, "fault"), help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside == "fault":
        run_fault()
        return 0
    if options.inside:
        run_calls(options.inside, options.seconds, options.seed, options.json, options.part)
        return 0

    try:
        writable_file(options.json, "--json")  # seen now, and not after hours
    except UsageError as error:
        parser.error(str(error))
    sanitizer = find_sanitizer()
    if not torch.cuda.is_available():
        print("nothing was sanitized: torch sees no GPU here")
        return 0
    if sanitizer is None:
        print("nothing was sanitized: there is no compute-sanitizer on the path or under CUDA_HOME")
        return 0
    if not options.no_warmup:
        _warm()
    fault = planted_fault_is_found(sanitizer)
    print(f"the planted fault is {'found' if fault.passed else 'NOT found: ' + fault.problem}", flush=True)
    if not fault.passed:
        return 1
    pairs = [(tool, scene) for scene in options.scene or SCENES for tool in options.tool or TOOLS]
    processes = sum(SCENES[scene] for _, scene in pairs)
    share = min(options.seconds, options.seconds * max(1, options.jobs) / processes)
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = {
            pair: [
                pool.submit(sanitized, sanitizer, *pair, share, options.seed, part, options.grace)
                for part in range(SCENES[pair[1]])
            ]
            for pair in pairs
        }
        for parts in tasks.values():
            results.append(merged([part.result() for part in parts]))
            print(results[-1], flush=True)
    for result in results:
        if result.findings:
            print(f"\n{result.tool}, {result.scene}:\n{result.findings}")
    calls, failed = sum(r.calls for r in results), [r for r in results if not r.passed]
    verdict = f"{len(failed)} of {len(pairs)} kinds of runs with findings or problems" if failed else "clean"
    print(f"{calls} calls in {processes} processes: {verdict}")
    if options.json:
        from triops.acceptance.results import environment

        found = {"results": [asdict(r) for r in results], "environment": environment()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


def _warm() -> None:
    """Compile every kernel first: under a sanitizer the time is for calls."""
    import triops  # noqa: F401
    from triops import _warmup

    started = time.monotonic()
    try:
        calls = sum(count for _, _, count in _warmup.warm_all(["cuda"]))
    except Exception as error:  # the calls themselves will say more
        print(f"not all kernels could be compiled beforehand: {type(error).__name__}: {error}", flush=True)
        return
    print(f"kernels compiled in {time.monotonic() - started:.0f} s, {calls} calls", flush=True)


if __name__ == "__main__":
    sys.exit(main())
