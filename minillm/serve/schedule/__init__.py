"""What the next forward pass computes: `sequence.py`, `scheduler.py`, and `blocks.py`, which hold keys and values."""
