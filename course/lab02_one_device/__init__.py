"""Lab 02 · One device."""
