"""Lab 25 · Kernels and compilation."""
