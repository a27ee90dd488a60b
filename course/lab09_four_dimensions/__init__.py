"""Lab 09 · Four dimensions."""
