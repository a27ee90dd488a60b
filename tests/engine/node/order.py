"""Whether the ranks' launches can run if each GPU works them off one after the other, in the order of launch.

NCCL promises nothing more: kernels of two communicators may or may not run side by side. So ranks that share two
communicators have to use both in one order. `stuck` replays what the ranks have launched, a rank's entries strictly in
sequence; a collective runs when all its ranks have come to it, a batch of messages when each has met its counterpart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Entry:
    """One launch. members: global ranks. sends, recvs: peers of a batch of messages, global ranks; else it is a
    collective. at: the line."""

    communicator: str
    members: tuple[int, ...]
    text: str
    at: str
    sends: list[int] = field(default_factory=list)
    recvs: list[int] = field(default_factory=list)

    @property
    def is_collective(self) -> bool:
        return not (self.sends or self.recvs)


def stuck(launched: Mapping[int, Sequence[Entry]]) -> str:
    """launched: global rank -> its entries. Returns where the replay stops, a line for each rank; "" if it ends."""
    rest = {rank: [_copy(each) for each in reversed(entries)] for rank, entries in launched.items()}
    while any(rest.values()):
        front = {rank: entries[-1] for rank, entries in rest.items() if entries}
        done = [rank for rank, entry in front.items() if _is_met(entry, front)]
        _exchange(front)
        done += [rank for rank, entry in front.items() if entry.text == "" and rank not in done]
        if not done:
            lines = [f"  rank {rank} comes to {e.text} on {e.communicator} ({e.at})" for rank, e in front.items()]
            ended = [f"  rank {rank} has launched all of its own" for rank, entries in rest.items() if not entries]
            return "communicators are used in another order on different ranks:\n" + "\n".join(lines + ended)
        for rank in done:
            rest[rank].pop()
    return ""


def _copy(entry: Entry) -> Entry:
    return Entry(entry.communicator, entry.members, entry.text, entry.at, list(entry.sends), list(entry.recvs))


def _is_met(entry: Entry, front: Mapping[int, Entry]) -> bool:
    """A collective that all its ranks have come to."""
    others = [front.get(member) for member in entry.members]
    return entry.is_collective and all(
        each is not None and each.communicator == entry.communicator and each.is_collective for each in others
    )


def _exchange(front: Mapping[int, Entry]) -> None:
    """Messages whose two sides are both in front are delivered; a batch without any left loses its text."""
    for rank, entry in front.items():
        for peer in list(entry.sends):
            other = front.get(peer)
            if other is not None and other.communicator == entry.communicator and rank in other.recvs:
                entry.sends.remove(peer)
                other.recvs.remove(rank)
                for each in (entry, other):
                    each.text = each.text if each.sends or each.recvs else ""
