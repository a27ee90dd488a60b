"""Replicas that are processes of this machine: `python -m minillm serve` on free ports of loopback.

Each ends with the router, however that ends: its standard input is a pipe from here, and it shuts down when the pipe
closes, which the kernel does even for a router that was killed. It has a session of its own, so that Ctrl-C in a
terminal reaches only the router, which drains before it ends its replicas.
"""

import asyncio
import os
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

LISTENS = re.compile(r"(http://127\.0\.0\.1:\d+)/v1")  # on the first line that a server writes
STOP_S = 35.0  # after SIGTERM: what a server itself gives its open requests, and a little
CHOSEN_HERE = ("--host", "--port", "--api-key", "--api-keys", "--until-stdin-closes")


@dataclass(eq=False)
class ReplicaProcess:
    """url: where it listens. started: `time.monotonic()` before it was made. log: its last lines."""

    url: str
    process: asyncio.subprocess.Process
    started: float
    log: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    relay: asyncio.Task | None = None


class Processes:
    """options: of `serve`, for all of them; ValueError for those that are chosen here. key, keys_file: what serve's
    --api-key and --api-keys say. threads: of each, if OMP_NUM_THREADS does not say; None = torch's default. log: where
    their lines go, with their ports before them."""

    def __init__(
        self,
        options: Sequence[str] = (),
        *,
        key: str | None = None,
        keys_file: Path | None = None,
        threads: int | None = None,
        log: TextIO = sys.stderr,
    ):
        if own := [each.partition("=")[0] for each in options if each.partition("=")[0] in CHOSEN_HERE]:
            raise ValueError(f"{own[0]} of the replicas is chosen here: leave it out behind --")
        if options and not options[0].startswith("-"):
            raise ValueError(f"{options[0]!r} is no option of serve: only those stand behind --")
        file = [] if keys_file is None else [f"--api-keys={keys_file}"]
        self._command = [sys.executable, "-m", "minillm", "serve", "--port=0", "--until-stdin-closes", *options, *file]
        default = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        secret = {} if key is None else {"MINILLM_API_KEY": key}  # not on a command line, which others can read
        self._environment = default | os.environ | secret
        self._log = log

    async def start(self) -> ReplicaProcess:
        """One that listens; its model may still be loading. ValueError with its own words if it takes its options not,
        RuntimeError if it ended for another reason."""
        started = time.monotonic()
        pipes = {"stdin": PIPE, "stderr": PIPE, "stdout": DEVNULL}  # each access stands in the router's own log
        made = await asyncio.create_subprocess_exec(
            *self._command, **pipes, env=self._environment, start_new_session=True
        )
        found = ReplicaProcess("", made, started)
        try:
            async for line in made.stderr:
                found.log.append(line.decode(errors="replace").rstrip())
                if listens := LISTENS.search(found.log[-1]):
                    found.url = listens[1]
                    found.relay = asyncio.create_task(self._pass_on(found))
                    return found
            status = await made.wait()
        except BaseException:
            await _kill(made)
            raise
        said = found.log[-1] if found.log else "it said nothing"
        raise (ValueError if status == 2 else RuntimeError)(f"a replica ended with status {status}: {said}")

    async def stop(self, replica: ReplicaProcess, timeout_s: float = STOP_S) -> None:
        """SIGTERM, on which it ends what is open; SIGKILL if it is there after `timeout_s`."""
        with suppress(ProcessLookupError):
            replica.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await replica.process.wait()
        except BaseException as ended:
            await _kill(replica.process)
            if not isinstance(ended, TimeoutError):
                raise
        finally:
            if replica.relay is not None:
                replica.relay.cancel()

    async def _pass_on(self, replica: ReplicaProcess) -> None:
        port = replica.url.rpartition(":")[2]
        async for line in replica.process.stderr:
            replica.log.append(line.decode(errors="replace").rstrip())
            print(f"[{port}] {replica.log[-1]}", file=self._log, flush=True)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
