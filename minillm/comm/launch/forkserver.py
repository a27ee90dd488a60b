"""The process that ranks are forked from. It has loaded torch, and what this process has of minillm and course.

Once one of their files is edited, a new server without them takes over, so that ranks see every edit.
"""

import contextlib
import encodings.idna  # noqa: F401 (this and popen_fork are read when first needed, if they can still be read then)
import fcntl
import functools
import importlib.util
import multiprocessing
import multiprocessing.popen_fork
import multiprocessing.popen_forkserver
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import process, resource_tracker, util
from multiprocessing.context import BaseContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.spawn import get_executable
from pathlib import Path

# torch._dynamo, because making any torch.optim optimizer loads it: seconds, once per rank.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "numpy", "cloudpickle", "psutil"]
OURS = ("minillm", "course")
SOCKETS = "minillm.server-"  # beginning of the name of the folder with the server's socket
LONGEST_FOLDER = 65  # bytes of its parent's path: an address of a socket has 107 in all
# The files of ours that the server has loaded: path -> (last change in ns, bytes). None before its start.
_loaded_files: dict[str, tuple[int, int]] | None = None


@functools.cache
def start_context() -> BaseContext:
    """How ranks are started: from a fork server; by `spawn` where the system has none; as forks of this process where
    this user may not run Python (a process may have been started by another user and then have given up rights)."""
    if not _may_start_python():
        return multiprocessing.get_context("fork")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(PRELOAD)
    _make_socket_folder()  # processes that are made from now on know it
    return multiprocessing.get_context("forkserver")


def _may_start_python() -> bool:
    effective = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
    return os.access(get_executable(), os.X_OK, **effective)


def start_server() -> None:
    """Start the fork server if none runs, with the modules of `OURS` that are loaded here. If one of their files has
    been edited since, start another one with torch alone.

    It and the processes it forks ignore Ctrl-C, so that no import shows a traceback: they inherit a blocked SIGINT. In
    this process SIGINT is blocked for a moment only, and a Ctrl-C in that moment arrives late.
    """
    global _loaded_files
    if start_context().get_start_method() != "forkserver":
        return
    if _loaded_files is None:
        load_ahead([])
    elif _loaded_files != _stamps(_loaded_files):
        _loaded_files = {}
        multiprocessing.set_forkserver_preload(PRELOAD)
        _leave_server()
    _ensure_server()


def load_ahead(modules: Iterable[str]) -> None:
    """Start the server now, in the background, and let it load these modules, too: for a command with many launches. An
    edit of one of them is seen, an edit of what only they import is not. A server that runs already stays as it is.

    The server has this process's `sys.path`: a program's folder may be another than the current one."""
    global _loaded_files
    if start_context().get_start_method() != "forkserver" or _loaded_files is not None:
        return
    names = [name for name in sys.modules if name.partition(".")[0] in OURS]
    names += [name for name in modules if name not in names]
    _loaded_files = _stamps(filter(None, map(_file_of, names)))
    multiprocessing.set_forkserver_preload([*PRELOAD, *names])
    given = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)  # the server's alone: a rank takes its launcher's environment
    try:
        _ensure_server()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _file_of(module: str) -> str | None:
    """The file that the module is loaded from; None if there is no such module or file."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec(module)
        return spec and spec.origin
    return None


def _stamps(files: Iterable[str]) -> dict[str, tuple[int, int]]:
    """When each file that exists was changed last, and its bytes."""
    found = {}
    for file in files:
        with contextlib.suppress(OSError):
            status = os.stat(file)
            found[file] = (status.st_mtime_ns, status.st_size)
    return found


def _ensure_server() -> None:
    resource_tracker.ensure_running()  # which the server's start does too, and which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_server() -> None:
    """Forget the server, so that the next launch starts another one. It ends with this process, and until then it still
    tells how its ranks ended."""
    server = ensure_running.__self__
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def socket_folder() -> str | None:
    """The folder with the server's socket, if `_make_socket_folder` made it."""
    folder = process.current_process()._config.get("tempdir")
    return folder if folder and Path(folder).name.startswith(SOCKETS) else None


def _make_socket_folder() -> None:
    """A folder for the server's socket in place of multiprocessing's own, which would stay behind when this process is
    killed. The ranks remove this one then or, if there were none, the next launch on this machine: its lock is free."""
    config = process.current_process()._config
    if config.get("tempdir") is not None:
        return
    where = tempfile.gettempdir()
    if len(os.fsencode(where)) > LONGEST_FOLDER and os.access("/tmp", os.W_OK):
        where = "/tmp"
    for old in Path(where).glob(f"{SOCKETS}*"):
        with contextlib.suppress(OSError), open(old / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    while True:
        folder = tempfile.mkdtemp(prefix=SOCKETS, dir=where)
        lock = os.open(Path(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)  # held as long as this process lives
        fcntl.flock(lock, fcntl.LOCK_EX)
        if Path(folder, "lock").exists():  # else another launch took it for an old one before it was locked
            break
        os.close(lock)
    util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-100)
    config["tempdir"] = folder


_main_lock = threading.Lock()


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Ranks get their function by value, so they need not run the caller's script again."""
    main = sys.modules["__main__"]
    with _main_lock:
        kept = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
        main.__spec__ = None
        try:
            yield
        finally:
            main.__dict__.pop("__spec__", None)
            main.__dict__.update(kept)


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back, since it would leave ranks behind. Yields a function that lets a held one through."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    held = []

    def let_through() -> None:
        if held:
            held.clear()
            before(signal.SIGINT, sys._getframe())

    signal.signal(signal.SIGINT, lambda *_: held.append(True))
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, before)
        let_through()
