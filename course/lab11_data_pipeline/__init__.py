"""Lab 11 · The data pipeline."""
