"""The CUDA backend: Triton kernels for what moves KV and small vectors, cuBLAS for dense products, graphs for steps."""
