"""Lab 23: statements that are often heard, voted on and then run."""
