"""Closed forms of serving: queueing.py (how long requests wait) and speculation.py (what draft tokens save)."""
