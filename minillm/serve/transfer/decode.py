"""The decode side: an admitted sequence waits while a prefill pool fills its blocks, and goes on as after a hit.

    admit ──▶ blocks of the whole prompt ──▶ begin: ask, (RECEIVE, ticket, block) ──▶ keys arrive ──▶ computed
                                              no room, no computation                    │
                                              gone, too late, refused, preempted ────────┘ what is whole counts

A sequence that was given fewer keys than it asked for computes the others itself: whatever happens to the pool, tokens
are the same, and only time is lost. The last token of a prompt is always computed here, and everything is sampled here.
"""

import queue
import secrets
import threading
import time
import warnings
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakSet

from minillm.comm import Group
from minillm.model import ModelConfig
from minillm.serve.requests.request import Sample
from minillm.serve.schedule.blocks import CLOSE, RECEIVE
from minillm.serve.schedule.sequence import Sequence
from minillm.serve.transfer.layout import Layout, digest_of
from minillm.serve.transfer.members import Members
from minillm.serve.transfer.receive import Receiver
from minillm.serve.transfer.send import Receipt
from minillm.serve.transfer.wire import CONNECT_S, PEER_BITS, Line, dial, tickets_of

if TYPE_CHECKING:
    from minillm.serve.engine import LLM

WAIT_S = 0.005  # for keys, where there is nothing else to compute, between two looks at what else has come
RETRY_S = 0.2  # between two attempts to reach a pool that has gone


@dataclass(eq=False)
class Waiting:
    """A sequence that waits for keys. start: tokens it had before; asked: tokens it asked for. whole, nbytes: what has
    arrived on each rank of this side, the latter by layer."""

    ticket: int
    sequence: Sequence
    start: int
    asked: int
    epoch: int
    began: float
    whole: dict[int, int]
    nbytes: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class HandOver:
    """One that is over. name: of the sequence. asked, received: tokens. nbytes: of keys and values that were written
    here, by layer, of all ranks. outcome: "whole", "given up" (the sequence was preempted or has ended), "gone", "timed
    out" or "refused", then for the reason that the pool gives."""

    ticket: int
    name: str
    asked: int
    received: int
    nbytes: tuple[int, ...]
    seconds: float
    outcome: str
    reason: str = ""


class DecodeSide:
    """Of an engine with a prefill pool; on rank 0. What the engine's thread calls is `begin` to `reset`; all else
    comes from other threads by way of `_news`.

    handed_over: the last ones. receipts: what the pool's rank 0 says of the last ones it sent. outcomes: how many ended
    how. received, recomputed: tokens whose keys came, and that were asked for in vain. ready:
    whether a pool is connected.
    """

    def __init__(self, llm: "LLM", config: ModelConfig, group: Group | None, address: str, limits: tuple[int, float]):
        self.pool, self.scheduler, self.address = llm.pool, llm.scheduler, address
        self.min_tokens, self.timeout_s = limits
        self.handed_over: deque[HandOver] = deque(maxlen=10_000)
        self.receipts: deque[Receipt] = deque(maxlen=10_000)
        self.outcomes: Counter[str] = Counter()
        self.nbytes = self.received = self.recomputed = 0
        self._waiting: dict[int, Waiting] = {}
        self._alone: WeakSet[Sequence] = WeakSet()  # that compute what they lack: they have been let down once
        self._news: deque[tuple] = deque()
        self._wake = threading.Event()
        self._asks: queue.SimpleQueue = queue.SimpleQueue()
        self._epochs, self._epoch = count(1), 0  # an epoch: from a connection to its end
        self._closed, self.ready = False, False
        self._heard = time.monotonic()
        self._control: Line | None = None
        ranks = 1 if group is None else group.world_size
        peer, digest = secrets.randbits(PEER_BITS), digest_of(llm.model)
        self.peer, self._tickets = peer, tickets_of(peer)
        self.layout = Layout.of(config, llm.cache, digest, ranks)
        self.receiver = Receiver(llm.cache, self.layout, 0, partial(self._post, "whole", 0), self._line_lost)
        self._members = Members(group, self.layout, self._post, self._line_lost)
        self._connect()
        self._threads = [
            threading.Thread(target=run, name=f"minillm hand-overs {name}", daemon=True)
            for name, run in (("hear", self._hear), ("ask", self._ask))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, sequence: Sample) -> bool:
        """Whether a sequence that was just admitted waits for its keys."""
        start, size = sequence.num_computed, self.pool.block_size
        asked = sequence.num_tokens - 1 - start
        certain = not sequence.num_pending and start % size == 0 and sequence.adapter is None
        if not self.ready or asked < self.min_tokens or not certain or sequence in self._alone:
            return False
        ticket, now = next(self._tickets), time.monotonic()
        whole = dict.fromkeys(range(self.layout.ranks), 0)
        self._waiting[ticket] = Waiting(ticket, sequence, start, asked, self._epoch, now, whole)
        sequence.ticket = ticket
        self.pool.moves += [(RECEIVE, ticket, block) for block in sequence.blocks[start // size :]]
        salt = sequence.request.salt  # so that the pool's cache keeps tenants apart as well
        self._asks.put({"ask": ticket, "tokens": sequence.tokens[:-1], "start": start, "salt": salt})
        return True

    def poll(self) -> None:
        """Before a step: whose keys are there, or will not come, goes on."""
        while self._news:
            what, *told = self._news.popleft()
            if what == "whole":
                self._has_arrived(*told)
            elif what == "failed":
                self._end(told[0], "refused", told[1])
            else:
                for each in [each for each in self._waiting.values() if each.epoch <= told[0]]:
                    self._end(each.ticket, "gone")
        for each in list(self._waiting.values()):  # the oldest first
            if time.monotonic() - each.began <= self.timeout_s:
                break
            self._end(each.ticket, "timed out")
            if time.monotonic() - self._heard > self.timeout_s:  # of no other sequence either
                self._control.close()

    def wait(self) -> None:
        """For news, a moment long, if anything waits for keys."""
        if self._waiting:
            self._wake.wait(WAIT_S)
            self._wake.clear()

    def give_up(self, sequence: Sequence) -> None:
        """The sequence was preempted or has ended: its blocks are about to be released."""
        self._forget(self._waiting[sequence.ticket], "given up")

    def reset(self) -> None:
        """All sequences have lost their blocks."""
        for each in list(self._waiting.values()):
            self._forget(each, "given up")

    def close(self) -> None:
        """Ends connections and threads. The engine goes on by itself."""
        self._closed, self.ready = True, False
        self._control.close()
        self._asks.put(None)
        self._wake.set()
        for thread in self._threads:
            thread.join()
        self._control.close()  # one that has just been made
        self._members.close()
        self.receiver.disconnect()
        self._post("lost", self._epoch)

    def _has_arrived(self, rank: int, ticket: int, whole: int, nbytes: list[int]) -> None:
        if (waiting := self._waiting.get(ticket)) is None:
            return
        waiting.whole[rank], waiting.nbytes[rank] = whole, nbytes
        if min(waiting.whole.values()) >= waiting.asked:
            self._end(ticket, "whole")

    def _end(self, ticket: int, outcome: str, reason: str = "") -> None:
        """Its sequence goes on with what is whole."""
        if (waiting := self._waiting.get(ticket)) is None:
            return
        received, sequence = self._forget(waiting, outcome, reason), waiting.sequence
        if outcome != "whole":
            self._alone.add(sequence)
        sequence.num_computed += received
        sequence.received_tokens += received
        self.scheduler.publish(sequence, waiting.start)

    def _forget(self, waiting: Waiting, outcome: str, reason: str = "") -> int:
        """Returns how many tokens are whole."""
        del self._waiting[waiting.ticket]
        waiting.sequence.ticket = 0
        self.pool.moves.append((CLOSE, waiting.ticket, 0))
        if outcome != "whole":
            self._asks.put({"give_up": waiting.ticket})
        received = min(waiting.asked, *waiting.whole.values())
        nbytes = tuple(map(sum, zip(*waiting.nbytes.values(), strict=True))) or (0,) * self.layout.layers
        seconds, name = time.monotonic() - waiting.began, waiting.sequence.name
        facts = (waiting.asked, received, nbytes, seconds, outcome, reason)
        self.handed_over.append(HandOver(waiting.ticket, name, *facts))
        self.outcomes[outcome] += 1
        self.nbytes += sum(nbytes)
        if outcome != "given up":
            self.received += received
            self.recomputed += waiting.asked - received
        return received

    # From here on: other threads.

    def _post(self, *news: object) -> None:
        self._heard = time.monotonic()
        self._news.append(news)
        self._wake.set()

    def _line_lost(self, epoch: int) -> None:
        """A rank of this side has lost the pool: so have all, and they begin anew."""
        if epoch == self._epoch and self._control is not None:
            self._control.close()

    def _connect(self) -> None:
        """Makes a line to the pool's rank 0, once all ranks of this side have theirs. ValueError: it refuses or is
        not there."""
        try:
            line = dial(self.address)
        except OSError as error:
            raise Unreachable(f"no prefill pool can be reached at {self.address} ({error}): start it first.") from None
        line.tell(kind="control", peer=self.peer, layout=self.layout.to_json())
        answer = line.hear(CONNECT_S)
        if answer is None or "refused" in answer:
            line.close()
            if answer is None:
                raise Unreachable(f"what listens at {self.address} is no prefill pool, or is not ready.")
            raise ValueError(f"the prefill pool at {self.address} refuses this engine: {answer['refused']}")
        self._epoch = next(self._epochs)
        self._control = line
        order = {"epoch": self._epoch, "peer": self.peer, "addresses": answer["addresses"], "other": answer["layout"]}
        self._members.order(order)
        reasons = [self.receiver.connect(*Members.taken(order)), *self._members.answers(self._epoch)]
        if reason := next(filter(None, reasons), None):
            line.close()
            raise Unreachable(f"{reason}.")
        self.ready = True

    def _hear(self) -> None:
        """Until it is closed: what the pool says; a new line when it has gone and is there again."""
        while not self._closed:
            while (message := self._control.hear()) is not None:
                self._take(message)
            self.ready = False
            self._post("lost", self._epoch)
            self._reconnect()

    def _reconnect(self) -> None:
        while not self._closed and not self.ready:
            time.sleep(RETRY_S)
            try:
                self._connect()
            except Unreachable:
                continue
            except ValueError as refusal:
                warnings.warn(f"prompts are computed here from now on: {refusal}", stacklevel=2)
                self._closed = True

    def _take(self, message: dict) -> None:
        if "failed" in message:
            self._post("failed", message["failed"], message.get("why", "refused"))
        elif "done" in message:
            self.receipts.append(Receipt(message["done"], tuple(message.pop("nbytes")), *message["seconds"]))

    def _ask(self) -> None:
        """What the engine's thread has to say to the pool, which may be slow to listen."""
        while (message := self._asks.get()) is not None:
            self._control.tell(**message)


class Unreachable(ValueError):
    """There is no pool now; later there may be."""
