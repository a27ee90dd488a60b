"""Errors between ranks. The message of each is one sentence that names the rank."""


class RankError(RuntimeError):
    """A rank raised or died. The text holds that rank's own traceback; `exitcode` is None if it raised."""

    def __init__(self, message: str, rank: int, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.exitcode = rank, exitcode

    def __reduce__(self):
        return RankError, (str(self), self.rank, self.exitcode)


class HangError(RuntimeError):
    """Ranks waited longer than the timeout. The text holds the hang report (who waits for whom), `table` that alone."""

    def __init__(self, message: str, table: str = "") -> None:
        super().__init__(message)
        self.table = table

    def __reduce__(self):
        return HangError, (str(self), self.table)


class MismatchError(ValueError):
    """Ranks called different operations at the same point, or the same one with different shapes or dtypes."""


class PeerLostError(RuntimeError):
    """The other side of a message has gone: the consequence of a failure on another rank, not its cause."""


class WaitedTooLongError(RuntimeError):
    """A message or a rank did not arrive in time. `Operation` adds the hang report and raises it as a HangError."""


def lost_partner(rank: int, group: str, error: BaseException) -> PeerLostError:
    """What `rank` says when a message in `group` has ended with `error`."""
    reason = (str(error).strip().splitlines() or ["it has gone"])[-1]
    return PeerLostError(f"rank {rank} lost its partner in group {group!r}: {reason}")
