"""Lab 17 · Adapters."""
