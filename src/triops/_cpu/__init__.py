"""What CPU kernels share: compilation and cache, threads, memory, addresses, half types, sort, intrinsics."""
