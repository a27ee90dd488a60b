"""Races between streams, found with torch's own sanitizer (`torch.cuda._sanitizer`), which works in a CPU build.

Each stream and each event has a clock that says how far into every other stream it is known to be behind. Two accesses
to the same bytes, of which one writes, must be ordered by these clocks. torch's `EventHandler` compares the first byte
of tensors; here ranges of bytes are compared, since the ranks' flat buffers are used in pieces.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.cuda._sanitizer as csan

from tests.engine.node.counting import Site, site

if TYPE_CHECKING:
    from tests.engine.node.graphs import Capture
    from tests.engine.node.memory import Allocation


class NodeError(RuntimeError):
    """A program does what a node with GPUs would not forgive, or would punish with a wait."""


@dataclass(frozen=True)
class Access:
    stream: int
    seq_num: int
    operator: str
    at: Site
    writes: bool


Span = tuple["Allocation", int, int]  # first byte, and the one behind the last


class Races(csan.EventHandler):
    """launch: a kernel starts on a stream; in a capture it does not. The rest of EventHandler keeps the clocks."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.capture: Capture | None = None  # of a CUDA graph, while one is recorded

    def name(self, stream: int) -> str:
        return self.names.get(stream, f"stream {stream}")

    def is_after(self, stream: int, access: Access) -> bool:
        """Whether what the stream gets now runs behind the access."""
        return self.syncs.is_ordered_after(stream, access.seq_num, access.stream)

    def is_known_to_host(self, access: Access) -> bool:
        """Whether the host has waited for it."""
        return access.seq_num <= self.syncs.host_sync_state.get(access.stream, 0)

    def launch(self, stream: int, operator: str, reads: Iterable[Span], writes: Iterable[Span]) -> Access:
        """NodeError for a race with an earlier kernel. Returns the access that stands for this kernel."""
        if self.capture is not None and self.capture.is_here:
            self.capture.kernel(stream, operator)
            return Access(stream, self.seq_num, operator, site(), writes=False)
        self.seq_num += 1
        self.syncs.update_seq_num(stream, self.seq_num)
        at = site()
        for spans, is_write in ((reads, False), (writes, True)):
            access = Access(stream, self.seq_num, operator, at, is_write)
            for allocation, start, end in spans:
                self._check(allocation, start, end, access)
                self._note(allocation, (start, end), access)
        return access

    def _check(self, allocation: "Allocation", start: int, end: int, access: Access) -> None:
        for (other_start, other_end), others in allocation.accesses.items():
            if other_end <= start or end <= other_start:
                continue
            for other in others:
                if (other.writes or access.writes) and not self.is_after(access.stream, other):
                    raise NodeError(
                        f"race between streams: {access.operator} on {self.name(access.stream)} "
                        f"{'writes' if access.writes else 'reads'} memory at {access.at} and does not wait for "
                        f"{other.operator} on {self.name(other.stream)}, which {'writes' if other.writes else 'reads'} "
                        f"it (launched at {other.at})"
                    )

    def _note(self, allocation: "Allocation", span: tuple[int, int], access: Access) -> None:
        """A write makes all accesses inside its range history, since it runs behind them."""
        kept = allocation.accesses
        if access.writes:
            for other in [each for each in kept if span[0] <= each[0] and each[1] <= span[1]]:
                del kept[other]
            kept[span] = [access]
        else:
            same = kept.setdefault(span, [])
            same[:] = [each for each in same if each.writes or each.stream != access.stream]
            same.append(access)


def span_of(allocation: "Allocation", x: torch.Tensor) -> Span | None:
    """The bytes between the first and the last element of x; None if there are none."""
    if x.numel() == 0:
        return None
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = x.storage_offset() * x.element_size()
    return allocation, start, start + (last + 1) * x.element_size()
