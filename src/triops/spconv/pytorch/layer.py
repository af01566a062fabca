"""What the convolutions and pools of spconv's names share: the calls that they refuse, `algo`, records of their times.

All of it is as in spconv, whose programs may rely on it. The layers of `triops.nn` refuse less.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from triops.nn._window import Window
from triops.nn.sparse_tensor import SparseConvTensor
from triops.ops.rulebook import Rulebook
from triops.spconv.core import ConvAlgo
from triops.spconv.pytorch.modules import SparseModule


class Layer(SparseModule, Window):
    """The base of convolutions and pools.

    A submanifold layer ignores its stride, and refuses a kernel that is even when it is called, not when it is built.
    No layer takes a tensor without sites or makes one. Where `input.benchmark` is set, `input.benchmark_record` gets
    the layer's times under its name.
    """

    IMPLICIT_GEMM_UP_TO = 32  # offsets of a kernel; with more of them spconv takes ConvAlgo.Native by itself
    RECORDED_AS = ""
    WINDOW: tuple[str, ...] = ("kernel_size", "stride", "padding", "dilation")

    @property
    def algo(self) -> ConvAlgo:
        """What was asked for, or what spconv would choose. Layers here have one algorithm."""
        chosen: ConvAlgo | None = getattr(self, "_algo", None)
        if chosen is not None:
            return chosen
        return ConvAlgo.MaskImplicitGemm if self.volume <= self.IMPLICIT_GEMM_UP_TO else ConvAlgo.Native

    @algo.setter
    def algo(self, value: ConvAlgo | None) -> None:
        self._algo = value

    def _check_window(self) -> None:
        """Nothing: see `_check_call`."""

    def _check_call(self, input: Any) -> None:
        self.require_sparse(input)
        self._check_odd()
        if not torch.compiler.is_compiling() and input.indices.shape[0] == 0:
            self._fail("input has no sites, which spconv refuses; the layers of triops.nn take it")

    def _checked(self, output: SparseConvTensor) -> SparseConvTensor:
        if not torch.compiler.is_compiling() and output.indices.shape[0] == 0:
            self._fail(
                f"no output site is left with kernel_size {self.kernel_size}, stride {self.stride} and padding "
                f"{self.padding}, which spconv refuses; the layers of triops.nn give an empty tensor"
            )
        return output

    def _begun(self, input: SparseConvTensor) -> tuple[float, int]:
        """Where a benchmark is taken: when it began, and how many rulebooks this layer had made before."""
        if not input.benchmark:
            return 0.0, 0
        return _now(input.features), len(self._record(input)["indice_gen_time"])

    def _done(self, input: SparseConvTensor, output: SparseConvTensor, begun: tuple[float, int]) -> None:
        if not input.benchmark:
            return
        record = self._record(input)
        spent = _now(output.features) - begun[0] - sum(record["indice_gen_time"][begun[1] :])
        for what, number in (
            ("time", spent),
            ("num_points", len(input.indices)),
            ("num_out_points", len(output.indices)),
        ):
            record[what].append(number)

    def _rulebook(self, input: SparseConvTensor) -> Rulebook:
        if not input.benchmark or input.find_indice_pair(self.indice_key) is not None:
            return super()._rulebook(input)
        begin = _now(input.features)
        made = super()._rulebook(input)
        self._record(input)["indice_gen_time"].append(_now(input.features) - begin)
        return made

    def _record(self, input: SparseConvTensor) -> dict[str, Any]:
        name = self.name or ""
        if not name:
            self._fail("a benchmark needs a name for every layer; spconv.assign_name_for_sparse_modules(net) gives one")
        times: dict[str, Any] = {key: [] for key in ("indice_gen_time", "time", "num_points", "num_out_points")}
        known: dict[str, Any] = input.benchmark_record.setdefault(
            name, {"type": self.RECORDED_AS, **times, "params": self._recorded_parameters(input)}
        )
        return known

    def _recorded_parameters(self, input: SparseConvTensor) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.WINDOW}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in (*self.WINDOW, "algo"))


def _now(features: Tensor) -> float:
    """Seconds, when all that was asked of the features' device is done."""
    if features.is_cuda:
        torch.cuda.synchronize(features.device)
    return time.perf_counter()


__all__ = ["Layer"]
