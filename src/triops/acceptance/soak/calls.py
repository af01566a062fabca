"""One call, drawn from its target, its backend and its seed, and from nothing else: the same call on every run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triops import _sample
from triops._op import OPERATORS, describe, reference_backend
from triops.acceptance.inputs import reseeded
from triops.acceptance.soak import mutate, public

PUBLIC = "triops."  # before the name of a public function; operators have their plain names
BACKENDS = ("reference", "cpu", "interpreter", "cuda", "cuda-stream", "cuda-graph")

# How often each kind of call is drawn
KINDS = {"sample": 25, "sized": 20, "values": 20, "spoilt": 28, "bad call": 7}
MUST_ANSWER = ("sample", "sized")
COUNTS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1024, 1025)
# Of the counts in one call, as often as they stand here: references are slow, and most faults show in small calls.
LIMITS = (8, 20, 20, 20, 20, 40, 40, 40, 80, 80, 80, 80, 300, 300, 300, 1100)


class Spec(NamedTuple):
    """The name of a call, as `--repeat` takes it.

    >>> Spec.parse("nms:cpu:17")
    Spec(target='nms', backend='cpu', seed=17)
    """

    target: str
    backend: str
    seed: int

    def __str__(self) -> str:
        return f"{self.target}:{self.backend}:{self.seed}"

    @staticmethod
    def parse(text: str) -> Spec:
        found = re.fullmatch(r"([\w.]+):([\w-]+):(\d+)", text)
        if found is None or found[2] not in BACKENDS:
            raise ValueError(f"a call is TARGET:BACKEND:SEED with a backend of {', '.join(BACKENDS)}, got {text!r}")
        return Spec(found[1], found[2], int(found[3]))


@dataclass(frozen=True)
class Call:
    spec: Spec
    kind: str
    function: Callable[..., Any]  # takes `args`, through the whole door
    args: tuple[Any, ...]
    parameters: list[str]
    judged_as: str  # the operator by whose standard results are judged
    bad: _sample.BadCall | None = None  # then `function` is to raise what this says
    offset: int = 0  # elements between an aligned address and the tensors'

    @property
    def operator(self) -> str | None:
        """The registered operator that it calls directly; None for a public function."""
        return None if self.spec.target.startswith(PUBLIC) else self.spec.target

    def __str__(self) -> str:
        if self.bad is not None:
            return str(self.bad)
        return f"{self.spec.target}({_described(self.parameters, self.args)}) [{self.kind}]"


def _described(names: list[str], args: tuple[Any, ...]) -> str:
    shown = [a if not isinstance(a, Tensor) or a.layout is torch.strided else f"{a.layout}" for a in args]
    text = describe(names, tuple(shown))
    return text if len(text) < 600 else text[:600] + "..."


def targets() -> list[str]:
    """Every operator and every public function."""
    return [*OPERATORS, *(PUBLIC + name for name in public_functions())]


@functools.cache
def public_functions() -> dict[str, public.Public]:
    return public.functions()


@functools.cache
def _samples_of(operator: str) -> list[_sample.Sample]:
    return [s for s in _sample.all_samples() if s.operator == operator and s.scale != "network"]


@functools.cache
def _sized_of(operator: str) -> list[_sample.Sized]:
    return [s for s in _sample.all_sized() if s.operator == operator]


@functools.cache
def _bad_calls_of(operator: str) -> list[_sample.BadCall]:
    """Those of its module, less what by its name is another operator's."""
    bad_calls: list[_sample.BadCall] = _sample.module_of(OPERATORS[operator]).BAD_CALLS
    return [b for b in bad_calls if (of := b.name.partition(":")[0]) == operator or of not in OPERATORS]


def draw(spec: Spec) -> Call:
    """The call that a spec names. Tensors are on the CPU."""
    rng = Random(str(spec))
    made = public_functions()[spec.target.removeprefix(PUBLIC)] if spec.target.startswith(PUBLIC) else None
    source = made.source if made else spec.target
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "bad call":
        bad = _drawn_bad_call(rng, source) if made is None else None
        if bad is not None:
            return Call(spec, kind, bad.call, (), [], source, bad=bad)
        kind = "spoilt"
    sized_share = 1.0 if kind == "sized" else 0.3
    # the grids of calls with any counts are those of networks, over which the interpreter takes minutes
    args = draw_arguments(rng, source, 0.0 if spec.backend == "interpreter" else sized_share)
    function: Callable[..., Any] = OPERATORS[spec.target] if made is None else made.call
    parameters, judged_as = OPERATORS[source].parameters, source
    if made is not None:
        args, parameters, judged_as = made.convert(rng, args), made.parameters, made.judged_as
    if rng.random() < 0.3:
        args = mutate.restrided(rng, args)
    if kind == "values":
        args = mutate.other_values(rng, args)
    elif kind == "spoilt":
        args = mutate.spoilt(rng, args)
    offset = rng.choice((0, 0, 1, 3, 7))
    return Call(spec, kind, function, args, parameters, judged_as, offset=offset)


def draw_network(rng: Random, operator: str) -> tuple[Any, ...]:
    """The arguments of a network-scale sample of an operator that has one."""
    sample = rng.choice([s for s in _sample.all_samples() if s.operator == operator and s.scale == "network"])
    return sample.make(rng.choice(sample.dtypes))


def _drawn_bad_call(rng: Random, operator: str) -> _sample.BadCall | None:
    bad_calls = _bad_calls_of(operator)
    return rng.choice(bad_calls) if bad_calls else None


def draw_arguments(rng: Random, operator: str, sized_share: float = 0.5) -> tuple[Any, ...]:
    """The arguments of a small sample with any seed, or of a call with any counts."""
    sized = _sized_of(operator)
    seed = rng.choice((0, rng.randrange(1, 10**6)))
    sample = rng.choice(_samples_of(operator))
    dtype = rng.choice(sample.dtypes)
    make = sample.make
    if sized and rng.random() < sized_share:
        limit = rng.choice(LIMITS)

        def count(most: int) -> int:
            most = min(most, limit)
            return min(most, rng.choice(COUNTS)) if rng.random() < 0.5 else max(1, int(most ** rng.random()))

        make = rng.choice(sized).make(count)
    with reseeded(seed), reference_backend():  # the kernels have no part in what they are given
        return make(dtype)
