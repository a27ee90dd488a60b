"""What should happen: closed forms for bytes, rounds, time and memory. No torch needed."""

from minillm.predict import comms, roofline

__all__ = ["comms", "roofline"]
