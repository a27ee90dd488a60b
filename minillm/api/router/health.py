"""When a replica is ejected and when it returns: a few outcomes in a row decide, so that one lost packet does not."""

from dataclasses import dataclass


@dataclass
class Health:
    """fall: failures in a row that eject a replica. rise: successes in a row that let an ejected one return; a new
    replica needs one. ready: whether it gets requests. seen: whether it ever was ready."""

    fall: int = 2
    rise: int = 2
    ready: bool = False
    seen: bool = False
    _row: int = 0  # outcomes in a row that speak against `ready`

    def observe(self, ok: bool) -> None:
        """The outcome of a check, or of a request."""
        if ok == self.ready:
            self._row = 0
            return
        self._row += 1
        needed = (self.rise if self.seen else 1) if ok else self.fall
        if self._row >= needed:
            self.ready, self._row = ok, 0
            self.seen = self.seen or ok

    def eject(self) -> None:
        """At once: nobody listens there, or it says itself that it takes no more requests."""
        self.ready, self._row = False, 0
