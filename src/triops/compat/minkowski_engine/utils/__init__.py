"""`MinkowskiEngine.utils`."""

from triops.compat.minkowski_engine.utils.collation import (
    SparseCollation,
    batch_sparse_collate,
    batched_coordinates,
    sparse_collate,
)
from triops.compat.minkowski_engine.utils.init import kaiming_normal_
from triops.compat.minkowski_engine.utils.quantization import (
    fnv_hash_vec,
    ravel_hash_vec,
    sparse_quantize,
    unique_coordinate_map,
)
from triops.compat.minkowski_engine.utils.summary import summary

__all__ = [
    "SparseCollation", "batch_sparse_collate", "batched_coordinates", "fnv_hash_vec", "kaiming_normal_",
    "ravel_hash_vec", "sparse_collate", "sparse_quantize", "summary", "unique_coordinate_map",
]  # fmt: skip
