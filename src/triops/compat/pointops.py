"""Pointcept's `pointops` and `pointgroup_ops` without a compiler: importing this module supplies them.

And `pointops2_cuda` of Stratified Transformer, `sptr_cuda` of SphereFormer and `softgroup.ops.ops` of SoftGroup.

The functions have pointops' names, parameters and results, on any device. `offset` and `new_offset` hold the end of
each cloud. A result has the dtype of its features, where pointops knows float32 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triops
from triops._clouds import ends_to_offsets
from triops._dtypes import compute_dtype
from triops.compat import _finder, _softgroup, _sptr
from triops.compat._extension import Extension
from triops.compat._pointgroup import ballquery_batch_p, bfs_cluster
from triops.compat._pointops_balls import ball_query_cuda, random_ball_query_cuda
from triops.ops.furthest_point_sample import furthest_point_sample_rows

FAR = 1e10  # the squared distance of no neighbor


def farthest_point_sampling(xyz: Tensor, offset: Tensor, new_offset: Tensor) -> Tensor:
    """xyz [n, 3], offset [b], new_offset [b] -> rows, int32 [new_offset[-1]]."""
    samples = int(new_offset[-1]) if len(new_offset) else 0
    return furthest_point_sample_rows(xyz, ends_to_offsets(offset), ends_to_offsets(new_offset), samples)


def knn_query(
    nsample: int, xyz: Tensor, offset: Tensor, new_xyz: Tensor | None = None, new_offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> the rows of the nearest points, int32 [m, nsample], -1 where there are too few, and their distances."""
    if new_xyz is None or new_offset is None:
        new_xyz, new_offset = xyz, offset
    indices, squares = _nearest(nsample, xyz, offset, new_xyz, new_offset)
    return indices, squares.sqrt()


def ball_query(
    nsample: int, max_radius: float, min_radius: float, xyz: Tensor, offset: Tensor, new_xyz: Tensor | None = None,
    new_offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> rows in the ball, nearest first, or evenly spaced among them where there are more, and their distances."""
    if new_xyz is None or new_offset is None:
        new_xyz, new_offset = xyz, offset
    indices, squares = _empty_neighbors(new_xyz, nsample)
    m = new_xyz.shape[0]
    ball_query_cuda(m, nsample, min_radius, max_radius, xyz, new_xyz, offset, new_offset, indices, squares)
    return indices, squares.sqrt()


def random_ball_query(
    nsample: int, max_radius: float, min_radius: float, xyz: Tensor, offset: Tensor, new_xyz: Tensor | None = None,
    new_offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> rows in the ball, in random order, and their distances."""
    if new_xyz is None or new_offset is None:
        new_xyz, new_offset = xyz, offset
    begin, orders = 0, []
    for end in offset.tolist():
        orders.append(torch.randperm(end - begin, dtype=torch.int32, device=xyz.device) + begin)
        begin = end
    indices, squares = _empty_neighbors(new_xyz, nsample)
    random_ball_query_cuda(
        new_xyz.shape[0], nsample, min_radius, max_radius, torch.cat(orders), xyz, new_xyz, offset, new_offset, indices,
        squares,
    )  # fmt: skip
    return indices, squares.sqrt()


def grouping(
    idx: Tensor, feat: Tensor, xyz: Tensor, new_xyz: Tensor | None = None, with_xyz: bool = False
) -> Tensor:  # fmt: skip
    """idx [m, k], feat [n, c], xyz [n, 3] -> [m, k, c], or [m, k, 3 + c] with offsets from new_xyz; 0 for index -1."""
    grouped = triops.group_points(feat, idx)
    if not with_xyz:
        return grouped
    offsets = triops.group_points(xyz, idx) - (xyz if new_xyz is None else new_xyz)[:, None]
    return torch.cat([offsets * (idx >= 0)[..., None], grouped], -1)


def grouping2(input: Tensor, idx: Tensor) -> Tensor:
    """input [n, c], idx [m, k] -> [m, k, c]."""
    return triops.group_points(input, idx)


def interpolation(xyz: Tensor, new_xyz: Tensor, feat: Tensor, offset: Tensor, new_offset: Tensor, k: int = 3) -> Tensor:
    """xyz [m, 3], new_xyz [n, 3], feat [m, c] -> [n, c], by the inverse distances to the k nearest points."""
    indices, distances = knn_query(k, xyz, offset, new_xyz, new_offset)
    inverse = torch.where(indices < 0, 0, 1 / (distances + 1e-8))
    weights = inverse / inverse.sum(1, keepdim=True)
    return triops.three_interpolate(feat, indices, weights.to(compute_dtype(feat.dtype)))


interpolation2 = interpolation


def subtraction(input1: Tensor, input2: Tensor, idx: Tensor) -> Tensor:
    """input1 [n, c], input2 [n, c], idx [n, k] -> [n, k, c]: each row of input1 less those of its neighbors."""
    return input1[:, None] - triops.group_points(input2, idx)


def aggregation(input: Tensor, position: Tensor, weight: Tensor, idx: Tensor) -> Tensor:
    """input [n, c], position [n, k, c], weight [n, k, w], idx [n, k] -> [n, c]; channel c has weight c % w."""
    shared = weight[..., torch.arange(input.shape[1], device=weight.device) % weight.shape[2]]
    return ((triops.group_points(input, idx) + position) * shared).sum(1)


def attention_relation_step(
    query: Tensor, key: Tensor, weight: Tensor, index_target: Tensor, index_refer: Tensor
) -> Tensor:
    """query [n, g, c], key [n, g, c], weight [c], index_target [m], index_refer [m] -> [m, g]."""
    return (query[index_target.long()] * key[index_refer.long()] * weight.detach()).sum(-1)


def attention_fusion_step(weight: Tensor, value: Tensor, index_target: Tensor, index_refer: Tensor) -> Tensor:
    """weight [m, g], value [n, g, c], index_target [m], index_refer [m] -> [n, g, c]."""
    products = weight[..., None] * value[index_refer.long()]
    return torch.zeros_like(value).index_add(0, index_target.long(), products)


def knn_query_and_group(
    feat: Tensor, xyz: Tensor, offset: Tensor | None = None, new_xyz: Tensor | None = None,
    new_offset: Tensor | None = None, idx: Tensor | None = None, nsample: int | None = None, with_xyz: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if idx is None:
        if nsample is None or offset is None:
            raise ValueError("knn_query_and_group: offset and nsample must be given where idx is not")
        idx, _ = knn_query(nsample, xyz, offset, new_xyz, new_offset)
    return grouping(idx, feat, xyz, new_xyz, with_xyz), idx


def ball_query_and_group(
    feat: Tensor, xyz: Tensor, offset: Tensor | None = None, new_xyz: Tensor | None = None,
    new_offset: Tensor | None = None, idx: Tensor | None = None, max_radio: float | None = None, min_radio: float = 0,
    nsample: int | None = None, with_xyz: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if idx is None:
        if nsample is None or offset is None or max_radio is None:
            raise ValueError("ball_query_and_group: offset, max_radio and nsample must be given where idx is not")
        idx, _ = ball_query(nsample, max_radio, min_radio, xyz, offset, new_xyz, new_offset)
    return grouping(idx, feat, xyz, new_xyz, with_xyz), idx


def query_and_group(
    nsample: int, xyz: Tensor, new_xyz: Tensor | None, feat: Tensor, idx: Tensor | None, offset: Tensor,
    new_offset: Tensor, dilation: int = 0, with_feat: bool = True, with_xyz: bool = True,
) -> Any:  # fmt: skip
    """-> [m, nsample, 3 + c] and the indices, or the indices alone. Dilated: every so many of the nearest points."""
    new_xyz = xyz if new_xyz is None else new_xyz
    if idx is None:
        widest = 1 + (nsample - 1) * (dilation + 1)
        nearest, _ = knn_query(widest, xyz, offset, new_xyz, new_offset)
        counts = torch.diff(ends_to_offsets(offset)).tolist()
        groups = nearest.split(torch.diff(ends_to_offsets(new_offset)).tolist())
        picked = []
        for count, group in zip(counts, groups, strict=True):
            step = dilation + 1 if count >= widest else (count - 1) / max(nsample - 1, 1)
            picked.append(group[:, [int(step * i) for i in range(nsample)]])
        idx = torch.cat(picked)
    if not with_feat:
        return idx
    grouped = triops.group_points(feat, idx)
    if with_xyz:
        grouped = torch.cat([triops.group_points(xyz, idx) - new_xyz[:, None], grouped], -1)
    return grouped, idx


def offset2batch(offset: Tensor) -> Tensor:
    """The cloud of each point, int64, from the ends of the clouds."""
    counts = torch.diff(ends_to_offsets(offset.long()))
    return torch.arange(len(offset), device=offset.device).repeat_interleave(counts)


def batch2offset(batch: Tensor) -> Tensor:
    """The ends of the clouds, int32, from the cloud of each point."""
    return batch.bincount().cumsum(0).int()


def _nearest(k: int, xyz: Tensor, offset: Tensor, new_xyz: Tensor, new_offset: Tensor) -> tuple[Tensor, Tensor]:
    offsets = {"offsets": ends_to_offsets(offset), "query_offsets": ends_to_offsets(new_offset)}
    indices, squares = triops.knn(xyz, new_xyz, k, squared=True, **offsets)
    return indices, squares.clamp(max=FAR)


def _empty_neighbors(new_xyz: Tensor, nsample: int) -> tuple[Tensor, Tensor]:
    shape = (new_xyz.shape[0], nsample)
    return torch.empty(shape, dtype=torch.int32, device=new_xyz.device), new_xyz.new_empty(shape)


# Of `pointops._C`, which fills the tensors that it is given.


def farthest_point_sampling_cuda(
    b: int, n: int, xyz: Tensor, offset: Tensor, new_offset: Tensor, tmp: Tensor, idx: Tensor
) -> None:
    idx.copy_(farthest_point_sampling(xyz, offset, new_offset))


def knn_query_cuda(
    m: int, nsample: int, xyz: Tensor, new_xyz: Tensor, offset: Tensor, new_offset: Tensor, idx: Tensor, dist2: Tensor
) -> None:
    indices, squares = _nearest(nsample, xyz, offset, new_xyz, new_offset)
    idx.copy_(indices)
    dist2.copy_(squares)


def grouping_forward_cuda(m: int, nsample: int, c: int, input: Tensor, idx: Tensor, output: Tensor) -> None:
    output.copy_(triops.group_points(input, idx))


def grouping_backward_cuda(m: int, nsample: int, c: int, grad_output: Tensor, idx: Tensor, grad_input: Tensor) -> None:
    grad_input += _of_rows(grad_output, idx, grad_input)


def interpolation_forward_cuda(
    n: int, c: int, k: int, input: Tensor, idx: Tensor, weight: Tensor, output: Tensor
) -> None:
    output.copy_(triops.three_interpolate(input, idx, weight))


def interpolation_backward_cuda(
    n: int, c: int, k: int, grad_output: Tensor, idx: Tensor, weight: Tensor, grad_input: Tensor
) -> None:
    grad_input += triops.three_interpolate_backward(
        grad_output[None], grad_input[None], idx[None], weight[None], True, False
    )[0][0]


def subtraction_forward_cuda(
    n: int, nsample: int, c: int, input1: Tensor, input2: Tensor, idx: Tensor, output: Tensor
) -> None:
    output.copy_(subtraction(input1, input2, idx))


def subtraction_backward_cuda(
    n: int, nsample: int, c: int, idx: Tensor, grad_output: Tensor, grad_input1: Tensor, grad_input2: Tensor
) -> None:
    grad_input1 += grad_output.sum(1)
    grad_input2 -= _of_rows(grad_output, idx, grad_input2)


def aggregation_forward_cuda(
    n: int, nsample: int, c: int, w_c: int, input: Tensor, position: Tensor, weight: Tensor, idx: Tensor, output: Tensor
) -> None:
    output.copy_(aggregation(input, position, weight, idx))


def aggregation_backward_cuda(
    n: int, nsample: int, c: int, w_c: int, input: Tensor, position: Tensor, weight: Tensor, idx: Tensor,
    grad_output: Tensor, grad_input: Tensor, grad_position: Tensor, grad_weight: Tensor,
) -> None:  # fmt: skip
    grads = _grads(lambda f, p, w: aggregation(f, p, w, idx), (input, position, weight), grad_output)
    for target, grad in zip((grad_input, grad_position, grad_weight), grads, strict=True):
        target += grad


def attention_relation_step_forward_cuda(
    m: int, g: int, c: int, query: Tensor, key: Tensor, weight: Tensor, index_target: Tensor, index_refer: Tensor,
    output: Tensor,
) -> None:  # fmt: skip
    output.copy_(attention_relation_step(query, key, weight, index_target, index_refer))


def attention_relation_step_backward_cuda(
    m: int, g: int, c: int, query: Tensor, grad_query: Tensor, key: Tensor, grad_key: Tensor, weight: Tensor,
    grad_weight: Tensor, index_target: Tensor, index_refer: Tensor, grad_output: Tensor,
) -> None:  # fmt: skip
    target, refer = index_target.long(), index_refer.long()
    grads = _grads(lambda q, k, w: (q[target] * k[refer] * w).sum(-1), (query, key, weight), grad_output)
    for total, grad in zip((grad_query, grad_key, grad_weight), grads, strict=True):
        total += grad


def attention_fusion_step_forward_cuda(
    m: int, g: int, c: int, weight: Tensor, value: Tensor, index_target: Tensor, index_refer: Tensor, output: Tensor
) -> None:
    output.copy_(attention_fusion_step(weight, value, index_target, index_refer))


def attention_fusion_step_backward_cuda(
    m: int, g: int, c: int, weight: Tensor, grad_weight: Tensor, value: Tensor, grad_value: Tensor,
    index_target: Tensor, index_refer: Tensor, grad_output: Tensor,
) -> None:  # fmt: skip
    grads = _grads(
        lambda w, v: attention_fusion_step(w, v, index_target, index_refer), (weight, value), grad_output
    )  # fmt: skip
    grad_weight += grads[0]
    grad_value += grads[1]


def _of_rows(grad_output: Tensor, idx: Tensor, rows: Tensor) -> Tensor:
    """Gradients [m, k, c] of neighbors, added up by row."""
    return triops.gather_points_backward(grad_output.flatten(0, 1)[None], idx.reshape(1, -1), rows.shape[0], True)[0]


def _grads(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = tuple(t.detach().requires_grad_() for t in inputs)
        return torch.autograd.grad(function(*leaves), leaves, grad)


NAMES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        farthest_point_sampling, knn_query, ball_query, random_ball_query, grouping, grouping2, interpolation,
        subtraction, aggregation, attention_relation_step, attention_fusion_step, knn_query_and_group,
        ball_query_and_group, query_and_group, offset2batch, batch2offset,
    )
} | {"interpolation2": interpolation2}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        farthest_point_sampling_cuda, knn_query_cuda, ball_query_cuda, random_ball_query_cuda, grouping_forward_cuda,
        grouping_backward_cuda, interpolation_forward_cuda, interpolation_backward_cuda, subtraction_forward_cuda,
        subtraction_backward_cuda, aggregation_forward_cuda, aggregation_backward_cuda,
        attention_relation_step_forward_cuda, attention_relation_step_backward_cuda,
        attention_fusion_step_forward_cuda, attention_fusion_step_backward_cuda,
    )
}  # fmt: skip


def extension(name: str) -> Extension:
    """`pointops`, whose functions are differentiable, `pointops._C`, or a module of another program."""
    if name == "pointops2_cuda":
        from triops.compat import _pointops2  # which takes functions from here

        return Extension(name, _pointops2.FUNCTIONS)
    if name == "sptr_cuda":
        return Extension(name, _sptr.FUNCTIONS)
    if name == "softgroup.ops.ops":
        return Extension(name, _softgroup.FUNCTIONS)
    if name == "pointgroup_ops":
        return Extension(name, {"ballquery_batch_p": ballquery_batch_p, "bfs_cluster": bfs_cluster})
    if name != "pointops":
        return Extension(name, FUNCTIONS)
    package = Extension(name, {})
    vars(package).update(NAMES)
    return package


_finder.install("pointops")
