"""The decode ranks besides rank 0: they are told where the prefill ranks are, and say what has arrived."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator

from minillm.comm import Group
from minillm.serve.transfer.layout import Layout
from minillm.serve.transfer.receive import Receiver
from minillm.serve.transfer.wire import CONNECT_S, Line, address_of, dial


class Members:
    """On rank 0: a line to each of the others. post: is told ("whole", rank, ticket, tokens, bytes by layer). lost:
    see `Receiver`."""

    def __init__(self, group: Group | None, layout: Layout, post: Callable[..., None], lost: Callable[[int], None]):
        self._post, self._lost = post, lost
        self._lines: list[Line] = []
        self._threads: list[threading.Thread] = []
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        if group is None or group.world_size == 1:
            return
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(CONNECT_S)
            group.gather_objects((address_of(listener), layout.to_json()))
            for _ in range(group.world_size - 1):
                line = Line(listener.accept()[0])
                rank = line.hear(CONNECT_S)["rank"]
                self._lines.append(line)
                name = f"minillm decode rank {rank}"
                self._threads.append(threading.Thread(target=self._hear, args=(rank, line), name=name, daemon=True))
                self._threads[-1].start()

    def order(self, order: dict) -> None:
        """Asks all of them to connect; see `taken`."""
        for line in self._lines:
            line.tell(connect=order)

    def answers(self, epoch: int) -> Iterator[str | None]:
        """Of each one, why it could not connect."""
        for _ in self._lines:
            try:
                answered, reason = self._answers.get(timeout=CONNECT_S)
                while answered != epoch:
                    answered, reason = self._answers.get(timeout=CONNECT_S)
                yield reason
            except queue.Empty:
                yield "a decode rank says nothing"

    @staticmethod
    def taken(order: dict) -> tuple[int, int, list[str], Layout]:
        """The arguments of `Receiver.connect`."""
        return order["epoch"], order["peer"], order["addresses"], Layout.from_json(order["other"])

    def close(self) -> None:
        for line in self._lines:
            line.close()
        for thread in self._threads:
            thread.join()

    def _hear(self, rank: int, line: Line) -> None:
        while (message := line.hear()) is not None:
            if "connected" in message:
                self._answers.put((message["connected"], message["reason"]))
            elif "lost" in message:
                self._lost(message["lost"])
            else:
                self._post("whole", rank, message["ticket"], message["whole"], message["nbytes"])


class Member:
    """On another rank: its receiver, and a thread that does what rank 0 says until that closes the line."""

    def __init__(self, llm, group: Group):
        (address, layout), *_ = group.gather_objects(None)
        self._line, layout = dial(address), Layout.from_json(layout)
        self.receiver = Receiver(llm.cache, layout, group.rank, self._report, lambda epoch: self._line.tell(lost=epoch))
        self._line.tell(rank=group.rank)
        self._thread = threading.Thread(target=self._run, name="minillm hand-overs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._line.close()
        self._thread.join()

    def _report(self, ticket: int, whole: int, nbytes: list[int]) -> None:
        self._line.tell(ticket=ticket, whole=whole, nbytes=nbytes)

    def _run(self) -> None:
        while (message := self._line.hear()) is not None:
            taken = Members.taken(message["connect"])
            self._line.tell(connected=taken[0], reason=self.receiver.connect(*taken))
        self.receiver.disconnect()
