"""Names of `spconv.tools`: a timer that times nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from triops.spconv.cppconstants import CPU_ONLY_BUILD


class CUDAKernelTimer:
    """Takes the calls of spconv's timer. triops times no kernels of its own: use torch.profiler."""

    def __init__(self, enable: bool = True) -> None:
        self.enable = False

    def namespace(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, name: str, stream: int = 0) -> AbstractContextManager[None]:
        return nullcontext()

    def get_all_pair_time(self) -> dict[str, float]:
        return {}

    @staticmethod
    def collect_by_name(name: str, res: dict[str, float]) -> dict[str, float]:
        """The entries of a dotted name that has `name` as one of its parts."""
        return {key: value for key, value in res.items() if name in key.split(".")}


__all__ = ["CPU_ONLY_BUILD", "CUDAKernelTimer", "nullcontext"]
