"""Lab 06 · Pipeline parallelism."""
