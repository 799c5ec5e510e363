"""The native CPU backend: C++ kernels behind the operations contract."""
