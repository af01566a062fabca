"""Functions of torch over the features of a tensor: `MinkowskiEngine.MinkowskiFunctional`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from triops.compat.minkowski_engine.sparse_tensor import SparseTensor
from triops.compat.minkowski_engine.tensor_field import TensorField


def _wrap_tensor(input: SparseTensor | TensorField, features: Tensor) -> Any:
    """Features where those of the input are."""
    return input._like(features)


def _to_features(function: Callable[..., Tensor]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(input: SparseTensor | TensorField, *args: Any, **kwargs: Any) -> Any:
        return _wrap_tensor(input, function(input.F, *args, **kwargs))

    return call


def _of_features(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call(input: SparseTensor | TensorField, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return function(input.F, target, *args, **kwargs)

    return call


threshold = _to_features(F.threshold)
relu = _to_features(F.relu)
hardtanh = _to_features(F.hardtanh)
hardswish = _to_features(F.hardswish)
relu6 = _to_features(F.relu6)
elu = _to_features(F.elu)
selu = _to_features(F.selu)
celu = _to_features(F.celu)
leaky_relu = _to_features(F.leaky_relu)
prelu = _to_features(F.prelu)
rrelu = _to_features(F.rrelu)
glu = _to_features(F.glu)
gelu = _to_features(F.gelu)
logsigmoid = _to_features(F.logsigmoid)
hardshrink = _to_features(F.hardshrink)
tanhshrink = _to_features(F.tanhshrink)
softsign = _to_features(F.softsign)
softplus = _to_features(F.softplus)
softmin = _to_features(F.softmin)
softmax = _to_features(F.softmax)
softshrink = _to_features(F.softshrink)
gumbel_softmax = _to_features(F.gumbel_softmax)
log_softmax = _to_features(F.log_softmax)
tanh = _to_features(F.tanh)
sigmoid = _to_features(F.sigmoid)
hardsigmoid = _to_features(F.hardsigmoid)
silu = _to_features(F.silu)
batch_norm = _to_features(F.batch_norm)
normalize = _to_features(F.normalize)
linear = _to_features(F.linear)
dropout = _to_features(F.dropout)
alpha_dropout = _to_features(F.alpha_dropout)

binary_cross_entropy = _of_features(F.binary_cross_entropy)
binary_cross_entropy_with_logits = _of_features(F.binary_cross_entropy_with_logits)
poisson_nll_loss = _of_features(F.poisson_nll_loss)
cross_entropy = _of_features(F.cross_entropy)
hinge_embedding_loss = _of_features(F.hinge_embedding_loss)
kl_div = _of_features(F.kl_div)
l1_loss = _of_features(F.l1_loss)
mse_loss = _of_features(F.mse_loss)
multilabel_margin_loss = _of_features(F.multilabel_margin_loss)
multilabel_soft_margin_loss = _of_features(F.multilabel_soft_margin_loss)
multi_margin_loss = _of_features(F.multi_margin_loss)
nll_loss = _of_features(F.nll_loss)
smooth_l1_loss = _of_features(F.smooth_l1_loss)
soft_margin_loss = _of_features(F.soft_margin_loss)
