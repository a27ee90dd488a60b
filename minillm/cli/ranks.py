"""`--tp N` and `--pp N` of `generate` and `serve`: the engine over ranks, started here or by torchrun."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from minillm.comm import Group, HangError, RankError, launch
from minillm.comm.launch.forkserver import start_context, start_server
from minillm.comm.launch.launcher import MAX_RANKS
from minillm.serve.engine import LLM
from minillm.serve.ranks.engine import over_ranks, signals_ignored
from minillm.train.run import interrupts

if TYPE_CHECKING:
    from fastapi import FastAPI

TIMEOUT_S = 600.0  # a rank may wait this long for another one; an idle rank 0 is heard every few seconds


def check_ranks(tp: int, pp: int, device: str | None, ep: bool = False) -> int:
    """How many ranks they are. ValueError if torchrun has started another number, and for one device for all of them.

    tp, pp: ranks that share a layer; stages of layers. ep: whole experts on each rank, of which there have to be some.
    """
    ranks, said = tp * pp, f"--tp {tp}" if pp == 1 else f"--tp {tp} --pp {pp}"
    if under_torchrun() and (started := os.environ.get("WORLD_SIZE")) != str(ranks):
        raise ValueError(
            f"{said}: torchrun has started {started} ranks, which all take part: "
            + (f"say --tp {started}" if pp == 1 else f"make the product {started}")
        )
    if ranks > MAX_RANKS and not under_torchrun():
        raise ValueError(f"{said} are {ranks} ranks: at most {MAX_RANKS} are started here, more by torchrun")
    if ep and tp == 1:
        raise ValueError("--ep shares out experts among the ranks of --tp: say how many with --tp N, or leave --ep out")
    if ranks > 1 and device is not None and ":" in device:
        raise ValueError(f"--device {device} is one device for {ranks} ranks: say {device.partition(':')[0]}")
    return ranks


def on_ranks(
    ranks: int,
    folder: Path,
    use: Callable[[LLM], Any],
    *,
    device: str | None,
    **options: Any,
) -> Any:
    """What `use(llm)` returns on rank 0. options: of `over_ranks`.

    ValueError for what a rank refuses. A rank that dies, or says nothing for `TIMEOUT_S`, ends all of them and this
    command, with one sentence.
    """
    heed = nullcontext if under_torchrun() else signals_ignored  # ranks that are started here end with this process

    def follow(group: Group) -> Any:
        with heed():
            return over_ranks(group, folder, use, **options)

    try:
        return launch(follow, ranks, timeout=TIMEOUT_S, device=device)[0]
    except (RankError, HangError) as error:
        if isinstance(error.__cause__, ValueError):
            raise
        said = str(error).partition("\n")[0].partition(". Who waits")[0]
        typer.echo(f"minillm: {said}", err=True)
        raise typer.Exit(1) from None


def serve_on_ranks(
    ranks: int,
    folder: Path,
    listening: socket.socket | None,
    app_of: Callable[[LLM], "FastAPI"],
    announce: Callable[[], None],
    *,
    until_stdin_closes: bool = False,
    **options: Any,
) -> None:
    """Serves until a signal, or until a rank has ended. listening: None on torchrun's other ranks. announce: called
    where the engine is about to be ready. until_stdin_closes: see `api.run.serve`. options: of `on_ranks`.
    """
    from minillm.api.ranks import Handover, TakenOver
    from minillm.api.run import end_with_stdin, serve

    if until_stdin_closes and listening is not None:
        end_with_stdin()

    def serve_here(llm: LLM, port: socket.socket, is_over: Callable[[], bool] = lambda: False) -> None:
        app = app_of(llm)
        with signals_ignored():  # uvicorn raises the one that ended it once more, before the other ranks have heard
            over = {"is_over": lambda: is_over() or not app.state.api.healthy}
            serve(app, port, **over, takes_signals=under_torchrun())

    if under_torchrun():
        if listening is not None:
            announce()
        on_ranks(ranks, folder, lambda llm: serve_here(llm, listening), **options)
        return
    with Handover(listening) as door, interrupts(then=door.stop):
        path = door.path

        def use(llm: LLM) -> None:
            taken = TakenOver(path)
            with taken.listening:
                serve_here(llm, taken.listening, taken.is_over)

        announce()
        on_ranks(ranks, folder, use, **options)


def start_deaf_server() -> None:
    """Starts what ranks are forked from so that neither it nor they get a SIGTERM, which a service manager sends to all
    processes: this one takes it, ends what is open, and then the ranks. They ignore Ctrl-C as ever."""
    resource_tracker.ensure_running()  # which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        start_server()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Speaker:
    """In another process: what it is called with is heard where `hearing` made it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._connection: Connection | None = None

    def __call__(self, said: Any) -> None:
        self._connection = self._connection or Client(self.address)
        self._connection.send(said)


@contextmanager
def hearing(hear: Callable[[Any], None]) -> Iterator[Callable[[Any], None]]:
    """Yields what rank 0 calls, so that `hear` is called here, in a thread, before `on_ranks` returns. Under torchrun
    rank 0 is this process. An exception of `hear` is raised at the end, and it hears no more."""
    if under_torchrun():
        yield hear
        return
    failures: list[Exception] = []

    def run() -> None:
        with listener.accept() as connection, suppress(EOFError, OSError):
            while True:
                said = connection.recv()
                try:
                    if not failures:
                        hear(said)
                except Exception as failure:
                    failures.append(failure)

    start_context()  # the listener has its socket in its folder, which ranks remove when this process is killed
    with Listener(family="AF_UNIX") as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield Speaker(listener.address)
        finally:
            Client(listener.address).close()  # for the case that no rank came
            thread.join()
    for failure in failures:
        raise failure


def under_torchrun() -> bool:
    return "RANK" in os.environ
