"""Lab 00 · Start here."""
