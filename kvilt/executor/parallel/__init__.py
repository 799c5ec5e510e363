"""Tensor parallelism: rank 0 runs the engine, the other ranks are processes that follow its steps on their parts."""
