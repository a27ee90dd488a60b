"""What can go wrong between ranks, each as one sentence that names the rank."""


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
    """Ranks entered the same operation with different shapes, dtypes or even different operations."""


class PeerLostError(RuntimeError):
    """The other side of a message went away: the echo of a failure somewhere else, not its cause."""


class WaitedTooLongError(RuntimeError):
    """A message or a rank did not come in time. `Operation` adds the hang report and makes it a HangError."""
