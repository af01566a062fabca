"""The contract: what holds for every operator, over all of its samples, backends and dtypes.

A new operator is found through its `samples.py` and needs no line here. What is marked `versions` also runs with
other versions of torch and Triton (`make test-versions`); what is marked `full` runs in `make test-full`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import DEVICES, GPU, assert_same, error_scale, run, run_guarded, small

from triops import _sample
from triops._op import OPERATORS, reference_backend

SAMPLES = _sample.all_samples()
KERNELS = [(op.name, backend) for op in OPERATORS.values() for backend in op.backends if backend != "reference"]
FIRST = {sample.operator: sample for sample in reversed(SAMPLES) if sample.scale == "general"}


def marks(sample: _sample.Sample, backend: str, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    """Other versions get one sample of each kernel; `tests/compile_only.py` shows them every kernel's Triton.

    `make test` runs every sample in one dtype and one sample in every dtype, `make test-full` the rest.
    """
    first = sample is FIRST[sample.operator]
    if dtype == sample.dtypes[0]:
        return [pytest.mark.versions] if first else []
    return [] if first else [pytest.mark.full]


CASES = [
    pytest.param(
        sample,
        backend,
        dtype,
        marks=marks(sample, backend, dtype),
        id=f"{sample}-{backend}-{str(dtype).removeprefix('torch.')}",
    )
    for sample in SAMPLES
    for backend in OPERATORS[sample.operator].backends
    for dtype in sample.dtypes
    if not sample.gpu_only
    # Triton's interpreter is far too slow for network scales; the GPU itself is not.
    and backend != "reference"
    and (sample.scale != "network" or (dtype == sample.dtypes[0] and (backend, GPU) != ("gpu", "cpu")))
]  # fmt: skip


def one_small_sample(operator: str) -> _sample.Sample:
    return FIRST[operator]


@pytest.fixture(params=sorted(OPERATORS))
def operator(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("sample", "backend", "dtype"), CASES)
def test_kernel_equals_reference_and_writes_every_element_and_no_other(
    sample: Any, backend: str, dtype: torch.dtype
) -> None:
    args = sample.make(dtype)
    expected = run("reference", sample.operator, args)
    assert_same(run_guarded(backend, sample.operator, args), expected, f"{sample} on {backend}",
                operator=sample.operator)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("operator", "backend"), KERNELS)
def test_inputs_one_element_off_an_aligned_address_give_the_same_answer(
    operator: str, backend: str, dtype: torch.dtype
) -> None:
    args = one_small_sample(operator).make(dtype)
    expected = run("reference", operator, args)
    assert_same(run_guarded(backend, operator, args, offset=1), expected, operator=operator)


@pytest.mark.versions
@pytest.mark.parametrize(("operator", "backend"), KERNELS)
def test_non_contiguous_inputs_give_the_same_answer(operator: str, backend: str) -> None:
    args = one_small_sample(operator).make(torch.float32)

    def strided(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        wide = value.repeat_interleave(2, dim=-1)
        return wide[..., ::2]

    expected = run("reference", operator, args)
    assert_same(run(backend, operator, tuple(map(strided, args))), expected, operator=operator)


@pytest.mark.parametrize(("operator", "backend"), KERNELS)
def test_inputs_are_not_changed(operator: str, backend: str) -> None:
    args = one_small_sample(operator).make(torch.float32)
    before = [t.clone() for t in _sample.tensors_of(args)]
    run(backend, operator, args)
    assert all(torch.equal(a, b) for a, b in zip(_sample.tensors_of(args), before, strict=True))


@pytest.mark.parametrize(("operator", "backend"), KERNELS)
def test_two_runs_in_deterministic_mode_give_the_same_bits(operator: str, backend: str) -> None:
    args = one_small_sample(operator).make(torch.float32)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (_sample.tensors_of(run(backend, operator, args)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.versions
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(operator: str, device: str) -> None:
    args = _sample.to_device(one_small_sample(operator).make(torch.float32), device)
    if OPERATORS[operator].differentiable:
        args = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not hasattr(_sample.module_of(OPERATORS[operator]), "specified"):
        checks.append("test_aot_dispatch_dynamic")  # compares all of an output, open places too
    torch.library.opcheck(OPERATORS[operator].overload, args, test_utils=checks)


@pytest.mark.versions
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.gradcheck], ids=str)
def test_gradcheck_in_float64(sample: Any, device: str) -> None:
    args = _sample.to_device(sample.make(torch.float64), device)
    args = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)

    def differentiable_outputs(*inputs: Any) -> Any:
        return tuple(o for o in _sample.tensors_of(OPERATORS[sample.operator](*inputs)) if o.is_floating_point())

    with reference_backend():
        torch.autograd.gradcheck(differentiable_outputs, args)
    torch.autograd.gradcheck(differentiable_outputs, args, nondet_tol=1e-12)


@pytest.mark.versions
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_a_graph_break_and_with_dynamic_shapes(operator: str, device: str) -> None:
    op = OPERATORS[operator]
    args = _sample.to_device(one_small_sample(operator).make(torch.float32), device)
    torch._dynamo.reset()  # the cases share one code object, and with it one limit on recompilations
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, dynamic=True, backend="aot_eager")
    results = (_sample.specified(op, args, r) for r in (compiled(*args), op(*args)))
    assert_same(*results, operator=operator)


@pytest.mark.versions
def test_exports(operator: str) -> None:
    op, args = OPERATORS[operator], one_small_sample(operator).make(torch.float32)

    class Module(torch.nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return op(*inputs)

    program = torch.export.export(Module(), args, strict=False)
    results = (_sample.specified(op, args, r) for r in (program.module()(*args), op(*args)))
    assert_same(*results, operator=operator)


@pytest.mark.versions
def test_fake_agrees_with_the_operator_on_every_small_sample(operator: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = OPERATORS[operator]
    if op.dynamic_output:
        pytest.skip("the output size depends on the data: opcheck covers the fake")
    for sample in small([s for s in SAMPLES if s.operator == operator]):
        args = sample.make(torch.float32)
        with FakeTensorMode() as mode:
            fake_args = tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)
            fake = _sample.tensors_of(op(*fake_args))
        real = _sample.tensors_of(op(*args))
        described = [[(t.shape, t.dtype, t.stride() if t.numel() else None) for t in ts] for ts in (fake, real)]
        assert described[0] == described[1], str(sample)


@pytest.mark.parametrize("bad", _sample.all_bad_calls(), ids=str)
def test_bad_call_is_refused_with_a_clear_error(bad: Any) -> None:
    with pytest.raises(bad.error, match=bad.match) as caught:
        bad.call()
    assert type(caught.value) is bad.error


def test_every_operator_has_samples_of_each_scale_and_bad_calls(operator: str) -> None:
    scales = {s.scale for s in SAMPLES if s.operator == operator}
    assert scales == {"network", "general", "boundary"}
    module = _sample.module_of(OPERATORS[operator])
    assert module.BAD_CALLS
    if "gpu" in OPERATORS[operator].backends:
        assert operator in {s.operator for s in module.SIZED}, "its calls with any counts, see _sample.Sized"
    sample = one_small_sample(operator)
    work = module.work(operator, sample.make(torch.float32))
    assert work.bytes > 0
    assert work.ops >= 0


def torch_baseline(sample: _sample.Sample) -> Any:
    return _sample.module_of(OPERATORS[sample.operator]).baselines(sample.operator).get("torch")


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.scale == "general" and torch_baseline(s)], ids=str)
def test_baselines_that_the_benchmark_compares_with_compute_the_same_thing(sample: Any) -> None:
    baseline = torch_baseline(sample)
    args = sample.make(torch.float32)
    got, expected = _sample.tensors_of(baseline(*args)), _sample.tensors_of(run("reference", sample.operator, args))
    assert [(g.dtype, g.shape) for g in got] == [(e.dtype, e.shape) for e in expected]
    for g, e in zip(got, expected, strict=True):
        wrong = g != e
        if e.is_floating_point() and e.numel():
            size = e.abs()
            if e.dim() and error_scale(sample.operator) == "row":  # terms of a sum may cancel
                size = size.amax(-1, keepdim=True)
            wrong = (g - e).abs() > 1e-3 * size
        assert not e.numel() or wrong.float().mean() < 1e-3, "a rounding may flip a predicate now and then, no more"
