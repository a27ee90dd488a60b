"""The folder of a run belongs to one process at a time.

    runs/NAME/lock    held (flock) by the process that carries out the run, or that started its ranks

The system releases the lock when that process ends, however it ends, so no stale lock is ever left to clean up. Two
runs without a name that start together get two folders, because making a folder fails for the second.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"
POLL_S = 0.2


@contextlib.contextmanager
def locked(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Makes the folder if need be and holds its lock. wait_s: how long its present holder is given to end.

    ValueError if another process holds it, which it names, or if the folder cannot be made. A file system without locks
    costs a warning.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"{folder} cannot hold a run ({error.strerror}): name another --run or --runs") from error
    try:
        _take(descriptor, folder, time.monotonic() + wait_s)
        yield
    finally:
        os.close(descriptor)


def claim_unused(runs: Path, name: str) -> Path:
    """Makes and returns runs/NAME-1, or the first number that is free, also if several processes try at once."""
    number = 1
    while True:
        folder = runs / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ValueError(f"{folder} cannot hold a run ({error.strerror}): name another --run or --runs") from error


def _take(descriptor: int, folder: Path, give_up_at: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise ValueError(
                    f"{folder} is in use by {_holder(descriptor)}: wait until it has ended, ask it to save and end "
                    f"with `touch {folder / 'stop'}`, or name another --run"
                ) from None
        except OSError as error:
            print(f"minillm: {folder} cannot be locked ({error.strerror}): start no second run in it.", file=sys.stderr)
            return
        time.sleep(POLL_S)
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, and nobody learns whose it is
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
