"""A decode rank's part of a hand-over: frames that arrive are written into blocks, if these still wait for them.

    engine's thread    open (RECEIVE): these blocks wait for ticket 7 ───────────── close: they wait no more
    a thread for each          frame 7, layer 0 ─▶ written    frame 7, layer 1 ─▶ written    frame 7 ─▶ dropped
    prefill rank

`open` and `close` are moves of the block pool: every rank carries them out in order with the copies, swaps and passes
around them. So blocks are opened after whatever was written into them before, and closed before anybody else writes.
A frame is written under the lock that `close` takes: once a ticket is closed, nothing more of it is written.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.model.paged import PagedCache
from minillm.serve.transfer.layout import Layout
from minillm.serve.transfer.rows import bytes_of_head, from_bytes, write_layer
from minillm.serve.transfer.wire import CONNECT_S, Frame, Line, dial

# of a ticket: tokens that are whole on this rank, bytes of keys and values by layer
Report = Callable[[int, int, list[int]], None]


@dataclass(eq=False)
class Opened:
    """Blocks that wait. blocks: in order. arrived: tokens of each (line, layer). ready: the device has come to where
    the blocks are free; None = it has no queue."""

    blocks: list[int]
    ready: Any
    arrived: dict[tuple[int, int], int]
    nbytes: list[int] = field(default_factory=list)

    @property
    def whole(self) -> int:
        """Tokens of which all layers and heads of this rank have arrived."""
        return min(self.arrived.values(), default=0)


class Receiver:
    """Of one rank. report: called, by any thread, when more tokens of a ticket have become whole. lost: called when a
    line has ended, with the number of the `connect` that made it."""

    def __init__(self, cache: PagedCache, layout: Layout, rank: int, report: Report, lost: Callable[[int], None]):
        self.cache, self.layout, self.rank = cache, layout, rank
        self._report, self._lost = report, lost
        self._changed = threading.Condition()
        self._opened: dict[int, Opened] = {}
        self._last = 0  # ticket that was opened or closed
        self._lines: list[Line] = []
        self._threads: list[threading.Thread] = []
        self._epoch, self.late = 0, 0  # late: frames that were dropped
        device = cache.pool.device
        self._device = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._device is None else self._device.Stream()

    def connect(self, epoch: int, peer: int, addresses: list[str], other: Layout) -> str | None:
        """Lines to the ranks of a prefill pool. None, or why there are none."""
        self.disconnect()
        self._epoch = epoch
        for rank, heads in self.layout.sources(self.rank, other):
            try:
                line = dial(addresses[rank])
            except OSError as error:
                return f"rank {rank} of the prefill pool cannot be reached at {addresses[rank]} ({error})"
            self._lines.append(line)
            line.tell(kind="data", peer=peer, heads=[heads.start, heads.stop])
            if (answer := line.hear(CONNECT_S)) is None or "ready" not in answer:
                return f"rank {rank} of the prefill pool says nothing at {addresses[rank]}"
        for number, line in enumerate(self._lines):
            name = f"minillm keys {self.rank}.{number}"
            self._threads.append(threading.Thread(target=self._run, args=(line, number, epoch), name=name, daemon=True))
            self._threads[-1].start()
        return None

    def disconnect(self) -> None:
        """Ends lines and threads. What is open stays open and gets no more."""
        with self._changed:
            lines, threads, self._lines, self._threads = self._lines, self._threads, [], []
            self._epoch = 0
            self._changed.notify_all()
        for line in lines:
            line.close()
        for thread in threads:
            thread.join()

    def open(self, ticket: int, block: int) -> None:
        """One block more that waits for it; the blocks of a ticket come one after the other."""
        with self._changed:
            if ticket not in self._opened:
                lines = range(len(self._lines))
                arrived = {(line, layer): 0 for line in lines for layer in range(self.layout.layers)}
                ready = None if self._device is None else self._device.current_stream().record_event()
                self._opened[ticket] = Opened([], ready, arrived, [0] * self.layout.layers)
            self._opened[ticket].blocks.append(block)

    def start(self) -> None:
        """All blocks of what was opened have been told: frames for them may come in."""
        with self._changed:
            self._last = max(self._last, max(self._opened, default=0))
            self._changed.notify_all()

    def close(self, ticket: int) -> None:
        """Its blocks may be anybody's."""
        with self._changed:
            self._opened.pop(ticket, None)
            self._last = max(self._last, ticket)
            self._changed.notify_all()

    def _run(self, line: Line, number: int, epoch: int) -> None:
        while (frame := Frame.of(line)) is not None:
            if not self._fits(frame) or (content := line.read(frame.nbytes)) is None:
                break
            with self._changed:
                while frame.ticket > self._last and self._epoch == epoch:
                    self._changed.wait()  # it is asked for and not opened yet
                opened = self._opened.get(frame.ticket)
                if opened is None:
                    self.late += 1
                    continue
                before = opened.whole
                if not self._write(opened, number, frame, content):
                    break
                whole, nbytes = opened.whole, list(opened.nbytes)
            if whole > before:
                self._report(frame.ticket, whole, nbytes)
        line.close()
        self._lost(epoch)

    def _fits(self, frame: Frame) -> bool:
        mine = self.layout.heads_of(self.rank)
        there = mine.start <= frame.head and frame.heads > 0 and frame.head + frame.heads <= mine.stop
        size = frame.tokens * frame.heads * bytes_of_head(self.cache)
        return there and frame.tokens > 0 and 0 <= frame.layer < self.layout.layers and frame.nbytes == size

    def _write(self, opened: Opened, line: int, frame: Frame, content: bytearray) -> bool:
        """False for what does not follow what came before, or finds no room."""
        end, size = frame.first + frame.tokens, self.cache.block_size
        if opened.arrived.get((line, frame.layer)) != frame.first or end > size * len(opened.blocks):
            return False
        tokens = np.arange(frame.first, end)
        slots = torch.from_numpy(np.array(opened.blocks)[tokens // size] * size + tokens % size)
        start = frame.head - self.layout.heads_of(self.rank).start
        heads = slice(start, start + frame.heads)
        rows = from_bytes(self.cache, content, frame.tokens, frame.heads)
        if self._device is None:
            write_layer(self.cache, frame.layer, slots, heads, rows)
        else:
            self._write_on_device(opened, frame.layer, slots, heads, rows)
        opened.arrived[line, frame.layer] = end
        opened.nbytes[frame.layer] += frame.nbytes
        return True

    def _write_on_device(self, opened: Opened, layer: int, slots: Tensor, heads: slice, rows: list[Tensor]) -> None:
        """Beside the engine's own queue; done when it returns."""
        device = self.cache.pool.device
        with self._device.device(device), self._device.stream(self._stream):
            self._stream.wait_event(opened.ready)
            write_layer(self.cache, layer, slots.to(device), heads, [each.to(device) for each in rows])
            self._stream.synchronize()
