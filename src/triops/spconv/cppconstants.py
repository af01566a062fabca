"""Names of `spconv.cppconstants`: how a build was made. triops is not built."""

CPU_ONLY_BUILD = False
HAS_BOOST = False
COMPILED_CUDA_ARCHS: set[tuple[int, int]] = set()
COMPILED_CUDA_GEMM_ARCHS: set[tuple[int, int]] = set()
