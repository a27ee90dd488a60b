"""Lab 13 · Paged attention."""
