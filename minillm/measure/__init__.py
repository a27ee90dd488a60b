"""What happened: operations, bytes, memory, time, and what this machine can do."""

from minillm.measure.ledger import Event, Ledger, Span, ledger, span

__all__ = ["Event", "Ledger", "Span", "ledger", "span"]
