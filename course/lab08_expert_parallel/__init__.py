"""Lab 08 · Expert parallelism."""
