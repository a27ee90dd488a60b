"""The commands that need the course: `python -m minillm lab` and its like find them here."""
