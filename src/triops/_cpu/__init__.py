"""What CPU kernels share: compilation and cache, threads, memory, half types, sort, intrinsics."""
