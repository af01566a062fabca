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

from triops import _environment
from triops._schema import Signature

log = logging.getLogger("triops")
_lib = torch.library.Library("triops", "DEF")

OPERATORS: dict[str, Operator] = {}

# Which package a backend stands on, and what a user does when it is missing.
REQUIREMENTS = {"cpu": ("numba", "pip install numba"), "gpu": ("triton", "pip install triton")}

# Whether calls run the reference: for the whole process by TRIOPS_BACKEND, for one thread inside `reference_backend`.
_forced_always: bool = _environment.reference_forced()
_forced_reference: ContextVar[bool] = ContextVar("triops reference", default=_forced_always)

# `triops.acceptance.record` puts a function here when TRIOPS_RECORD asks for every call to be written down.
# It runs the kernel that it is given.
recorder: Callable[[Operator, Callable[..., Any], tuple[Any, ...]], Any] | None = None


class Operator:
    """A registered operator. Calling it checks the arguments' types and goes through PyTorch's dispatcher."""

    def __init__(
        self,
        reference: Callable[..., Any],
        check: Callable[..., None],
        fake: Callable[..., Any],
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

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # the tracer checks types; a look at a size would become a condition on it
            return self.overload(*args)
        signature = self.signature
        return self.overload(*(args if signature.all_plain(args) else signature.accepted(args)))

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
            _warn_unusable(backend, reason)
            return self.reference
        kernel: Callable[..., Any] = getattr(import_module(f"{self.package}.{backend}"), self.name)
        return kernel

    def _entry(self, backend: str) -> Callable[..., Any]:
        """What the dispatcher calls: check, choose, log, run."""

        def call(*args: Any) -> Any:
            self._check(args)
            forced = _forced_reference.get()
            kernel = self.reference if forced else self.kernel(backend)
            if log.isEnabledFor(logging.DEBUG):
                why = "forced" if forced else "fallback" if kernel is self.reference else "device"
                used = "reference" if kernel is self.reference else backend
                log.debug("%s(%s) -> %s (%s)", self.name, describe(self.parameters, args), used, why)
            if backend == "gpu" and torch.cuda.device_count() > 1:
                with torch.cuda.device(_device_of(args)):  # Triton launches on the current device, not the tensors'
                    return kernel(*args) if recorder is None else recorder(self, kernel, args)
            return kernel(*args) if recorder is None else recorder(self, kernel, args)

        return call

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


def _device_of(args: tuple[Any, ...]) -> torch.device:
    return next(a.device for a in args if isinstance(a, Tensor))


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
            while tracing, so kernels trust what they get.
    fake:   returns empty outputs of the right shape, dtype and strides (torch's fake/meta function).
    setup_context, backward: as in `torch.library.register_autograd`; without them no gradient flows.
            An operator that is itself a backward takes `backward=no_second_derivative`.
    """
    op = Operator(reference, check, fake)
    if op.name in OPERATORS:
        raise ValueError(f"operator {op.name} is defined twice")
    _lib.define(op.name + op.signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(op.name, op._entry("reference"), "CompositeExplicitAutograd")
    for backend, key in (("cpu", "CPU"), ("gpu", "CUDA"), ("gpu", "XPU")):
        if find_spec(f"{op.package}.{backend}"):
            _lib.impl(op.name, op._entry(backend), key)
    torch.library.register_fake(f"triops::{op.name}", op._checked_fake, lib=_lib)
    if backward is None:
        # Without this, eager autograd would record the reference's torch calls and compile would not.
        _lib.impl(op.name, torch.library.fallthrough_kernel, "Autograd")
    else:
        op.differentiable = backward is not no_second_derivative
        if op.differentiable:
            setup_context, backward = _on_one_backend(setup_context, backward)
        torch.library.register_autograd(f"triops::{op.name}", backward, setup_context=setup_context, lib=_lib)
    op.overload = getattr(torch.ops.triops, op.name).default
    OPERATORS[op.name] = op
    return op


def no_second_derivative(context: Any, *grads: Any) -> Any:
    """The backward of a backward operator: refuses, where plain torch would silently detach."""
    raise RuntimeError("triops: the gradient of this operator cannot be differentiated a second time")


def _on_one_backend(
    setup_context: Callable[..., None] | None, backward: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Autograd's functions, so that a backward runs the reference where its forward did, on whichever thread."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.forced_reference = _forced_reference.get()
        if setup_context is not None:
            setup_context(ctx, inputs, output)

    def run(ctx: Any, *grads: Any) -> Any:
        if ctx.forced_reference == _forced_reference.get():  # spares every backward the microsecond below
            return backward(ctx, *grads)
        with _forced(ctx.forced_reference):
            return backward(ctx, *grads)

    return setup, run


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


def _warn_unusable(backend: str, reason: str) -> None:
    if backend not in _warned:
        _warned.add(backend)
        warnings.warn(
            f"triops: {backend.upper()} calls use the slow plain-torch reference: {reason}",
            RuntimeWarning,
            stacklevel=4,
        )


_environment.apply_log_level(log)
