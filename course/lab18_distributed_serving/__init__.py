"""Lab 18 · Distributed serving."""
