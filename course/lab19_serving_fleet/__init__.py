"""Lab 19 · A serving fleet."""
