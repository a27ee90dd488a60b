"""Lab 10 · Fault tolerance."""
