"""A prefill rank's part of a hand-over: what a layer has written leaves while later layers compute.

    the pass        layer 0 ── layer 1 ── layer 2 ── layer 3 ── ...
                       ╲ copied  ╲          ╲          ╲
    a thread            frame 0 ──── frame 1 ──── frame 2 ──── ...        for each decode rank that needs heads of here

Right after its attention a layer's rows are copied out of their blocks, in the order of the device's own queue. So the
scheduler may give the blocks to somebody else as soon as the pass is over: what is under way does not lie in them. The
threads touch sockets and these copies, and no group.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.comm import Link
from minillm.model.paged import PagedAttention, PagedCache
from minillm.serve.run.step_inputs import StepInputs
from minillm.serve.transfer.layout import Layout
from minillm.serve.transfer.rows import read_layer, to_bytes
from minillm.serve.transfer.wire import Frame, Line, peer_of

# A row of `StepInputs.sends`: ticket, place of its sequence in the step, first token to send, and first token that the
# ticket is for; all up to the last token that the step computes of the sequence are sent.
SEND_COLUMNS = 4


@dataclass(frozen=True)
class Sent:
    """A frame that has left: when its layer was computed, when the wire began and ended to carry it (seconds of
    `time.monotonic`; of an emulated wire its own)."""

    ticket: int
    layer: int
    nbytes: int
    computed: float
    began: float
    ended: float


class Outlet:
    """To one decode rank. heads: kv heads that it needs of this rank."""

    def __init__(self, line: Line, heads: range, sender: "Sender"):
        self.line, self.heads, self._sender = line, heads, sender
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="minillm sends keys", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """(frame, rows, event of their copy, when they were computed), or what is called once all before it has left;
        None ends it."""
        self._queue.put(item)

    def end(self) -> None:
        self.line.close()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
                continue
            frame, rows, copied, computed = item
            if copied is not None:
                copied.synchronize()
            began, ended = self._sender.pace(frame.nbytes, computed)
            if (wait := ended + self._sender.latency_s - time.monotonic()) > 0:
                time.sleep(wait)
            self.line.send(frame.to_bytes(), *to_bytes(rows))
            ended = ended if self._sender.link else time.monotonic()
            self._sender.left(Sent(frame.ticket, frame.layer, frame.nbytes, computed, began, ended))


class Sender:
    """Of one rank. link: paces what it sends, as a network card of this rank's would. staged_bytes: copied and not
    sent yet."""

    def __init__(self, cache: PagedCache, layout: Layout, rank: int, link: Link | None = None):
        self.cache, self.layout, self.rank, self.link = cache, layout, rank, link
        self.staged_bytes = 0
        self.latency_s = 0.0 if link is None else link.latency_s
        self.sent: dict[int, list[Sent]] = {}  # by ticket, until `receipt` takes it
        self._outlets: dict[int, list[Outlet]] = {}  # by peer
        self._lock, self._free_at = threading.Lock(), 0.0
        device = cache.pool.device
        self._device = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._device is None else self._device.Stream()

    def connect(self, peer: int, line: Line, heads: range) -> Outlet:
        outlet = Outlet(line, heads, self)
        with self._lock:
            self._outlets.setdefault(peer, []).append(outlet)
        return outlet

    def disconnect(self, peer: int, outlet: Outlet) -> None:
        with self._lock:
            self._outlets[peer].remove(outlet)
            if not self._outlets[peer]:
                del self._outlets[peer]
        outlet.end()

    def following(self, attention: PagedAttention, step: StepInputs, tables: np.ndarray) -> Callable[..., Tensor]:
        """The attention function of a pass whose keys are sent. tables: the block tables on the host."""
        size, jobs = self.cache.block_size, []
        for ticket, place, first, base in step.sends.reshape(-1, SEND_COLUMNS).tolist():
            tokens = np.arange(first, step.starts[place] + step.counts[place])
            slots = tables[step.rows[place], tokens // size] * size + tokens % size
            there = torch.from_numpy(slots).to(self.cache.pool.device)
            jobs.append((ticket, first - base, there))

        def attend(q: Tensor, k: Tensor, v: Tensor, *, layer: int, **options) -> Tensor:
            output = attention(q, k, v, layer=layer, **options)
            for job in jobs:
                self._send_layer(layer, *job)
            return output

        return attend

    def after_all(self, peer: int, call: Callable[[], None]) -> None:
        """Calls it once what is under way to the peer has left, from a thread."""
        with self._lock:
            outlets = list(self._outlets.get(peer, ()))
        left = list(range(len(outlets)))

        def count() -> None:
            if left.pop() == 0:  # each outlet takes another number, and the last one this
                call()

        for outlet in outlets:
            outlet.put(count)
        if not outlets:
            call()

    def pace(self, nbytes: int, computed: float) -> tuple[float, float]:
        """When an emulated wire begins and ends to carry a message of so many bytes that was there at `computed`; now,
        without one."""
        if self.link is None:
            now = time.monotonic()
            return now, now
        with self._lock:
            began = max(computed, self._free_at)
            self._free_at = began + nbytes / self.link.bandwidth_bytes_per_s
            return began, self._free_at

    def left(self, sent: Sent) -> None:
        with self._lock:
            self.staged_bytes -= sent.nbytes
            self.sent.setdefault(sent.ticket, []).append(sent)

    def _send_layer(self, layer: int, ticket: int, first: int, slots: Tensor) -> None:
        with self._lock:
            outlets = list(self._outlets.get(peer_of(ticket), ()))
        rows, copied = self._on_host(read_layer(self.cache, layer, slots)) if outlets else ([], None)
        mine, computed = self.layout.heads_of(self.rank), time.monotonic()
        for outlet in outlets:
            heads = slice(outlet.heads.start - mine.start, outlet.heads.stop - mine.start)
            part = [each[:, :, heads] for each in rows]
            nbytes = sum(each.nbytes for each in part)
            frame = Frame(ticket, layer, first, len(slots), outlet.heads.start, len(outlet.heads), nbytes)
            with self._lock:
                self.staged_bytes += nbytes
            outlet.put((frame, part, copied, computed))

    def _on_host(self, rows: list[Tensor]) -> tuple[list[Tensor], Any]:
        """The rows, and the event of their copy: on a GPU it runs beside the layers that follow."""
        if self._device is None:
            return rows, None
        copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in rows]
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            for each, copy in zip(rows, copies, strict=True):
                copy.copy_(each, non_blocking=True)
                each.record_stream(self._stream)
        return copies, self._stream.record_event()


@dataclass(frozen=True)
class Receipt:
    """What one rank sent for a ticket. nbytes: of keys and values, by layer. sending_s: seconds in which the wire
    carried them; hidden_s: those before the last layer was computed. began_early: whether the wire began to carry the
    first layer before the last one was computed."""

    ticket: int
    nbytes: tuple[int, ...]
    sending_s: float
    hidden_s: float
    began_early: bool

    @classmethod
    def of(cls, ticket: int, sent: list[Sent], layers: int) -> "Receipt":
        computed = max((each.computed for each in sent), default=0.0)
        nbytes = [sum(each.nbytes for each in sent if each.layer == layer) for layer in range(layers)]
        hidden = sum(max(0.0, min(each.ended, computed) - each.began) for each in sent)
        early = any(each.layer == 0 and each.began < computed for each in sent)
        return cls(ticket, tuple(nbytes), sum(each.ended - each.began for each in sent), hidden, early)
