"""get_indice_pairs on GPU."""

from triops.ops.rulebook.pairs_gpu import padded_pairs as get_indice_pairs

__all__ = ["get_indice_pairs"]
