"""Names of `spconv.pytorch.spatial`."""

from __future__ import annotations

import torch

from triops.nn.sparse_tensor import SparseConvTensor
from triops.spconv.pytorch.modules import SparseModule


class RemoveDuplicate(SparseModule):
    """Of several rows at one site the lowest stays. The sites that stay keep their order."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        self.require_sparse(x)
        _, site = x.indices.unique(dim=0, return_inverse=True)
        rows = torch.arange(len(site), device=site.device)
        lowest = torch.full_like(rows, len(site)).scatter_reduce(0, site, rows, "amin")
        kept = (lowest[site] == rows).nonzero()[:, 0]
        return x._with(x.features[kept], x.indices[kept], x.spatial_shape, {})


__all__ = ["RemoveDuplicate"]
