"""Lab 24: the mock interview. Cards that come back when they are due, drills, whiteboard tasks, bugs, claims, designs.

Reading path: `deck.py` (cards, their numbers computed), `rounds.py` (what a round asks), `session.py` (what is kept),
`mock.py` (how it is asked), `tasks.py` (whiteboard tasks and their hidden checks).
"""
