"""What happened: operations, bytes, memory, time, and what this machine can do."""

from minillm.measure.ledger import Event, Ledger, Span, ledger, span
from minillm.measure.machine import machine
from minillm.measure.timeline import save_trace, timeline, trace
from minillm.measure.wire import wire

__all__ = ["Event", "Ledger", "Span", "ledger", "machine", "memory", "save_trace", "span", "timeline", "trace", "wire"]


def __getattr__(name: str):
    if name == "memory":  # needs torch, which is slow to import
        from minillm.measure.memory_tracker import memory

        return memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
