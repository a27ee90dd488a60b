"""A server over several ranks: this process holds the port and takes the signals, rank 0 answers, the others follow.

    this process    bind ──▶ launch ranks ─────────────── waits ── SIGTERM or Ctrl-C ─╮
                         ╰─ the socket, through one of this machine's own ─▶ rank 0 ◀─┴─ ends what is open, then itself

So a port that is taken is told before a rank starts, and whatever ends this process ends the ranks.
"""

import contextlib
import select
import shutil
import socket
import tempfile
import threading
from pathlib import Path

WAIT_S = 600.0  # for rank 0 to load its part and ask for the socket


class Handover:
    """Gives a listening socket to the process that asks for it at `path`, and tells that process when to end."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening, self._peer = listening, None
        self._folder = tempfile.mkdtemp(prefix="minillm-")
        self.path, self._stopped = str(Path(self._folder, "port")), False
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self.path)
        self._door.listen(1)

    def __enter__(self) -> "Handover":
        threading.Thread(target=self._give, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):  # nobody waits for a rank any more
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        if self._peer is not None:
            self._peer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """May be called by a signal's handler."""
        self._stopped = True
        if self._peer is not None:
            with contextlib.suppress(OSError):  # rank 0 has gone already
                self._peer.shutdown(socket.SHUT_RDWR)

    def _give(self) -> None:
        try:
            peer, _ = self._door.accept()
            socket.send_fds(peer, [b"port"], [self.listening.fileno()])
        except OSError:  # no rank 0 came for it
            return
        self._peer = peer
        if self._stopped:
            self.stop()


class TakenOver:
    """On rank 0: what it was given. listening: the socket."""

    def __init__(self, path: str) -> None:
        self._peer = socket.socket(socket.AF_UNIX)
        self._peer.settimeout(WAIT_S)
        self._peer.connect(path)
        _, [descriptor], _, _ = socket.recv_fds(self._peer, 16, 1)
        self.listening = socket.socket(fileno=descriptor)
        shutil.rmtree(Path(path).parent, ignore_errors=True)  # so that nothing is left, whatever ends the other process

    def is_over(self) -> bool:
        """Whether the process that gave it says so, or has gone."""
        return bool(select.select([self._peer], [], [], 0)[0])
