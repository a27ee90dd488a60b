"""Lab 07 · Long context."""
