"""Ranks from a notebook cell, a script or torchrun: `launcher.py`, then `worker.py`."""

from minillm.comm.launch.launcher import launch

__all__ = ["launch"]
