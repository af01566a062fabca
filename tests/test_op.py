"""The operator mechanism: lazy imports, dispatch, fallback, logging, the reference backend."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext

import pytest
import torch

import triops
from triops._op import OPERATORS, Operator
from triops._schema import Signature

pytestmark = pytest.mark.versions


POINTS, BOXES = torch.zeros(1, 2, 3), torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0]]])


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    import os

    env = {**os.environ, "TRITON_INTERPRET": "0", **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, timeout=300
    )


def test_import_brings_in_neither_numba_nor_triton() -> None:
    done = python("import sys, triops; print(sorted({'numba', 'triton', 'matplotlib', 'typer'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_a_cpu_call_does_not_bring_in_triton() -> None:
    done = python("""
        import sys, torch, triops
        triops.points_in_boxes(torch.zeros(1, 2, 3), torch.zeros(1, 1, 7))
        print('numba' in sys.modules, 'triton' in sys.modules)
    """)
    assert done.stdout.strip() == "True False", done.stderr


def test_without_numba_the_reference_answers_and_one_warning_says_so() -> None:
    done = python("""
        import sys, warnings
        import importlib.util as u
        real = u.find_spec
        u.find_spec = lambda name, *a: None if name == 'numba' else real(name, *a)
        import torch, triops
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            for _ in range(3):
                out = triops.points_in_boxes(torch.zeros(1, 2, 3), torch.tensor([[[0., 0, 0, 2, 2, 2, 0]]]))
        print(out.tolist(), len(caught), 'pip install numba' in str(caught[0].message), 'numba' in sys.modules)
    """)
    assert done.stdout.strip() == "[[0, 0]] 1 True False", done.stderr


def test_the_raw_operator_checks_too() -> None:
    with pytest.raises(ValueError, match=r"points must have shape \[B, M, 3\]"):
        torch.ops.triops.points_in_boxes(torch.zeros(5, 3), BOXES, "center", 0.0)


def test_an_integer_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="offset must fit in 64 bits"):
        triops.bbox_overlaps(torch.zeros(1, 4), torch.zeros(1, 4), offset=2**70)


def test_a_numpy_integer_beyond_64_bits_is_refused() -> None:
    import numpy as np

    with pytest.raises(ValueError, match="offset must fit in 64 bits, got 9223372036854775808"):
        triops.bbox_overlaps(torch.zeros(1, 4), torch.zeros(1, 4), offset=np.uint64(2**63))  # type: ignore[arg-type]


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda op: op.name)
def test_the_schema_is_what_torch_infers_from_the_reference(operator: Operator) -> None:
    schema = torch.library.infer_schema(operator.reference.__wrapped__, mutates_args=())  # type: ignore[attr-defined]
    assert operator.signature.schema == schema


def test_an_operator_cannot_take_what_the_dispatcher_does_not_know() -> None:
    def reference(x: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
        return x

    with pytest.raises(TypeError, match=r"reference: no operator can take or return dict\[str, int\]"):
        Signature(reference)


def test_meta_tensors_are_checked_and_shaped() -> None:
    out = triops.points_in_boxes(POINTS.to("meta"), BOXES.to("meta"))
    assert (out.device.type, out.shape, out.dtype) == ("meta", (1, 2), torch.int32)
    with pytest.raises(ValueError, match="boxes must have shape"):
        triops.points_in_boxes(POINTS.to("meta"), BOXES[0].to("meta"))


def test_inputs_that_require_grad_are_welcome_and_integers_carry_no_gradient() -> None:
    out = triops.points_in_boxes(POINTS.clone().requires_grad_(), BOXES.clone().requires_grad_())
    assert not out.requires_grad


@pytest.mark.full
def test_compiled_with_inductor_it_gives_the_same() -> None:
    import shutil

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    compiled = torch.compile(lambda p, b: triops.points_in_boxes(p * 1.0, b) + 1, fullgraph=True)
    assert torch.equal(compiled(POINTS, BOXES), triops.points_in_boxes(POINTS, BOXES) + 1)


def test_a_bad_call_under_compile_says_what_is_wrong() -> None:
    compiled = torch.compile(triops.points_in_boxes, backend="eager")
    with pytest.raises(Exception, match=r"points must have shape \[B, M, 3\], got \[2, 3\]"):
        compiled(POINTS[0], BOXES)


def test_debug_log_is_one_line_a_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "triops"):
        triops.points_in_boxes(POINTS, BOXES)
        with triops.reference_backend():
            triops.points_in_boxes(POINTS, BOXES)
    first, second = caplog.messages
    assert first.startswith("points_in_boxes(points=float32[1, 2, 3]@cpu, boxes=float32[1, 1, 7]@cpu, z_origin=center")
    assert first.endswith("-> cpu (device)")
    assert second.endswith("-> reference (forced)")


def test_the_reference_backend_can_be_forced_from_outside() -> None:
    code = """
        import sys, torch, triops
        triops.points_in_boxes(torch.zeros(1, 2, 3), torch.zeros(1, 1, 7)); print('numba' in sys.modules)
    """
    assert python(code, TRIOPS_BACKEND="reference").stdout.strip() == "False"


def backends_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Which backend each call since the last question took."""
    calls = [r for r in caplog.records if r.name == "triops" and r.levelno == logging.DEBUG]  # not "compiling ..."
    found = [r.getMessage().rpartition(" -> ")[2] for r in calls]
    caplog.clear()
    return found


FORCED, DEVICE = "reference (forced)", "cpu (device)"


def test_a_block_covers_the_thread_that_entered_it_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """A enters, B enters, A leaves, B leaves, and both call at every step."""
    caplog.set_level(logging.DEBUG, "triops")
    steps, seen = [threading.Event() for _ in range(4)], {}

    def call(where: str) -> None:
        triops.points_in_boxes(POINTS, BOXES)
        seen[where] = backends_of(caplog)

    def other() -> None:
        steps[0].wait(60)
        call("B before its block, A inside")
        with triops.reference_backend():
            steps[1].set()
            steps[2].wait(60)
            call("B inside, A behind")
        call("B behind")
        steps[3].set()

    thread = threading.Thread(target=other)
    thread.start()
    with triops.reference_backend():
        steps[0].set()
        steps[1].wait(60)
        call("A inside, B inside")
    call("A behind, B inside")
    steps[2].set()
    steps[3].wait(60)
    thread.join(60)
    call("A behind, B behind")
    assert seen == {
        "B before its block, A inside": [DEVICE],
        "A inside, B inside": [FORCED],
        "A behind, B inside": [DEVICE],
        "B inside, A behind": [FORCED],
        "B behind": [DEVICE],
        "A behind, B behind": [DEVICE],
    }


def test_blocks_nest_and_an_error_leaves_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "triops")
    with triops.reference_backend():
        with pytest.raises(ValueError, match="points must have shape"), triops.reference_backend():
            triops.points_in_boxes(POINTS[0], BOXES)
        triops.points_in_boxes(POINTS, BOXES)
    triops.points_in_boxes(POINTS, BOXES)
    assert backends_of(caplog) == [FORCED, DEVICE]


@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("backward", ["inside", "behind", "in another thread"])
def test_a_backward_takes_the_backend_of_its_forward(
    caplog: pytest.LogCaptureFixture, forward_inside: bool, backward: str
) -> None:
    caplog.set_level(logging.DEBUG, "triops")
    boxes = torch.tensor([[0.0, 0, 4, 4]], requires_grad=True)
    block = triops.reference_backend if forward_inside else nullcontext
    with block():
        overlap = triops.bbox_overlaps(boxes, torch.tensor([[1.0, 1, 3, 3]]))
        if backward == "inside" and forward_inside:
            overlap.backward()
    if backward == "inside" and not forward_inside:
        with triops.reference_backend():
            overlap.backward()
    elif backward == "behind":
        overlap.backward()
    elif backward == "in another thread":  # where autograd runs what belongs to a GPU
        thread = threading.Thread(target=overlap.backward)
        thread.start()
        thread.join(60)
    assert boxes.grad is not None
    triops.points_in_boxes(POINTS, BOXES)  # and nothing stays forced
    used = FORCED if forward_inside else DEVICE
    assert backends_of(caplog) == [used, used, DEVICE]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="autograd has threads of its own for a GPU")
def test_a_backward_on_autograds_gpu_thread_takes_the_backend_of_its_forward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "triops")
    boxes = torch.tensor([[0.0, 0, 4, 4]], device="cuda", requires_grad=True)
    with triops.reference_backend():
        triops.bbox_overlaps(boxes, torch.tensor([[1.0, 1, 3, 3]], device="cuda")).sum().backward()
    triops.bbox_overlaps(boxes, torch.tensor([[1.0, 1, 3, 3]], device="cuda")).sum().backward()
    assert backends_of(caplog) == [FORCED] * 2 + ["gpu (device)"] * 2


def test_a_block_around_a_compiled_function_covers_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "triops")
    compiled = torch.compile(triops.bbox_overlaps, fullgraph=True, backend="aot_eager")
    boxes = torch.tensor([[0.0, 0, 4, 4]], requires_grad=True)
    for block, used in ((triops.reference_backend, FORCED), (nullcontext, DEVICE)):
        with block():
            compiled(boxes, torch.tensor([[1.0, 1, 3, 3]])).sum().backward()
        assert backends_of(caplog) == [used, used]


def test_a_block_inside_a_compiled_function_breaks_the_graph_and_holds(caplog: pytest.LogCaptureFixture) -> None:
    def function(points: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = triops.points_in_boxes(points, boxes)
        with triops.reference_backend():
            second = triops.points_in_boxes(points, boxes)
        return first, second, triops.points_in_boxes(points, boxes)

    caplog.set_level(logging.DEBUG, "triops")
    torch.compile(function, backend="eager")(POINTS, BOXES)
    assert backends_of(caplog) == [DEVICE, FORCED, DEVICE]


def test_every_operator_names_its_backends() -> None:
    for operator in OPERATORS.values():
        assert operator.backends == ["reference", "cpu", "gpu"], operator


def test_an_operator_cannot_be_defined_twice() -> None:
    from triops import _op
    from triops.ops.points_in_boxes import reference

    with pytest.raises(ValueError, match="defined twice"):
        _op.define(reference.points_in_boxes, check=lambda *a: None, fake=lambda *a: None)


def test_a_tiny_call_is_cheap() -> None:
    """The bar is 20 us on an idle machine; here only that nothing has gone badly wrong."""
    import timeit

    triops.points_in_boxes(POINTS, BOXES)
    best = min(timeit.repeat(lambda: triops.points_in_boxes(POINTS, BOXES), number=200, repeat=5)) / 200
    assert best < 100e-6
