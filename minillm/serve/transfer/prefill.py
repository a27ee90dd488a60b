"""The prefill side: an ordinary engine over ranks of its own, whose requests are prompts that others decode.

    rank 0     asked ──▶ a request of one token ──▶ steps ──▶ what each step computed of it is sent (`sends`)
    rank 1..   told each step as ever: `sends` is among its inputs, so they need to know no request

It has its own scheduler, prefix cache and chunks. What it finds in its cache is sent with the first pieces it computes.
"""

import os
import queue
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minillm.comm import Group, Link
from minillm.comm.ranks import of_all_ranks
from minillm.model import ModelConfig, Transformer
from minillm.serve.ranks.engine import over_ranks
from minillm.serve.requests.params import SamplingParams
from minillm.serve.requests.request import Request
from minillm.serve.run.step import Step
from minillm.serve.schedule.sequence import Sequence
from minillm.serve.transfer.layout import Layout, digest_of
from minillm.serve.transfer.send import Receipt, Sender
from minillm.serve.transfer.wire import CONNECT_S, Line, address_of, dial, host_and_port, peer_of

if TYPE_CHECKING:
    from minillm.serve.engine import LLM

MOST_STAGED = 256 << 20  # bytes that are copied and not sent: no step is computed while there are more
LOOK_S, BUSY_S = 0.5, 0.002
ONE_TOKEN = SamplingParams(1, ignore_eos=True)


def serve_prefill(
    group: Group,
    source: str | Path | Transformer,
    address: str = "127.0.0.1:0",
    *,
    door: str | None = None,
    link: Link | None = None,
    **options: Any,
) -> None:
    """Every rank of the group calls it; returns when `door` closes, an address that rank 0 tells where it listens.

    address: where rank 0 listens, port 0 = any; the others take the ports that follow, or any. link: paces what each
    rank sends. options: of `over_ranks`.
    """
    side = PrefillSide(group, address, door, link)
    over_ranks(group, source, side.serve, prefill=side, graphs=False, **options)


@dataclass(eq=False)
class Asked:
    """A prompt whose keys somebody waits for. start: its first token that is to be sent; sent: the first that is not
    sent yet."""

    ticket: int
    request: Request
    line: Line
    start: int
    sent: int


class PrefillSide:
    """On each rank; `attach`ed to its engine by `over_ranks`, which calls `serve` on rank 0. group: None for an engine
    that is whole, whose requests of its own go on beside."""

    def __init__(self, group: Group | None, address: str, door: str | None = None, link: Link | None = None):
        self.rank, self.ranks = (0, 1) if group is None else (group.rank, group.world_size)
        self.group, self.link, self.door = group, link, door
        self.host, port = host_and_port(address)
        self.port = port and port + self.rank
        self.stopped = threading.Event()
        self.inbox: queue.SimpleQueue[tuple[int, Line, dict | None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._asked: dict[Sequence, Asked] = {}
        self._lines: set[Line] = set()
        self._threads: list[threading.Thread] = []

    def attach(self, llm: "LLM", config: ModelConfig) -> "PrefillSide":
        """config: of the whole model. ValueError for an engine that keeps windowed layers apart."""
        if (own := llm.pool.windowed) is not None:
            raise ValueError(f"blocks of a sliding window of {own.window} tokens lie apart: say windows_apart=False.")
        self.listener = socket.create_server((self.host, self.port))
        self.listener.settimeout(LOOK_S)
        self.addresses = of_all_ranks(self.group, address_of(self.listener))
        self.layout = Layout.of(config, llm.cache, digest_of(llm.model), self.ranks)
        self.sender = llm.runner.sender = Sender(llm.cache, self.layout, self.rank, self.link)
        llm.core.builder.sends_of = self.sends_of
        processes = of_all_ranks(self.group, os.getpid())
        self._start(self._accept)
        if self.door is not None and self.rank == 0:
            line = dial(self.door)
            line.tell(address=self.addresses[0], processes=processes)
            self._start(self._watch, line)
        return self

    def serve(self, llm: "LLM") -> None:
        """On rank 0: steps, until it is stopped."""
        while not self.stopped.is_set():
            self._take_inbox(llm)
            if self._asked and self.sender.staged_bytes > MOST_STAGED:
                time.sleep(BUSY_S)
            elif self._asked:
                llm.advance()
                for sequence in [each for each, asked in self._asked.items() if asked.request.ended is not None]:
                    self._ended(self._asked.pop(sequence))
            else:
                self._wake.wait(LOOK_S)
                self._wake.clear()
                llm.runner.ready()

    def sends_of(self, step: Step) -> np.ndarray:
        """What of a step is sent, as rows of `send.SEND_COLUMNS` numbers one after the other."""
        rows: list[int] = []
        for place, ((sequence, tokens), start) in enumerate(zip(step.plan.batch, step.starts, strict=True)):
            asked, end = self._asked.get(sequence), start + tokens
            if asked is not None and end > asked.sent:
                rows += (asked.ticket, place, asked.sent, asked.start)
                asked.sent = end
        return np.array(rows, np.int64)

    def close(self) -> None:
        self.stopped.set()
        self._wake.set()
        self.listener.close()
        for line in list(self._lines):
            line.close()
        for thread in self._threads:
            thread.join()

    def _take_inbox(self, llm: "LLM") -> None:
        while not self.inbox.empty():
            peer, line, message = self.inbox.get()
            if message is None:  # it has gone
                given_up = [each for each in self._asked.values() if peer_of(each.ticket) == peer]
            elif "state" in message:
                line.tell(used=llm.pool.used, unfinished=llm.unfinished, staged=self.sender.staged_bytes)
                continue
            elif "give_up" in message:
                given_up = [each for each in self._asked.values() if each.ticket == message["give_up"]]
            else:
                self._add(llm, line, message)
                continue
            llm.requests.cancelled.extend(each.request for each in given_up)

    def _add(self, llm: "LLM", line: Line, message: dict) -> None:
        ticket, start = message["ask"], message["start"]
        try:
            request = llm.requests.request(message["tokens"], ONE_TOKEN, salt=message["salt"], awaited=True)
            sequence = request.samples[0]
            self._asked[sequence] = Asked(ticket, request, line, start, start)
            llm.requests.submit(request, f"ticket {ticket}")
        except (ValueError, RuntimeError) as refusal:
            self._asked = {each: asked for each, asked in self._asked.items() if asked.ticket != ticket}
            line.tell(failed=ticket, why=str(refusal))

    def _ended(self, asked: Asked) -> None:
        if asked.request.error is not None:
            asked.line.tell(failed=asked.ticket, why=asked.request.error)
        self.sender.after_all(peer_of(asked.ticket), lambda: self._tell_receipt(asked))

    def _tell_receipt(self, asked: Asked) -> None:
        receipt = Receipt.of(asked.ticket, self.sender.sent.pop(asked.ticket, []), self.layout.layers)
        seconds = (receipt.sending_s, receipt.hidden_s, receipt.began_early)
        asked.line.tell(done=asked.ticket, nbytes=receipt.nbytes, seconds=seconds)

    # Threads.

    def _start(self, run, *given) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, args=given, name=f"minillm prefill {run.__name__[1:]}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self.stopped.is_set():
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self._start(self._greet, Line(connection))

    def _greet(self, line: Line) -> None:
        """Somebody has come: who is it, and what is wanted?"""
        self._lines.add(line)
        hello = line.hear(CONNECT_S) or {}
        try:
            if hello.get("kind") == "data":
                self._serve_data(line, hello)
            elif hello.get("kind") == "control" and self.rank == 0:
                self._serve_control(line, hello)
        finally:
            self._lines.discard(line)
            line.close()

    def _serve_data(self, line: Line, hello: dict) -> None:
        outlet = self.sender.connect(hello["peer"], line, range(*hello["heads"]))
        line.tell(ready=True)
        line.read(1)  # nothing comes: it ends
        self.sender.disconnect(hello["peer"], outlet)

    def _serve_control(self, line: Line, hello: dict) -> None:
        refusal = self.layout.refusal(Layout.from_json(hello["layout"]))
        if refusal is not None:
            line.tell(refused=refusal)
            return
        line.tell(addresses=self.addresses, layout=self.layout.to_json())
        while (message := line.hear()) is not None:
            self.inbox.put((hello["peer"], line, message))
            self._wake.set()
        self.inbox.put((hello["peer"], line, None))
        self._wake.set()

    def _watch(self, line: Line) -> None:
        """Whoever started this pool closes the door, or has gone."""
        self._lines.add(line)
        line.read(1)
        self.stopped.set()
        self._wake.set()
