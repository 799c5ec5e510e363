"""The stateless executor: weights, kernels and the page pool, with one way for tensors to flow."""
