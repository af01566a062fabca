"""The one mechanism of the library: an operator is a schema, a reference and kernels.

`define(reference)` reads the schema from the reference's annotations and registers
`torch.ops.triops.<name>`. Faster kernels are found by convention: `cpu.py` (Numba) and `gpu.py`
(Triton) beside `reference.py`, each holding a function of the same name, imported on first use.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from triops import _eager, _environment
from triops._schema import Signature, is_plain

log = logging.getLogger("triops")
_lib = torch.library.Library("triops", "DEF")

OPERATORS: dict[str, Operator] = {}

# Which package a backend stands on, and what a user does when it is missing.
REQUIREMENTS = {"cpu": ("numba", "pip install numba"), "gpu": ("triton", "pip install triton")}

MOST_REMEMBERED = 1024  # checks that passed, of one operator

# Whether calls run the reference: for the whole process by TRIOPS_BACKEND, for one thread inside `reference_backend`.
_forced_always: bool = _environment.reference_forced()
_forced_reference: ContextVar[bool] = ContextVar("triops reference", default=_forced_always)

# `triops.acceptance.record` puts a function here when TRIOPS_RECORD asks for every call to be written down.
# It runs the kernel that it is given.
recorder: Callable[[Operator, Callable[..., Any], tuple[Any, ...]], Any] | None = None


class Operator:
    """A registered operator. Calling it checks the arguments and runs a kernel.

    A plain eager call goes straight from the check to the kernel, through one `torch.autograd.Function` where it is
    differentiated. Whatever PyTorch's dispatcher has to see goes through the dispatcher; see `_eager.plain`.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        check: Callable[..., None],
        fake: Callable[..., Any],
        function: Any = None,
    ) -> None:
        self.name: str = reference.__name__
        self.package: str = reference.__module__.rpartition(".")[0]
        self.reference = torch.no_grad()(reference)
        self.check = check
        self.fake = fake
        self.differentiable = False
        self.dynamic_output = False  # True: the output's size depends on the data
        self.overload: Any = None
        self.signature = Signature(reference)
        self.parameters = self.signature.parameters
        self._kernels: dict[str, Callable[..., Any]] = {"reference": self.reference}
        self._apply: Any = None if function is None else function.apply
        self._runs: dict[str, Callable[..., Any]] = {}  # behind the check, by the type of the device
        self._passed: dict[Any, Callable[..., Any]] = {}  # of those, what runs the calls that passed, by their key
        self._of_backward: dict[Any, Callable[..., Any]] = {}  # the same for calls that only a backward makes

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # the tracer checks types; a look at a size would become a condition on it
            return self.overload(*args)
        key = self.signature.key(args)
        if key is None:
            args = self.signature.accepted(args)
            key = self.signature.key(args)
        if key is None or not _eager.plain():
            return self.overload(*self.signature.accepted(args))
        run = self._passed.get(key) or self._admit(key, args)
        if torch.is_grad_enabled() and self._requires_grad(args):
            if self._apply is None:
                with torch.no_grad():
                    return run(*args)
            return self.overload(*args) if _eager.below_autograd() else self._differentiated(args, run)
        return run(*args)

    def of_backward(self, *args: Any) -> Any:
        """A call that a backward makes, not checked again where it is plain and no gradient of it is wanted.

        Autograd has compared the gradient, one of the first two arguments, with the output that it belongs to, and the
        other arguments are those of the forward, which were checked.
        """
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling() and _eager.plain():
            first, second = args[0], args[1]
            if first.is_cuda:
                key = self.signature.key(args)
                run = None if key is None else self._of_backward.get(key)
                if run is not None:
                    return run(*args)
            else:
                key = None
            run = self._runs.get(first.device.type)
            if run is not None and is_plain(first) and is_plain(second):
                return (run if key is None else self._remember(self._of_backward, key, run))(*args)
        return self(*args)

    def __repr__(self) -> str:
        return f"<operator triops::{self.name}>"

    @property
    def backends(self) -> list[str]:
        """Backends that this operator has a kernel for, whether or not they can run here."""
        return ["reference", *(b for b in REQUIREMENTS if find_spec(f"{self.package}.{b}"))]

    def kernel(self, backend: str) -> Callable[..., Any]:
        """The function behind a backend, unchecked; the reference where its requirement is missing."""
        found = self._kernels.get(backend)
        if found is None:
            found = self._kernels[backend] = self._load(backend)
        return found

    def _load(self, backend: str) -> Callable[..., Any]:
        reason = why_unusable(backend)
        if reason:
            warn_unusable(backend, reason)
            return self.reference
        kernel: Callable[..., Any] = getattr(import_module(f"{self.package}.{backend}"), self.name)
        return kernel

    def _admit(self, key: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        """What runs a plain call, which is checked here once for all that have its key."""
        self._check(self.signature.accepted(args))
        devices = {args[i].device.type for i in self.signature.tensors if args[i] is not None}
        run = self._runs.get(devices.pop(), self.overload) if len(devices) == 1 else self.overload
        return self._remember(self._passed, key, run)

    def _remember(self, calls: dict[Any, Callable[..., Any]], key: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """Keep what runs the calls of a key. Those of a GPU are repeated where they come often."""
        if run is self._runs.get("cuda") and not _forced_reference.get() and not why_unusable("gpu"):
            run = import_module("triops._gpu.replay").replayed(run, _ordinary)
        if len(calls) >= MOST_REMEMBERED:
            calls.clear()
        calls[key] = run
        return run

    def _runner(self, backend: str) -> Callable[..., Any]:
        """Behind every check: choose, log, run."""

        several = _several_gpus if backend == "gpu" else bool

        def run(*args: Any) -> Any:
            forced = _forced_reference.get()
            kernel = self.reference if forced else self._kernels.get(backend) or self.kernel(backend)
            if log.isEnabledFor(logging.DEBUG):
                why = "forced" if forced else "fallback" if kernel is self.reference else "device"
                used = "reference" if kernel is self.reference else backend
                log.debug("%s(%s) -> %s (%s)", self.name, describe(self.parameters, args), used, why)
            if several():
                with torch.cuda.device(_device_of(args)):  # Triton launches on the current device, not the tensors'
                    return kernel(*args) if recorder is None else recorder(self, kernel, args)
            return kernel(*args) if recorder is None else recorder(self, kernel, args)

        return run

    def _checked(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What the dispatcher calls below autograd."""

        def checked(*args: Any) -> Any:
            self._check(args)
            return run(*args)

        return checked

    def _autograd(self, keys: Any, *args: Any) -> Any:
        """What the dispatcher calls for autograd."""

        def below(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return self.overload.redispatch(keys & torch._C._after_autograd_keyset, *args)

        if _eager.has_tangent(args):
            out = below(*args)
            if any(t.is_floating_point() for t in (out if isinstance(out, tuple) else (out,))):
                raise NotImplementedError(
                    f"triops: {self.name} has no forward-mode derivative (torch.func.jvp, jacfwd, dual numbers)"
                    + ("; use reverse mode: torch.func.vjp, jacrev or backward()" if self.differentiable else "")
                )
            return out
        if self._apply is not None and torch.is_grad_enabled() and self._requires_grad(args):
            with enable_single_level_autograd_function():  # of functorch's levels the dispatcher has come to one
                return self._differentiated(args, below)
        return below(*args)

    def _differentiated(self, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        """What `run` makes of the arguments, known to autograd; see `_function`."""
        call = [run]
        output = self._apply(*args, call)
        return output if len(call) == 1 else (output, *call[1:])

    def _requires_grad(self, args: tuple[Any, ...]) -> bool:
        for position in self.signature.tensors:
            tensor = args[position]
            if tensor is not None and tensor.requires_grad:
                return True
        return False

    def _check(self, args: tuple[Any, ...]) -> None:
        for position in self.signature.tensors:
            value = args[position]
            if value is not None and value.layout is not torch.strided:
                name = self.parameters[position]
                raise ValueError(f"{self.name}: {name} must be a dense tensor, got one of layout {value.layout}")
        self.check(*args)

    def _checked_fake(self, *args: Any) -> Any:
        self._check(args)
        return self.fake(*args)


def _ordinary() -> bool:
    """Whether a call runs its kernel as it is, and nobody wants to hear of it."""
    return not (
        _forced_reference.get()
        or recorder is not None
        or log.isEnabledFor(logging.DEBUG)
        or _environment.check_values()
    )


def _device_of(args: tuple[Any, ...]) -> torch.device:
    return next(a.device for a in args if isinstance(a, Tensor))


@cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1


def define(
    reference: Callable[..., Any],
    *,
    check: Callable[..., None],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Operator:
    """Register `triops::<reference.__name__>`.

    check:  raises on a bad call; takes the reference's arguments. It runs before every kernel and
            while tracing, so kernels trust what they get. It may look at shapes, dtypes, devices and plain
            values, and at nothing else of a tensor: a check that passed is remembered by these.
    fake:   returns empty outputs of the right shape, dtype and strides (torch's fake/meta function).
    setup_context, backward: as in `torch.library.register_autograd`; without them no gradient flows.
            An operator that is itself a backward takes `backward=no_second_derivative`.
    """
    op = Operator(reference, check, fake, None if backward is None else _function(reference, setup_context, backward))
    if op.name in OPERATORS:
        raise ValueError(f"operator {op.name} is defined twice")
    op.differentiable = backward is not None and backward is not no_second_derivative
    _lib.define(op.name + op.signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(op.name, op._checked(op._runner("reference")), "CompositeExplicitAutograd")
    for backend, device in (("cpu", "cpu"), ("gpu", "cuda"), ("gpu", "xpu")):
        if backend in op.backends:
            op._runs[device] = op._runner(backend)
            _lib.impl(op.name, op._checked(op._runs[device]), device.upper())
    # Without this, eager autograd would record the reference's torch calls and compile would not.
    _lib.impl(op.name, op._autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"triops::{op.name}", op._checked_fake, lib=_lib)
    op.overload = getattr(torch.ops.triops, op.name).default
    OPERATORS[op.name] = op
    return op


def no_second_derivative(context: Any, *grads: Any) -> Any:
    """The backward of a backward operator: refuses, where plain torch would silently detach."""
    raise RuntimeError("triops: the gradient of this operator cannot be differentiated a second time")


def _function(
    reference: Callable[..., Any], setup_context: Callable[..., None] | None, backward: Callable[..., Any]
) -> Any:
    """Autograd's side of an operator, a `torch.autograd.Function`; its last argument, a list, holds the forward.

    Where the first of several outputs alone is differentiable, it alone is returned, and the others go into that list:
    autograd takes microseconds for each output. A backward runs the reference where its forward did, on whichever
    thread.
    """
    known: list[tuple[bool, int]] = []  # whether one output is differentiable, and how many autograd does not see

    def forward(ctx: Any, *args: Any) -> Any:
        inputs, call = args[:-1], args[-1]
        output = call[0](*inputs)
        ctx.forced_reference = _forced_reference.get()
        if setup_context is not None:
            setup_context(ctx, inputs, output)
        if not known:
            one, several = _differentiable(ctx, output), isinstance(output, tuple)
            known.append((len(one) == 1, len(output) - 1 if several and one == [0] else 0))
        alone, unseen = known[0]
        if alone:  # else autograd fills gradients of zeros for indices and the like, a launch each
            ctx.set_materialize_grads(False)
        if unseen:
            call.extend(output[1:])
            return output[0]
        return output

    def backward_and_none(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None and all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        if known[0][1]:
            grads = (*grads, *(None,) * known[0][1])
        if ctx.forced_reference == _forced_reference.get():  # spares every backward the microsecond below
            return *backward(ctx, *grads), None
        with _forced(ctx.forced_reference):
            return *backward(ctx, *grads), None

    key = torch.autograd.Function._compiled_autograd_key
    members = {"forward": forward, "backward": backward_and_none, "_compiled_autograd_key": key}
    # Not torch.autograd.Function itself: its apply asks for functorch's levels, which the dispatcher has taken apart.
    return type(reference.__name__, (_SingleLevelFunction,), {k: staticmethod(f) for k, f in members.items()})


def _differentiable(ctx: Any, output: Any) -> list[int]:
    """Which outputs a gradient flows through."""
    outputs = output if isinstance(output, tuple) else (output,)
    others = getattr(ctx, "non_differentiable", None) or ()
    return [i for i, t in enumerate(outputs) if t.is_floating_point() and all(t is not other for other in others)]


@contextmanager
def _forced(value: bool) -> Iterator[None]:
    before = _forced_reference.get()
    _forced_reference.set(value)
    try:
        yield
    finally:
        _forced_reference.set(before)


@contextmanager
def reference_backend() -> Iterator[None]:
    """Inside this block every operator runs its plain-torch reference, on any device.

    The block covers the thread (and the asyncio task) that entered it and no other. The backward of a call takes the
    backend of the call, whether it runs inside the block or behind it, and on whichever of autograd's threads. The
    one exception is a function under `torch.compile`: the block goes around the compiled function, and its backward
    on a GPU, which is one function on a thread of autograd's own, is not covered. The environment variable
    `TRIOPS_BACKEND=reference` covers a whole process, compiled functions included.

    >>> import torch, triops
    >>> with triops.reference_backend():
    ...     triops.points_in_boxes(torch.zeros(1, 1, 3), torch.tensor([[[0., 0, 0, 2, 2, 2, 0]]]))
    tensor([[0]], dtype=torch.int32)
    """
    with _forced(True):
        yield


def describe(names: list[str], args: tuple[Any, ...]) -> str:
    """`points=float32[1, 5, 3]@cpu, margin=0.0`: one call's arguments on one line."""
    parts = []
    for name, value in zip(names, args, strict=False):
        if isinstance(value, Tensor):
            value = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}@{value.device}"
        parts.append(f"{name}={value}")
    return ", ".join(parts)


@cache
def why_unusable(backend: str) -> str:
    """Why the package that a backend stands on cannot be used here, with the remedy; empty where it can.

    Imports the package: one that is installed may still be broken, such as Numba beside a NumPy that is too new for it.
    """
    package, remedy = REQUIREMENTS[backend]
    if find_spec(package) is None:
        return f"{package} is not installed. Remedy: {remedy}"
    try:
        import_module(package)
    except Exception as error:  # a broken package raises whatever it likes
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return f"{package} is installed but cannot be imported ({words}). Remedy: {remedy} --upgrade"
    return ""


_warned: set[str] = set()


def warn_unusable(backend: str, reason: str) -> None:
    if backend not in _warned:
        _warned.add(backend)
        warnings.warn(
            f"triops: {backend.upper()} calls use the slow plain-torch reference: {reason}",
            RuntimeWarning,
            stacklevel=4,
        )


_environment.apply_log_level(log)
