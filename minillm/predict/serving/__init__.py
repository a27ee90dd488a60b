"""Closed forms of serving: queueing.py (how long requests wait), speculation.py (what draft tokens save),
quantization.py (what fewer bits save, and cost) and ranks.py (what several ranks that serve one model send)."""
