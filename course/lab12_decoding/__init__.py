"""Lab 12 · Decoding."""
