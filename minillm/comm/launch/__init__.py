"""Ranks from a notebook cell, a script or torchrun."""

from minillm.comm.launch.launcher import launch

__all__ = ["launch"]
