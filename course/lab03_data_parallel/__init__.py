"""Lab 03 · Data parallel."""
