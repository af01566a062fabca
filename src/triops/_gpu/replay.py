"""Calls that come again and again: what their launcher does on the host is written down once, and then repeated.

A launcher allocates, works out grids and constants, and launches; for a small call that takes longer than the GPU's
work. All of it depends on what the key of a call holds (shapes, dtypes, devices, plain values), on strides and
alignment, and on a few switches. So once the same key has come `OFTEN` times, one call is watched and written out as a
function that allocates and launches and does nothing else. That function looks at strides, alignment and switches
first, and leaves a call that differs in them to the launcher. It keeps no tensor and no address: inputs and fresh
memory are all that a kernel gets.

Calls of torch in between are repeated too, except views that kernels alone are given: where one begins is known. What
cannot be repeated is left alone: a launcher that waits for a number from the GPU, or that launches with memory of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triops._gpu import launch

OFTEN = 16  # more than the layers of a network that share a shape: where counts change every step, nothing is recorded
ALIGNMENT = 16  # bytes: pointers that Triton compiles wide loads for

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
_ZEROS = {_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default}
_METHODS = {_aten.zero_.default: "zero_", _aten.fill_.Scalar: "fill_"}  # half the time of a call by overload
# What comes out, or its size, depends on data or chance.
_UNREPEATABLE = (
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded,
)  # fmt: skip


def replayed(run: Callable[..., Any], ordinary: Callable[[], bool]) -> Callable[..., Any]:
    """`run` for the calls of one key; what the launcher behind it does is repeated once they have come often.

    ordinary: whether a call runs the launcher, and nobody wants to hear of it.
    """
    plan: Callable[..., Any] | None = None
    calls, watched = 0, False

    def call(*args: Any) -> Any:
        nonlocal plan, calls, watched
        if plan is not None:
            made = plan(*args)
            return run(*args) if made is None else made
        calls += 1
        if calls < OFTEN or watched or not ordinary() or launch.is_compiling() or not launch.fast_launches:
            return run(*args)
        watched = True  # once, whatever comes of it
        recording = Recording(args)
        recording.switches[ordinary] = True
        with launch.watching(recording), recording:
            made = run(*args)
        plan = recording.plan(made)
        return made

    return call


def switch(reader: Callable[[], Any]) -> Any:
    """`reader()`, a switch of the process that a launcher decides by; a plan is for calls that find it the same."""
    value = reader()
    recording = launch.watcher()
    if recording is not None:
        recording.switches[reader] = value
    return value


class Recording(TorchDispatchMode):
    """What one call of a launcher allocates, fills and launches."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = len(args)
        self.inputs = [(f"t{i}", a) for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.names = {id(tensor): name for name, tensor in self.inputs}
        self.kept: list[Any] = []  # what was made, so that no identity comes twice
        self.lines: list[str] = []
        self.values: list[Any] = []  # what the lines call v0, v1, ...
        # Of views: the line that makes them, the tensor they are of, and by how many bytes they begin later.
        self.views: dict[str, tuple[int, str, int]] = {}
        self.used: set[str] = set()  # by other than kernels
        self.switches: dict[Callable[[], Any], Any] = {launch.is_compiling: False}
        deterministic = torch.are_deterministic_algorithms_enabled
        self.switches[deterministic] = deterministic()
        if torch.cuda.is_available() and torch.cuda.device_count() > 1:  # `run` makes it the tensors'
            self.switches[torch.cuda.current_device] = self.inputs[0][1].get_device()
        # Of one tensor in two places a launcher does not say which it means.
        self.repeatable = len(self.names) == len(self.inputs) and not any(
            tensor.data_ptr() % ALIGNMENT for _, tensor in self.inputs
        )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is _aten.detach.default:  # torch gives the launcher an alias of what is kept here
            self._keep(out, self._name(args[0]))
        elif function in _EMPTY or function in _ZEROS:
            name = self._new(out)
            size, stride, dtype, device = map(self._value, (out.shape, out.stride(), out.dtype, out.device))
            self.lines.append(f"{name} = empty({size}, {stride}, dtype={dtype}, device={device})")
            if function in _ZEROS:
                self.lines.append(f"{name}.zero_()")
        else:
            base = args[0] if args and self._is_view(out, args[0]) else None
            given = [self._name(a) if a is base is not None else self._given(a) for a in args]
            given += [f"{name}={self._given(a)}" for name, a in (kwargs or {}).items()]
            if function in _METHODS:
                self.lines.append(f"{given[0]}.{_METHODS[function]}({', '.join(given[1:])})")
            else:
                made = out if isinstance(out, (tuple, list)) else [out]
                targets = ", ".join(self.names.get(id(t)) or self._new(t) for t in made)
                call = f"{self._value(function)}({', '.join(given)})"
                if base is not None:
                    self.views[targets] = len(self.lines), given[0], out.data_ptr() - base.data_ptr()
                self.lines.append(f"{f'[{targets}]' if isinstance(out, (tuple, list)) else targets} = {call}")
            if any(tag in function.tags for tag in _UNREPEATABLE) or function.namespace != "aten":
                self.repeatable = False
        return out

    def launched(self, repeat: launch.Repeat | None, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Note the launch of a kernel; `repeat` is None where it cannot be repeated."""
        if repeat is None:
            self.repeatable = False
            return
        blocks = ", ".join(self._value(n) for n in (*grid, 1, 1)[:3])
        given = ", ".join(self._address(a) if isinstance(a, Tensor) else self._value(a) for a in (*args, *repeat.rest))
        run, function, metadata = (self._value(v) for v in (repeat.run, repeat.function, repeat.metadata))
        stream = f"{self._value(repeat.stream)}({self._value(args[0].get_device())})"
        self.lines.append(f"{run}({blocks}, {stream}, {function}, {metadata}, None, None, None, {given})")

    def plan(self, made: Any) -> Callable[..., Any] | None:
        """`plan(*args)` repeats what was recorded, or returns None where the arguments or a switch differ.

        None where that cannot be; `made` is what the launcher returned.
        """
        outputs = [self._given(t) for t in (made if isinstance(made, tuple) else (made,))]
        fresh = {self.names[id(t)] for t in self.kept}.difference(name for name, _ in self.inputs)
        if not self.repeatable or not fresh.issuperset(outputs):
            return None
        differs = [f"{self._value(reader)}() != {self._value(value)}" for reader, value in self.switches.items()]
        differs += [f"{name}.stride() != {self._value(tensor.stride())}" for name, tensor in self.inputs]
        if self.inputs:
            addresses = " | ".join(f"{name}.data_ptr()" for name, _ in self.inputs)
            differs.append(f"({addresses}) & {ALIGNMENT - 1}")
        for name, (line, base, _) in reversed(self.views.items()):
            if name in self.used:
                self.used.add(base)
            else:
                self.lines[line] = "pass"
        body = [f"if {' or '.join(differs)}:\n            return None", *(li for li in self.lines if li != "pass")]
        body.append(f"return {', '.join(outputs)}{',' if isinstance(made, tuple) else ''}")
        make = _compiled(self.count, len(self.values), "\n        ".join(body))
        return make(torch.empty_strided, *self.values)  # type: ignore[no-any-return]

    def _new(self, tensor: Any) -> str:
        if not isinstance(tensor, Tensor) or not self.inputs or tensor.device != self.inputs[0][1].device:
            self.repeatable = False  # a number, or one that a host may read
        name = f"t{self.count + len(self.kept)}"
        self._keep(tensor, name)
        return name

    def _given(self, argument: Any) -> str:
        """What stands for an argument of a torch function."""
        if isinstance(argument, (list, tuple)) and any(isinstance(a, Tensor) for a in argument):
            self.repeatable = False
        if not isinstance(argument, Tensor):
            return self._value(argument)
        name = self._name(argument)
        self.used.add(name)
        return name

    def _is_view(self, out: Any, base: Any) -> bool:
        """Whether a function gave a tensor that lies in the memory of its first argument."""
        return (
            isinstance(out, Tensor)
            and isinstance(base, Tensor)
            and id(out) not in self.names
            and min(out.numel(), base.numel()) > 0
            and out.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        )

    def _address(self, tensor: Tensor) -> str:
        """Where a tensor begins, told by the tensor that it is a view of."""
        name, offset = self._name(tensor), 0
        while name in self.views:
            _, name, later = self.views[name]
            offset += later
        return f"{name}.data_ptr()" + (f" + {offset}" if offset else "")

    def _keep(self, tensor: Any, name: str) -> None:
        self.kept.append(tensor)
        self.names[id(tensor)] = name

    def _name(self, tensor: Any) -> str:
        found = self.names.get(id(tensor))
        if found is None:
            self.repeatable = False
        return found or "None"

    def _value(self, value: Any) -> str:
        self.values.append(value)
        return f"v{len(self.values) - 1}"


@lru_cache(maxsize=256)
def _compiled(arguments: int, values: int, body: str) -> Callable[..., Any]:
    taken, named = (", ".join(f"{letter}{i}" for i in range(n)) for letter, n in (("t", arguments), ("v", values)))
    scope: dict[str, Any] = {}
    exec(f"def make(empty, {named}):\n    def plan({taken}):\n        {body}\n    return plan", scope)
    return scope["make"]  # type: ignore[no-any-return]
