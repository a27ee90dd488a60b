"""Lab 14 · Continuous batching."""
