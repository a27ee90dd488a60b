"""Lab 04 · ZeRO."""
