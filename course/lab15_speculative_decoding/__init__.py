"""Lab 15 · Speculative decoding."""
