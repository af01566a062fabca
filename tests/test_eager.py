"""The short way of a plain eager call, and everything that must not take it."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import triops
from triops import _op
from triops._op import OPERATORS

BOXES, OTHERS = torch.tensor([[0.0, 0, 4, 4], [1, 1, 3, 5]]), torch.tensor([[1.0, 1, 3, 3]])
OVERLAPS = OPERATORS["bbox_overlaps"]


def overlaps(boxes: Tensor) -> Tensor:
    return triops.bbox_overlaps(boxes, OTHERS)


def leaf() -> Tensor:
    return BOXES.clone().requires_grad_()


def gradient(function: Callable[[Tensor], Tensor] = overlaps) -> Tensor:
    boxes = leaf()
    function(boxes).sum().backward()
    assert boxes.grad is not None
    return boxes.grad


@contextmanager
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators that go through the dispatcher."""
    seen: list[str] = []
    with monkeypatch.context() as patch:
        for operator in OPERATORS.values():

            def spy(*args: Any, operator: _op.Operator = operator, overload: Any = operator.overload) -> Any:
                seen.append(operator.name)
                return overload(*args)

            spy.redispatch = operator.overload.redispatch  # type: ignore[attr-defined]
            patch.setattr(operator, "overload", spy)
        yield seen


def test_a_plain_call_and_its_backward_do_not_go_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with dispatched(monkeypatch) as seen:
        overlaps(BOXES)
        gradient()
        with torch.no_grad():
            overlaps(leaf())
        with torch.inference_mode():
            overlaps(BOXES + 1)
        with torch.autocast("cpu", torch.bfloat16):
            overlaps(BOXES)
    assert seen == []


class Wrapper(Tensor):
    """A tensor without memory of its own, which writes down what the dispatcher asks it for."""

    inner: Tensor
    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(function))
        return function(*[a.inner if isinstance(a, Wrapper) else a for a in args], **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class DispatchMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [DispatchMode, FunctionMode])
def test_a_mode_sees_the_operator(mode: type[DispatchMode | FunctionMode]) -> None:
    with mode() as watcher:
        out = overlaps(BOXES)
    assert "triops.bbox_overlaps.default" in watcher.seen
    assert torch.equal(out, overlaps(BOXES))


def test_a_dispatch_mode_sees_the_backward() -> None:
    with DispatchMode() as watcher:
        grad = gradient()
    assert "triops.bbox_overlaps_backward.default" in watcher.seen
    assert torch.equal(grad, gradient())


def test_a_tensor_subclass_sees_the_operator() -> None:
    Wrapper.seen.clear()
    out = overlaps(Wrapper(BOXES))
    assert Wrapper.seen == ["triops.bbox_overlaps.default"]
    assert torch.equal(out, overlaps(BOXES))


def test_a_subclass_with_a_torch_function_sees_the_operator() -> None:
    class Named(Tensor):
        seen: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    out = overlaps(BOXES.as_subclass(Named))
    assert "triops.bbox_overlaps.default" in Named.seen
    assert type(out) is Named


def test_make_fx_writes_the_operator_down() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(overlaps)(BOXES).graph
    assert [str(n.target) for n in graph.nodes if n.op == "call_function"] == ["triops.bbox_overlaps.default"]


def test_fake_tensors_stay_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(BOXES)
        assert isinstance(overlaps(fake), FakeTensor)
    assert isinstance(triops.bbox_overlaps(fake, fake), FakeTensor)  # behind the mode, too


@pytest.mark.filterwarnings("ignore")
def test_functionalize_and_jit_trace_see_the_operator() -> None:
    assert torch.equal(torch.func.functionalize(overlaps)(BOXES), overlaps(BOXES))
    traced = torch.jit.trace(overlaps, (BOXES,))
    assert "triops::bbox_overlaps" in str(traced.graph)


def test_the_profiler_sees_the_operator() -> None:
    with torch.profiler.profile() as profile:
        overlaps(BOXES)
    assert "triops::bbox_overlaps" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_maps() -> None:
    batch = torch.stack([BOXES, BOXES + 0.5])
    assert torch.equal(torch.vmap(overlaps)(batch), torch.stack([overlaps(b) for b in batch]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_reverse_mode_of_torch_func_gives_autograds_gradient() -> None:
    scalar = lambda boxes: overlaps(boxes).sum()  # noqa: E731
    assert torch.equal(torch.func.grad(scalar)(BOXES), gradient())
    assert torch.equal(torch.func.vjp(scalar, BOXES)[1](torch.tensor(1.0))[0], gradient())
    assert torch.equal(torch.func.jacrev(scalar)(BOXES), gradient())


def test_a_tensor_left_over_from_a_transform_is_unwrapped() -> None:
    left: list[Tensor] = []
    torch.func.grad(lambda boxes: (left.append(boxes), boxes.sum())[1])(BOXES)
    assert torch.equal(overlaps(left[0]), overlaps(BOXES))


def test_a_tensor_that_is_not_what_lies_at_its_address_is_read_right() -> None:
    negative = torch.complex(torch.zeros(2, 4), -BOXES).conj().imag
    assert negative.is_neg()
    assert torch.equal(overlaps(negative), overlaps(BOXES))
    zeros = torch._efficientzerotensor(2, 4)
    assert torch.equal(overlaps(zeros), overlaps(torch.zeros(2, 4)))


def test_meta_tensors_have_no_kernel() -> None:
    assert triops.bbox_overlaps(BOXES.to("meta"), OTHERS.to("meta")).device.type == "meta"


def test_inside_another_operators_kernel_nothing_is_recorded() -> None:
    seen: list[bool] = []

    @torch.library.custom_op("triops_test::outer", mutates_args=())
    def outer(boxes: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = overlaps(boxes)
        seen.append(inner.requires_grad)
        return inner

    outer.register_autograd(lambda ctx, grad: grad.sum() * torch.ones(2, 4))
    outer(leaf()).sum().backward()
    outer(BOXES)
    assert seen == [False, False]


# Forward mode


def with_dual_numbers(function: Callable[[Tensor], Tensor], value: Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(value, torch.ones_like(value)))


def with_jvp(function: Callable[[Tensor], Tensor], value: Tensor) -> None:
    torch.func.jvp(function, (value,), (torch.ones_like(value),))


def with_jacfwd(function: Callable[[Tensor], Tensor], value: Tensor) -> None:
    torch.func.jacfwd(function)(value)


@pytest.mark.parametrize("forward_mode", [with_dual_numbers, with_jvp, with_jacfwd])
def test_forward_mode_is_refused(forward_mode: Callable[..., None]) -> None:
    with pytest.raises(NotImplementedError, match=r"bbox_overlaps has no forward-mode derivative.*use reverse mode"):
        forward_mode(overlaps, BOXES)


def test_forward_mode_is_refused_under_compile() -> None:
    compiled = torch.compile(lambda v: torch.func.jvp(overlaps, (v,), (v,)), backend="eager", fullgraph=True)
    try:
        with pytest.raises(Exception, match="bbox_overlaps has no forward-mode derivative"):
            compiled(BOXES)
    finally:
        torch._dynamo.reset()  # which would not trace overlaps again


@pytest.mark.parametrize("forward_mode", [with_dual_numbers, with_jvp])
def test_forward_mode_is_refused_where_no_gradient_flows_at_all(forward_mode: Callable[..., None]) -> None:
    rectangles = torch.tensor([[0.0, 0, 2, 2, 0]])
    with pytest.raises(NotImplementedError, match="box_iou_rotated has no forward-mode derivative"):
        forward_mode(lambda r: triops.box_iou_rotated(r, rectangles), rectangles)


def test_forward_mode_passes_by_tensors_that_it_does_not_differentiate_and_integer_results() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros(1, 2, 3), torch.ones(1, 2, 3))
        assert triops.points_in_boxes(dual, torch.zeros(1, 1, 7)).tolist() == [[-1, -1]]
        overlaps(BOXES)
        assert overlaps(leaf()).requires_grad


# Autograd


def test_an_operator_without_a_gradient_records_nothing() -> None:
    rectangles = torch.tensor([[0.0, 0, 2, 2, 0]], requires_grad=True)
    assert not triops.box_iou_rotated(rectangles, rectangles).requires_grad


def test_checkpoint_anomaly_mode_hooks_and_a_kept_graph_give_the_same_gradient() -> None:
    expected = gradient()
    assert torch.equal(gradient(lambda b: checkpoint(overlaps, b, use_reentrant=False)), expected)
    assert torch.equal(gradient(lambda b: checkpoint(overlaps, b, use_reentrant=True)), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            anomalous = gradient()
    assert torch.equal(anomalous, expected)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, packed.__getitem__):
        assert torch.equal(gradient(), expected)
    assert len(packed) == 2
    boxes = leaf()
    out = overlaps(boxes)
    seen: list[Tensor] = []
    out.register_hook(lambda grad: seen.append(grad))
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    assert boxes.grad is not None
    assert torch.equal(boxes.grad, 2 * expected)
    assert len(seen) == 2


def test_a_saved_input_must_not_change() -> None:
    boxes = leaf() * 1
    out = overlaps(boxes)
    boxes.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_gradient_of_a_gradient_is_refused() -> None:
    boxes = leaf()
    (grad,) = torch.autograd.grad(overlaps(boxes).sum(), boxes, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated a second time"):
        grad.sum().backward()


def test_a_backward_asks_only_for_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("sparse_conv", "sparse_conv_backward_weight"):
        operator = OPERATORS[name]
        kernel = operator.kernel("cpu")

        def spy(*args: Any, name: str = name, kernel: Any = kernel) -> Any:
            called.append(name)
            return kernel(*args)

        monkeypatch.setitem(operator._kernels, "cpu", spy)
    rulebook = triops.Rulebook.submanifold(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3)
    features, weight = torch.ones(2, 1), torch.ones(1, 3, 1, requires_grad=True)
    triops.sparse_conv(features, weight, rulebook).sum().backward()
    assert called == ["sparse_conv", "sparse_conv_backward_weight"]


def test_a_plain_backward_is_not_checked_again_and_any_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    for name in ("sparse_conv", "sparse_conv_backward_weight"):
        operator = OPERATORS[name]
        check = operator.check
        monkeypatch.setattr(operator, "_passed", {})
        monkeypatch.setattr(operator, "check", lambda *a, n=name, c=check: (checked.append(n), c(*a)))
    rulebook = triops.Rulebook.submanifold(torch.tensor([[0, 2], [0, 3]]), 1, 8, 3)
    features, weight = torch.ones(2, 1, requires_grad=True), torch.ones(1, 3, 1, requires_grad=True)
    out = triops.sparse_conv(features, weight, rulebook)
    plain = torch.autograd.grad(out.sum(), (features, weight), retain_graph=True)
    assert checked == ["sparse_conv"]
    recorded = torch.autograd.grad(out.sum(), (features, weight), create_graph=True)
    assert checked == ["sparse_conv", "sparse_conv_backward_weight", "sparse_conv"]
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


# Checks that are remembered


def test_a_check_runs_once_for_all_calls_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(OVERLAPS, "_passed", {})
    monkeypatch.setattr(OVERLAPS, "check", lambda *args: calls.append(args))
    for _ in range(3):
        overlaps(torch.rand(5, 4))
    overlaps(torch.rand(6, 4))
    overlaps(torch.rand(5, 4).double())
    assert len(calls) == 3


def test_what_is_remembered_is_bounded_and_holds_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OVERLAPS, "_passed", {})
    monkeypatch.setattr(_op, "MOST_REMEMBERED", 4)
    boxes = torch.rand(3, 4)
    kept = weakref.ref(boxes)
    overlaps(boxes)
    del boxes
    gc.collect()
    assert kept() is None
    for rows in range(9):
        overlaps(torch.rand(rows, 4))
    assert len(OVERLAPS._passed) <= 4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"aligned": 1}, "aligned must be a bool, got int"),
        ({"offset": True}, "offset must be an integer, got bool"),
        ({"offset": 1.0}, "offset must be an integer, got float"),
        ({"offset": 2**64}, "offset must fit in 64 bits"),
        ({"mode": "giou"}, "mode must be 'iou' or 'iof'"),
        ({"bboxes2": None}, "bboxes2 must be a Tensor, got NoneType"),
        ({"bboxes2": BOXES.to_sparse()}, "bboxes2 must be a dense tensor"),
        ({"bboxes2": BOXES.double()}, "must have one dtype"),
        ({"bboxes2": BOXES[:1]}, "aligned needs as many bboxes2 as bboxes1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_good_call_does_not_excuse_a_bad_one(options: dict[str, Any], error: str) -> None:
    good = {"bboxes1": BOXES, "bboxes2": BOXES, "mode": "iou", "aligned": True, "offset": 1}
    for _ in range(2):
        triops.bbox_overlaps(**good)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match=error):
            triops.bbox_overlaps(**{**good, **options})


def test_numbers_reach_a_kernel_as_the_dispatcher_would_pass_them(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS["points_in_boxes"]
    seen: list[Any] = []
    kernel = operator.kernel("cpu")
    monkeypatch.setitem(operator._kernels, "cpu", lambda *args: seen.append(args[3]) or kernel(*args))
    for margin in (0.0, 0, 1):
        triops.points_in_boxes(torch.zeros(1, 1, 3), torch.zeros(1, 1, 7), margin=margin)
    assert [(type(m), m) for m in seen] == [(float, 0.0), (float, 0.0), (float, 1.0)]


def test_values_are_looked_at_in_every_call() -> None:
    boxes, argmax = torch.zeros(1, 1, 4), torch.zeros(1, 1, 1, 4, dtype=torch.int32)
    for _ in range(2):
        triops.border_align_backward(torch.ones(1, 1, 1, 4), boxes, argmax, (1, 4, 2, 2), 1)
        with pytest.raises(IndexError):
            triops.border_align_backward(torch.ones(1, 1, 1, 4), boxes, argmax + 7, (1, 4, 2, 2), 1)
