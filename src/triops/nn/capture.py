"""capture: a sparse network as CUDA graphs, with fixed capacities instead of waits."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triops.nn._window import Window, rulebooks_beside
from triops.nn.sparse_tensor import SparseConvTensor

log = logging.getLogger("triops")

GRAPHS = 4  # input sizes whose graphs are kept; the one used longest ago makes room
GROWTH = 1.25  # one input size over the next smaller one
MOST_PADDING = 2.0  # a graph serves inputs down to its own rows over this
LEAST_ROWS = 1024


def capture(network: nn.Module, examples: Iterable[Any], headroom: float = 1.5) -> Callable[..., Any]:
    """The network for inference, run as CUDA graphs: same arguments, same results, without the host's time.

    Inputs are padded with inactive rows to one of a few sizes, each with its own graph: integers with -1, floats with
    0, or with NaN where no integers come with them (points, of which `voxelize` leaves those out). Layers that make
    new sites get capacities, so that no host waits inside. A call with more sites than a capacity holds gets the right
    answer too, from the network as it was, with one line in the log "triops"; the next call has a larger capacity.
    Calls from several threads and streams take turns; results are the caller's own. On a CPU, and where gradients are
    wanted, the network itself is called.

    Args:
        network: a module in evaluation mode, whose weights are shared, not copied. It takes tensors whose first axis
            is the active sites (indices are the integer ones) or the points, `SparseConvTensor`s, and anything else,
            which is part of what a graph is made for. It gives tensors, `SparseConvTensor`s, or tuples, lists and
            dicts of them; a tensor with one row per site is cut to the sites there are.
        examples: typical inputs: one per entry, a tuple of arguments or a single argument. They tell how many sites
            the layers make.
        headroom: capacities over what the examples needed.

    Raises:
        TypeError: where the network holds no sparse layers, or an argument is neither.
        ValueError: without examples, with a headroom below 1, or where the network is in training mode.

    >>> import torch
    >>> from triops.nn import SparseConv3d, SparseConvTensor, SparseSequential, capture
    >>> net = SparseSequential(SparseConv3d(4, 8, 3, stride=2, padding=1)).eval()
    >>> sites = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    >>> x = SparseConvTensor(torch.rand(2, 4), sites, [5, 5, 5], 1)
    >>> fast = capture(net, [x])
    >>> torch.equal(fast(x).features, net(x).features)
    True
    """
    return Captured(network, examples, headroom)


class Captured:
    """What `capture` returns."""

    def __init__(self, network: nn.Module, examples: Iterable[Any], headroom: float) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"capture: network must be a Module, got {type(network).__name__}")
        if network.training:
            raise ValueError("capture: network must be in evaluation mode; call network.eval() first")
        if not headroom >= 1:
            raise ValueError(f"capture: headroom must be at least 1, got {headroom}")
        self.network, self.headroom = network, headroom
        shared = [*network.parameters(), *network.buffers()]
        self.capped = copy.deepcopy(network, {id(tensor): tensor for tensor in shared})  # other layers, same weights
        self.layers = _layers_of(self.capped)
        self.rows = 0  # the most that an example had
        self.needed: list[int] = [0] * len(self.layers)  # output sites, by layer
        self.graphs: dict[Any, _Graph] = {}
        self.lock = threading.Lock()
        self.done: torch.cuda.Event | None = None
        for example in examples:
            self._learn(_Arguments(example if isinstance(example, tuple) else (example,)))
        if not self.rows:
            raise ValueError("capture: examples must hold at least one input with active sites")

    def __call__(self, *args: Any) -> Any:
        arguments = _Arguments(args)
        if arguments.device.type != "cuda" or torch.is_grad_enabled():
            return self.network(*args)
        with self.lock, torch.cuda.device(arguments.device):
            stream = torch.cuda.current_stream()
            # Of the call before, on whichever stream: graphs share memory, and its results may still be copied.
            done = self.done or torch.cuda.Event()
            stream.wait_event(done)
            graph = self._graph(arguments)
            result = graph.run(arguments)
            done.record(stream)
            self.done = done
            if result is not _EXCEEDED:
                return result
            log.info("capture: %s rows make more sites than the capacities hold; run without a graph", arguments.rows)
            self.graphs = {key: g for key, g in self.graphs.items() if g is not graph}
            return self._learn(arguments)

    def _learn(self, arguments: _Arguments) -> Any:
        """Run the network as it is, and note how many sites its layers make."""
        found = [0] * len(self.layers)

        def note(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: SparseConvTensor) -> None:
                found[number] = max(found[number], output.indices.shape[0])

            return hook

        hooks = [layer.register_forward_hook(note(n)) for n, layer in enumerate(self.layers)]
        try:
            with torch.no_grad():
                for layer in self.layers:
                    layer.capacity = None
                result = self.capped(*arguments.args)
        finally:
            for hook in hooks:
                hook.remove()
        self.rows = max(self.rows, arguments.rows)
        self.needed = [max(before, now) for before, now in zip(self.needed, found, strict=True)]
        return result

    def _graph(self, arguments: _Arguments) -> _Graph:
        """The smallest graph at hand that the input fits, or a new one."""
        kind = arguments.key()
        most = max(arguments.rows * MOST_PADDING, LEAST_ROWS)
        fitting = [rows for rows, of in self.graphs if of == kind and arguments.rows <= rows <= most]
        rows = min(fitting, default=0) or _padded_rows(arguments.rows)
        graph = self.graphs.pop((rows, kind), None)
        if graph is None:
            while len(self.graphs) >= GRAPHS:
                self.graphs.pop(next(iter(self.graphs)))
            share = self.headroom * max(1.0, rows / self.rows)
            capacities = [max(1, math.ceil(share * needed)) for needed in self.needed]
            pool = next((g.graph.pool() for g in self.graphs.values()), None)
            graph = _Graph(self.capped, arguments, rows, self.layers, capacities, pool)
        self.graphs[rows, kind] = graph  # now the one used last
        return graph


class _Exceeded:
    """More sites than a capacity holds."""


_EXCEEDED = _Exceeded()


class _Graph:
    """One captured call: its inputs' memory, its outputs, and the numbers that tell whether it can be trusted."""

    def __init__(
        self, network: nn.Module, arguments: _Arguments, rows: int, layers: Sequence[Window],
        capacities: Sequence[int], pool: Any,
    ) -> None:  # fmt: skip
        self.inputs = [t.new_empty((rows, *t.shape[1:])) for t in arguments.tensors]
        self.filled = rows  # of the inputs, that may hold something else than padding
        self.fill(arguments)
        self.counted = torch.cuda.Event()
        self.counts: list[tuple[Tensor, int]] = []

        def note(module: Any, args: Any, output: SparseConvTensor) -> None:
            if output.active is not None and module.capacity is not None:
                self.counts.append((output.active, module.capacity))

        hooks = [layer.register_forward_hook(note) for layer in layers]
        try:
            for layer, capacity in zip(layers, capacities, strict=True):
                layer.capacity = capacity
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.no_grad():
                network(*arguments.rebuilt(self.inputs))  # compiles kernels, chooses algorithms
                self.sizes = torch.zeros(len(self.counts), dtype=torch.int32, pin_memory=True)
                self.counts.clear()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, pool=pool, stream=stream):
                    with rulebooks_beside():
                        self.output = network(*arguments.rebuilt(self.inputs))
                    if self.counts:
                        self.sizes.copy_(torch.cat([count for count, _ in self.counts]), non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
        finally:
            for hook in hooks:
                hook.remove()

    def fill(self, arguments: _Arguments) -> None:
        rows = arguments.rows
        for buffer, tensor in zip(self.inputs, arguments.tensors, strict=True):
            buffer[:rows].copy_(tensor)
            if rows < self.filled:
                buffer[rows : self.filled].fill_(arguments.padding if tensor.is_floating_point() else -1)
        self.filled = rows

    def run(self, arguments: _Arguments) -> Any:
        self.fill(arguments)
        self.graph.replay()
        self.counted.record()
        # Copies that need no count are under way before the host waits for the counts.
        result = _Result(self.output, arguments.rows, self.inputs[0].shape[0])
        self.counted.synchronize()
        sizes = self.sizes.tolist()
        exceeded = any(size > capacity for size, (_, capacity) in zip(sizes, self.counts, strict=True))
        known = {count.data_ptr(): size for size, (count, _) in zip(sizes, self.counts, strict=True)}
        return _EXCEEDED if exceeded else result.cut(known)


class _Arguments:
    """The arguments of a call, taken apart: tensors whose rows are padded, and the rest."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.tensors: list[Tensor] = []
        for arg in args:
            if isinstance(arg, SparseConvTensor):
                self.tensors += [arg.features, arg.indices]
            elif isinstance(arg, Tensor) and arg.dim() > 0:
                self.tensors.append(arg)
        if not self.tensors:
            raise TypeError("capture: an input must hold a SparseConvTensor or tensors with one row per active site")
        self.rows, self.device = self.tensors[0].shape[0], self.tensors[0].device
        self.padding = 0.0 if any(not t.is_floating_point() for t in self.tensors) else math.nan
        if any(t.shape[0] != self.rows for t in self.tensors):
            got = [list(t.shape) for t in self.tensors]
            raise ValueError(f"capture: all tensors of an input must have one row per active site, got shapes {got}")

    def key(self) -> Any:
        """What a graph is made for, beside the number of rows."""
        rest: list[Any] = []
        for arg in self.args:
            if isinstance(arg, SparseConvTensor):
                rest.append(("sparse", tuple(arg.spatial_shape), arg.batch_size))
            elif not (isinstance(arg, Tensor) and arg.dim() > 0):
                rest.append(("value", repr(arg)))
        return tuple((t.dtype, t.shape[1:], t.device) for t in self.tensors), tuple(rest)

    def rebuilt(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments over other tensors."""
        rest = iter(tensors)
        return [
            SparseConvTensor(next(rest), next(rest), arg.spatial_shape, arg.batch_size)
            if isinstance(arg, SparseConvTensor)
            else next(rest)
            if isinstance(arg, Tensor) and arg.dim() > 0
            else arg
            for arg in self.args
        ]


class _Result:
    """Copies of a graph's outputs, which its next replay overwrites: of the rows that are active."""

    def __init__(self, output: Any, rows: int, padded: int) -> None:
        self.output, self.rows = output, rows
        if isinstance(output, Tensor):
            self.copy: Any = (output[:rows] if output.dim() and output.shape[0] == padded else output).clone()
        elif isinstance(output, dict):
            self.copy = {key: _Result(value, rows, padded) for key, value in output.items()}
        elif isinstance(output, tuple | list):
            self.copy = [_Result(value, rows, padded) for value in output]
        else:
            self.copy = output

    def cut(self, known: dict[int, int]) -> Any:
        """The outputs as the network gives them. known: numbers of active rows, by where the graph has them."""
        if isinstance(self.output, SparseConvTensor):
            x = self.output
            active = self.rows if x.active is None else known[x.active.data_ptr()]
            features, indices = x.features[:active].clone(), x.indices[:active].clone()
            return SparseConvTensor(features, indices, x.spatial_shape, x.batch_size)
        if isinstance(self.output, dict):
            return {key: value.cut(known) for key, value in self.copy.items()}
        if isinstance(self.output, tuple | list):
            parts = [value.cut(known) for value in self.copy]
            named = hasattr(self.output, "_fields")
            return type(self.output)(*parts) if named else type(self.output)(parts)
        return self.copy


def _layers_of(network: nn.Module) -> list[Window]:
    """The layers that make new sites."""
    layers = [m for m in network.modules() if isinstance(m, Window)]
    if not layers:
        raise TypeError(f"capture: network must hold sparse layers, got {type(network).__name__} without any")
    return [layer for layer in layers if not layer.subm and not layer.inverse]


def _padded_rows(rows: int) -> int:
    """The next of a few sizes."""
    size = LEAST_ROWS
    while size < rows:
        size = math.ceil(size * GROWTH / 256) * 256
    return size
