"""A pool of prefill ranks in processes of their own, and how an engine is given one.

with PrefillPool.spawn("FOLDER", ranks=2) as pool:
    LLM.load("FOLDER", prefill=pool).generate(["def "])
"""

import os
import signal
import socket
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minillm.comm import Group, HangError, Link, RankError, launch
from minillm.model import ModelConfig, Transformer
from minillm.serve.numbers import check_whole
from minillm.serve.ranks.engine import signals_ignored
from minillm.serve.ranks.part import group_of, ranks_here
from minillm.serve.transfer.decode import DecodeSide
from minillm.serve.transfer.members import Member
from minillm.serve.transfer.prefill import serve_prefill
from minillm.serve.transfer.wire import Line, address_of, host_and_port

if TYPE_CHECKING:
    from minillm.serve.engine import LLM

START_S = 180.0  # ranks may take this long to load
SILENT_S = 1e6  # a pool may have nothing to do for so long; whoever waits for it has a time-out of its own
END_S = 5.0  # after this its processes are killed
MOST_STARTS = 100


@dataclass(frozen=True)
class PrefillAt:
    """Where a pool listens, and what it is asked for: prompts of which at least `min_tokens` tokens are not in the
    engine's own prefix cache. timeout_s: after which a sequence computes what it lacks itself."""

    address: str
    min_tokens: int = 128
    timeout_s: float = 30.0

    def __post_init__(self):
        host_and_port(self.address)
        check_whole("min_tokens", self.min_tokens, 1)
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s {self.timeout_s!r} must be above 0 seconds.")

    def attach(self, llm: "LLM", config: ModelConfig) -> DecodeSide | Member:
        """Makes it the pool of an engine, on every rank of that; config: of the whole model. ValueError: it refuses, or
        cannot be reached."""
        group = group_of(llm.model)
        if windows := {each.window for each in llm.pool.kinds if each.window is not None}:
            raise ValueError(
                f"prefill with a sliding window of {windows.pop()} tokens, whose blocks are given back while a prompt "
                "is computed: leave prefill out."
            )
        if group is not None and (here := ranks_here(llm.model)) < group.world_size:
            raise ValueError(
                f"prefill with {group.world_size} decode ranks, of which {here} are on this machine: put all on one."
            )
        if group is not None and group.rank:
            side = Member(llm, group)
        else:
            side = DecodeSide(llm, config, group, self.address, (self.min_tokens, self.timeout_s))
            llm.scheduler.handovers = side
        llm.runner.receiver = side.receiver
        return side


class PrefillPool:
    """at: where it listens and what it is asked for, to give to an engine in another process. processes: its ranks.
    starts: how often they were started: they are started anew when one of them has died."""

    def __init__(
        self,
        source: str | Path | Transformer,
        ranks: int,
        at: PrefillAt,
        device: str | None,
        options: dict[str, Any],
    ):
        self.at, self.processes, self.starts, self.failure = at, [], 0, None
        self._source, self._ranks, self._device, self._options = source, ranks, device, options
        self._sides: list[DecodeSide | Member] = []
        self._line: Line | None = None
        self._closed, self._is_there = False, threading.Event()
        self._door = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._run, self._answer)]

    @classmethod
    def spawn(
        cls,
        source: str | Path | Transformer,
        ranks: int = 1,
        *,
        address: str = "127.0.0.1:0",
        min_tokens: int = PrefillAt.min_tokens,
        timeout_s: float = PrefillAt.timeout_s,
        device: str | None = "cpu",
        link: Link | None = None,
        **options: Any,
    ) -> "PrefillPool":
        """Starts ranks and returns when they have loaded. source, options: of `over_ranks`. address, link: as of
        `serve_prefill`. device: as of `launch`. ValueError: what a rank refuses."""
        check_whole("ranks", ranks, 1)
        if "RANK" in os.environ:
            raise ValueError(
                "a prefill pool starts processes of its own, which a rank of torchrun cannot: start it apart."
            )
        pool = cls(source, ranks, PrefillAt(address, min_tokens, timeout_s), device, options | {"link": link})
        try:
            for thread in pool._threads:
                thread.start()
            if not pool._is_there.wait(START_S):
                raise ValueError(f"the prefill pool has not started within {START_S:g} s.")
            if pool.failure is not None:
                raise pool.failure
        except BaseException:
            pool.close()
            raise
        return pool

    def attach(self, llm: "LLM", config: ModelConfig) -> DecodeSide | Member:
        """See `PrefillAt`. It ends with this pool."""
        self._sides.append(self.at.attach(llm, config))
        return self._sides[-1]

    def close(self) -> None:
        """Ends it: engines of this process compute their prompts themselves again. Nothing of it is left."""
        self._closed = True
        for side in self._sides:
            side.close()
        self._sides.clear()
        if self._line is not None:
            self._line.close()
        run, answer = self._threads
        if run.ident is not None:
            run.join(END_S)
            self.kill()
            run.join()
        self._door.close()
        if answer.ident is not None:
            answer.join()

    def kill(self, *places: int) -> None:
        """Ends ranks as the system would (SIGKILL): all, or those at these places."""
        processes = list(self.processes)
        for place in places or range(len(processes)):
            try:
                os.kill(processes[place], signal.SIGKILL)
            except ProcessLookupError:
                continue

    def __enter__(self) -> "PrefillPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Ranks, and ranks in their place when they have died."""
        door = address_of(self._door)
        while not self._closed and self.starts < MOST_STARTS:
            self.starts += 1
            given = (self._source, self.at.address, door, self._options)
            try:
                launch(_serve, self._ranks, *given, timeout=SILENT_S, device=self._device)
                return
            except (RankError, HangError, ValueError) as error:
                self.processes = []
                if not self._is_there.is_set():
                    self.failure = error if isinstance(error, ValueError) else error.__cause__ or error
                    self._is_there.set()
                    return

    def _answer(self) -> None:
        """The ranks say where they listen; they end when this line does."""
        self._door.settimeout(0.2)
        while not self._closed:
            try:
                self._line = Line(self._door.accept()[0])
            except TimeoutError:
                continue
            except OSError:
                return
            if (message := self._line.hear(START_S)) is not None:
                self.processes = message["processes"]
                self.at = replace(self.at, address=message["address"])
                self._is_there.set()
            if self._closed:
                self._line.close()


def _serve(group: Group, source: str | Path | Transformer, address: str, door: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (2 * group.world_size)))  # the other half decodes
    with signals_ignored():  # of a process group: who started the pool may have requests to end
        serve_prefill(group, source, address, door=door, **options)
