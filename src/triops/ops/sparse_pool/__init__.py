"""sparse_max_pool and sparse_avg_pool: pooling over a rulebook, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triops import _check, _op
from triops.ops.rulebook import Rulebook, check_rulebook
from triops.ops.rulebook.rulebook import Tables, scatter_of
from triops.ops.sparse_pool import reference


def sparse_max_pool(features: Tensor, rulebook: Rulebook) -> Tensor:
    """The largest feature among the input sites that an output site meets, channel by channel.

    A true maximum: empty sites do not take part, so negative features survive. Of equal maxima the one under the
    lowest kernel offset gets the gradient. NaN counts as the largest value.

    Args:
        features: float tensor [N, C], one row for each input site of the rulebook.
        rulebook: see `Rulebook`.

    Returns:
        Tensor [A, C], one row for each output site; 0 for an output that meets no input, which only a table made by
        hand can hold.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device.
        IndexError: as `sparse_conv`.

    >>> import torch
    >>> from triops import Rulebook
    >>> from triops.ops.sparse_pool import sparse_max_pool
    >>> rulebook = Rulebook.sparse(torch.tensor([[0, 0], [0, 1], [0, 4]]), 1, 6, kernel_size=2, stride=2)
    >>> sparse_max_pool(torch.tensor([[-3.0], [-1.0], [-2.0]]), rulebook)
    tensor([[-1.],
            [-2.]])
    """
    check_rulebook("sparse_max_pool", rulebook)
    tables = rulebook.tables
    return _sparse_max_pool(features, tables.gather, _scatter_for(features, tables))[0]  # type: ignore[no-any-return]


def sparse_max_pool_from_zero(features: Tensor, rulebook: Rulebook) -> Tensor:
    """As `sparse_max_pool` in spconv and mmcv: a maximum that starts at 0, as if every window held an empty site.

    Every input that equals the output of its window gets the gradient, equal maxima each the whole of it. For networks
    that were trained with either; `sparse_max_pool` is the true maximum.

    >>> import torch
    >>> from triops.ops.sparse_conv import Rulebook
    >>> from triops.ops.sparse_pool import sparse_max_pool_from_zero
    >>> rulebook = Rulebook.sparse(torch.tensor([[0, 0], [0, 1], [0, 4]]), 1, 6, kernel_size=2, stride=2)
    >>> sparse_max_pool_from_zero(torch.tensor([[3.0], [-1.0], [-2.0]]), rulebook)
    tensor([[3.],
            [0.]])
    """
    check_rulebook("sparse_max_pool_from_zero", rulebook)
    tables = rulebook.tables
    return _sparse_max_pool_from_zero(  # type: ignore[no-any-return]
        features, tables.gather, _scatter_for(features, tables)
    )


def sparse_avg_pool(features: Tensor, rulebook: Rulebook) -> Tensor:
    """The mean of the features of the input sites that an output site meets: over those that exist, not over the
    volume of the kernel.

    Args:
        features: float tensor [N, C], one row for each input site of the rulebook.
        rulebook: see `Rulebook`.

    Returns:
        Tensor [A, C], one row for each output site; 0 for an output that meets no input. Summed in float32 for half
        types.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device.
        IndexError: as `sparse_conv`.

    >>> import torch
    >>> from triops import Rulebook
    >>> from triops.ops.sparse_pool import sparse_avg_pool
    >>> rulebook = Rulebook.sparse(torch.tensor([[0, 0], [0, 1], [0, 4]]), 1, 6, kernel_size=2, stride=2)
    >>> sparse_avg_pool(torch.tensor([[-3.0], [-1.0], [-2.0]]), rulebook)
    tensor([[-2.],
            [-2.]])
    """
    check_rulebook("sparse_avg_pool", rulebook)
    tables = rulebook.tables
    return _sparse_avg_pool(features, tables.gather, _scatter_for(features, tables))[0]  # type: ignore[no-any-return]


def sparse_avg_pool_times_count(features: Tensor, rulebook: Rulebook) -> Tensor:
    """As `sparse_avg_pool` in spconv: the same means, but with a gradient that is multiplied by the number of inputs
    that an output meets. The gradient of the mean is divided by it.

    For networks that were trained with spconv; `sparse_avg_pool` has the true gradient.

    >>> import torch
    >>> from triops import Rulebook
    >>> from triops.ops.sparse_pool import sparse_avg_pool_times_count
    >>> rulebook = Rulebook.sparse(torch.tensor([[0, 0], [0, 1], [0, 4]]), 1, 6, kernel_size=2, stride=2)
    >>> features = torch.tensor([[-3.0], [-1.0], [-2.0]], requires_grad=True)
    >>> sparse_avg_pool_times_count(features, rulebook).sum().backward()
    >>> features.grad
    tensor([[2.],
            [2.],
            [1.]])
    """
    check_rulebook("sparse_avg_pool_times_count", rulebook)
    tables = rulebook.tables
    return _sparse_avg_pool_times_count(  # type: ignore[no-any-return]
        features, tables.gather, _scatter_for(features, tables)
    )[0]


def _scatter_for(features: Tensor, tables: Tables) -> Tensor:
    """The transposed table, which only a gradient reads; where none is wanted, one of its shape that says nothing.

    Features of a gradient do not always say so: inside of `vmap`, and while a graph is exported that is trained later.
    So the latter has strides of 0, by which `_transposed` knows it.
    """
    if torch.is_grad_enabled() and isinstance(features, Tensor) and features.requires_grad:
        return scatter_of(tables)
    return tables.gather.new_full((1,), -1).as_strided((tables.gather.shape[0], tables.inputs), (0, 0))


def _transposed(gather: Tensor, scatter: Tensor) -> Tensor:
    """The transposed table that a gradient reads."""
    return scatter_of(Tables(gather, scatter.shape[1])) if scatter.stride(1) == 0 else scatter


def _check_forward(operator: str, features: Tensor, gather: Tensor, scatter: Tensor) -> None:
    c = _check.Checker(operator)
    c.shape("features", features, "N", "C")
    c.shape("gather", gather, "K", "A")
    c.shape("scatter", scatter, "K", "N")
    c.dtype("features", features, _check.FLOATS)
    c.dtype("gather", gather, (torch.int32,))
    c.dtype("scatter", scatter, (torch.int32,))
    c.same_device(features=features, gather=gather, scatter=scatter)


def _check_max(features: Tensor, gather: Tensor, scatter: Tensor) -> None:
    _check_forward("sparse_max_pool", features, gather, scatter)


def _check_from_zero(features: Tensor, gather: Tensor, scatter: Tensor) -> None:
    _check_forward("sparse_max_pool_from_zero", features, gather, scatter)


def _check_avg(features: Tensor, gather: Tensor, scatter: Tensor) -> None:
    _check_forward("sparse_avg_pool", features, gather, scatter)


def _check_times_count(features: Tensor, gather: Tensor, scatter: Tensor) -> None:
    _check_forward("sparse_avg_pool_times_count", features, gather, scatter)


def _check_max_backward(grad_output: Tensor, argmax: Tensor, scatter: Tensor) -> None:
    c = _check.Checker("sparse_max_pool_backward")
    c.shape("grad_output", grad_output, "A", "C")
    c.shape("argmax", argmax, "A", "C")
    _check_backward(c, grad_output, scatter, "argmax", argmax)


def _check_from_zero_backward(grad_output: Tensor, features: Tensor, output: Tensor, scatter: Tensor) -> None:
    c = _check.Checker("sparse_max_pool_from_zero_backward")
    c.shape("grad_output", grad_output, "A", "C")
    c.shape("features", features, "N", "C")
    c.shape("output", output, "A", "C")
    c.shape("scatter", scatter, "K", "N")
    c.dtype("grad_output", grad_output, _check.FLOATS)
    c.same_dtype(grad_output=grad_output, features=features, output=output)
    c.dtype("scatter", scatter, (torch.int32,))
    c.same_device(grad_output=grad_output, features=features, output=output, scatter=scatter)


def _check_avg_backward(grad_output: Tensor, count: Tensor, scatter: Tensor) -> None:
    c = _check.Checker("sparse_avg_pool_backward")
    c.shape("grad_output", grad_output, "A", "C")
    c.shape("count", count, "A")
    _check_backward(c, grad_output, scatter, "count", count)


def _check_backward(c: _check.Checker, grad_output: Tensor, scatter: Tensor, name: str, saved: Tensor) -> None:
    c.shape("scatter", scatter, "K", "N")
    c.dtype("grad_output", grad_output, _check.FLOATS)
    c.dtype(name, saved, (torch.int32,))
    c.dtype("scatter", scatter, (torch.int32,))
    c.same_device(**{"grad_output": grad_output, name: saved, "scatter": scatter})


def _fake_max(features: Tensor, gather: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    out = features.new_empty((gather.shape[1], features.shape[1]))
    return out, torch.empty_like(out, dtype=torch.int32)


def _fake_from_zero(features: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
    return features.new_empty((gather.shape[1], features.shape[1]))


def _fake_from_zero_backward(grad_output: Tensor, features: Tensor, output: Tensor, scatter: Tensor) -> Tensor:
    return features.new_empty(features.shape)


def _fake_avg(features: Tensor, gather: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor]:
    outputs = gather.shape[1]
    return features.new_empty((outputs, features.shape[1])), gather.new_empty((outputs,))


def _fake_backward(grad_output: Tensor, saved: Tensor, scatter: Tensor) -> Tensor:
    return grad_output.new_empty((scatter.shape[1], grad_output.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], _transposed(*inputs[1:]))


def _backward_max(ctx: Any, grad: Tensor, grad_argmax: Tensor | None) -> tuple[Tensor, None, None]:
    return _sparse_max_pool_backward(grad, *ctx.saved_tensors), None, None


def _setup_from_zero(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output, _transposed(*inputs[1:]))


def _backward_from_zero(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _sparse_max_pool_from_zero_backward(grad, *ctx.saved_tensors), None, None


def _backward_avg(ctx: Any, grad: Tensor, grad_count: Tensor | None) -> tuple[Tensor, None, None]:
    return _sparse_avg_pool_backward(grad, *ctx.saved_tensors), None, None


def _backward_times_count(ctx: Any, grad: Tensor, grad_count: Tensor | None) -> tuple[Tensor, None, None]:
    count, scatter = ctx.saved_tensors
    return _sparse_avg_pool_backward(grad * count[:, None], torch.ones_like(count), scatter), None, None


_sparse_max_pool_backward = _op.define(
    reference.sparse_max_pool_backward, check=_check_max_backward, fake=_fake_backward,
    backward=_op.no_second_derivative,
)  # fmt: skip
_sparse_max_pool = _op.define(
    reference.sparse_max_pool, check=_check_max, fake=_fake_max, setup_context=_setup_context, backward=_backward_max
)
_sparse_max_pool_from_zero_backward = _op.define(
    reference.sparse_max_pool_from_zero_backward, check=_check_from_zero_backward, fake=_fake_from_zero_backward,
    backward=_op.no_second_derivative,
)  # fmt: skip
_sparse_max_pool_from_zero = _op.define(
    reference.sparse_max_pool_from_zero, check=_check_from_zero, fake=_fake_from_zero, setup_context=_setup_from_zero,
    backward=_backward_from_zero,
)  # fmt: skip
_sparse_avg_pool_backward = _op.define(
    reference.sparse_avg_pool_backward, check=_check_avg_backward, fake=_fake_backward,
    backward=_op.no_second_derivative,
)  # fmt: skip
_sparse_avg_pool = _op.define(
    reference.sparse_avg_pool, check=_check_avg, fake=_fake_avg, setup_context=_setup_context, backward=_backward_avg
)
_sparse_avg_pool_times_count = _op.define(
    reference.sparse_avg_pool_times_count, check=_check_times_count, fake=_fake_avg, setup_context=_setup_context,
    backward=_backward_times_count,
)  # fmt: skip

__all__ = ["sparse_avg_pool", "sparse_avg_pool_times_count", "sparse_max_pool", "sparse_max_pool_from_zero"]
