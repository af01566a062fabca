"""torch_scatter without a compiler: importing this module supplies `torch_scatter`, unless it is installed.

Over torch's own reductions, on any device. The functions are here too, to be called directly.
"""

from triops.compat import _finder
from triops.compat.torch_scatter._composite import (
    scatter_log_softmax,
    scatter_logsumexp,
    scatter_softmax,
    scatter_std,
)
from triops.compat.torch_scatter._scatter import (
    scatter,
    scatter_add,
    scatter_max,
    scatter_mean,
    scatter_min,
    scatter_mul,
    scatter_sum,
)
from triops.compat.torch_scatter._segment import (
    gather_coo,
    gather_csr,
    segment_add_coo,
    segment_add_csr,
    segment_coo,
    segment_csr,
    segment_max_coo,
    segment_max_csr,
    segment_mean_coo,
    segment_mean_csr,
    segment_min_coo,
    segment_min_csr,
    segment_sum_coo,
    segment_sum_csr,
)

__version__ = "2.1.2"  # of torch_scatter, whose interface this follows; programs ask for it
__all__ = [
    "gather_coo",
    "gather_csr",
    "scatter",
    "scatter_add",
    "scatter_log_softmax",
    "scatter_logsumexp",
    "scatter_max",
    "scatter_mean",
    "scatter_min",
    "scatter_mul",
    "scatter_softmax",
    "scatter_std",
    "scatter_sum",
    "segment_add_coo",
    "segment_add_csr",
    "segment_coo",
    "segment_csr",
    "segment_max_coo",
    "segment_max_csr",
    "segment_mean_coo",
    "segment_mean_csr",
    "segment_min_coo",
    "segment_min_csr",
    "segment_sum_coo",
    "segment_sum_csr",
]

_finder.install("torch_scatter")
