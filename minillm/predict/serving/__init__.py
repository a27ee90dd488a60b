"""Closed forms of serving: queueing.py (how long requests wait), speculation.py (what draft tokens save),
quantization.py (what fewer bits save, and cost), ranks.py (what several ranks that serve one model send) and
handover.py (keys and values on their way from a rank that prefills to one that decodes)."""
