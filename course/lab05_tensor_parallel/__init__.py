"""Lab 05 · Tensor parallelism."""
