"""Closed forms of serving: queueing.py (how long requests wait), speculation.py (what draft tokens save) and
quantization.py (what fewer bits save, and cost)."""
