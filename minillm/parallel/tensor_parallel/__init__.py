"""Tensor parallelism: every layer is cut, activations are summed."""
