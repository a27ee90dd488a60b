"""Lab 01 · Collectives."""
