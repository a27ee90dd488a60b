"""Lab 24: the mock interview. Cards that come back when they are due, numeric drills, whiteboard tasks that are run.

Reading path: `deck.py` (cards, their numbers computed), `numbers.py`, `drills.py`, `tasks.py`, `mock.py` (a session).
"""
