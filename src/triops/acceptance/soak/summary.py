"""What a soak found."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from triops.acceptance.soak.calls import Spec
from triops.acceptance.soak.execute import Verdict


@dataclass
class Failure:
    target: str
    backend: str
    seed: int
    kind: str
    call: str
    what: str
    repeat: str  # the command that repeats it
    case: str = ""  # its case file


@dataclass
class Counts:
    calls: int = 0
    answered: int = 0
    refused: int = 0
    not_captured: int = 0
    slowest: float = 0.0  # seconds, compilation included


@dataclass
class Summary:
    seed: int
    backends: tuple[str, ...]
    targets: tuple[str, ...]
    seconds: float = 0.0
    interrupted: bool = False
    counts: dict[str, Counts] = field(default_factory=dict)  # by target
    kinds: dict[str, int] = field(default_factory=dict)
    by_backend: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return sum(c.calls for c in self.counts.values())

    def count(self, spec: Spec, verdict: Verdict | None) -> None:
        """None: the call never came back."""
        counts = self.counts.setdefault(spec.target, Counts())
        counts.calls += 1
        self.by_backend[spec.backend] = self.by_backend.get(spec.backend, 0) + 1
        if verdict is not None:
            self.kinds[verdict.kind] = self.kinds.get(verdict.kind, 0) + 1
            counts.answered += verdict.outcome == "answered"
            counts.refused += verdict.outcome == "refused"
            counts.not_captured += verdict.outcome == "not captured"
            counts.slowest = max(counts.slowest, verdict.seconds)

    def progress(self, target: str) -> str:
        rate = self.calls / max(self.seconds, 1e-9)
        return f"{self.calls:,} calls, {rate:.1f}/s, {len(self.failures)} failures, {target}"

    def table(self) -> str:
        failed = {t: sum(f.target == t for f in self.failures) for t in self.targets}
        rows: list[tuple[str, ...]] = [
            ("target", "calls", "answered", "refused", "not captured", "failures", "slowest s")
        ]
        for target in self.targets:
            c = self.counts.get(target, Counts())
            numbers = (c.calls, c.answered, c.refused, c.not_captured, failed[target])
            rows.append((target, *(f"{n:,}" for n in numbers), f"{c.slowest:.2f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        )

    def headline(self) -> str:
        by = ", ".join(f"{count:,} {backend}" for backend, count in sorted(self.by_backend.items()))
        missed = [t for t in self.targets if t not in self.counts]
        text = f"{self.calls:,} calls ({by}) of {len(self.counts)} targets in {self.seconds:.0f} s, seed {self.seed}: "
        text += f"{len(self.failures)} failures" if self.failures else "no crash, no hang, no difference"
        if missed:
            text += f"; never called: {', '.join(missed)}"
        return text + ("; interrupted" if self.interrupted else "")

    def as_json(self, environment: dict[str, str]) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return {"calls": self.calls, **found, "environment": environment}
