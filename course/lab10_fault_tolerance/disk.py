"""A disk that may forget what was not flushed, and ranks that can be killed between any two operations on it.

    names      draft-2/0 ──▶ file        write, rename and remove change what is seen at once,
    files      file ──▶ bytes            flush makes it last

A power cut keeps what was flushed. Of the rest a real disk may keep anything, so three cases are tried: all of it, the
names without the contents, and nothing. A file whose new content was not flushed comes back cut in half, or as it was.
A new name is an entry of the folder that it stands in: flushing what has been renamed does not make it last.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

CUTS = ("everything", "the names only", "nothing")  # what a power cut leaves of what is not flushed
MOST_OPERATIONS = 400  # of one save: more is a loop that waits for a rank that is dead


@dataclass
class File:
    content: bytes
    flushed: bytes | None = None

    def after_a_cut(self, kept: str) -> "File":
        content = self.content
        if kept == CUTS[2] and self.flushed is not None:
            content = self.flushed
        elif kept != CUTS[0] and self.flushed != self.content:
            content = self.content[: len(self.content) // 2]
        return File(content, content)


@dataclass
class Disk:
    """Paths are texts such as "step-2/0"; folders come and go with the files in them. "." is the folder of all.

    renamed: {new name: old name}; until the folder above is flushed, a power cut restores the old name.
    """

    names: dict[str, File] = field(default_factory=dict)
    flushed_names: dict[str, File] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def write(self, path: str, data: bytes) -> None:
        """Makes a file, or replaces what is in it."""
        if not isinstance(data, bytes | bytearray):
            raise TypeError(f"write takes bytes, and this is {type(data).__name__}")
        if any(name.startswith(f"{path}/") for name in self.names):
            raise IsADirectoryError(f"{path} is a folder")
        self.names.setdefault(path, File(b"")).content = bytes(data)

    def flush(self, path: str = ".") -> None:
        """Of a file: its content and name will survive. Of a folder: the names in it will, renamed ones too."""
        if path in self.names:
            file = self.names[path]
            file.flushed, self.flushed_names[self._lasting(path)] = file.content, file
            return
        if path != "." and not any(_within(path, name) for name in self.names):
            raise FileNotFoundError(f"there is no {path} to flush")
        self.renamed = {new: old for new, old in self.renamed.items() if not _within(path, new)}
        lasting = self._lasting(path)
        kept = {name: file for name, file in self.flushed_names.items() if not _within(lasting, name)}
        inside = {self._lasting(name): file for name, file in self.names.items() if _within(path, name)}
        self.flushed_names = kept | inside

    def rename(self, old: str, new: str) -> None:
        """Of a file or a whole folder, at once. A file may replace a file; a folder that is there is in the way."""
        moved = {name: new + name[len(old) :] for name in self.names if name == old or name.startswith(f"{old}/")}
        if not moved:
            raise FileNotFoundError(f"there is no {old} to rename")
        if any(name.startswith(f"{new}/") for name in self.names):
            raise FileExistsError(f"there is a folder {new} already")
        for name, target in moved.items():
            self.names[target] = self.names.pop(name)
        self.renamed[new] = self.renamed.pop(old, old)

    def remove(self, path: str) -> None:
        """A file, or a folder with all that is in it."""
        gone = [name for name in self.names if name == path or name.startswith(f"{path}/")]
        if not gone:
            raise FileNotFoundError(f"there is no {path} to remove")
        for name in gone:
            del self.names[name]
        self.renamed = {new: old for new, old in self.renamed.items() if new != path and not _within(path, new)}

    def read(self, path: str) -> bytes:
        if path not in self.names:
            raise FileNotFoundError(f"there is no file {path}")
        return self.names[path].content

    def exists(self, path: str) -> bool:
        return any(name == path or name.startswith(f"{path}/") for name in self.names)

    def list(self, folder: str = ".") -> list[str]:
        """Names of files and folders in a folder, in order; empty where there is none."""
        depth = 0 if folder == "." else len(PurePosixPath(folder).parts)
        parts = [PurePosixPath(name).parts for name in self.names if depth == 0 or name.startswith(f"{folder}/")]
        return sorted({each[depth] for each in parts})

    def copy(self) -> "Disk":
        twins = {
            id(file): File(file.content, file.flushed) for file in [*self.names.values(), *self.flushed_names.values()]
        }
        names, flushed = ({n: twins[id(f)] for n, f in each.items()} for each in (self.names, self.flushed_names))
        return Disk(names, flushed, dict(self.renamed))

    def after_a_cut(self, kept: str) -> "Disk":
        """What is there when the power is back; kept: one of `CUTS`."""
        names = self.flushed_names if kept == CUTS[2] else self.names
        files = {name: file.after_a_cut(kept) for name, file in names.items()}
        return Disk(files, dict(files))

    def _lasting(self, path: str) -> str:
        """The name that a power cut leaves to what has this name now."""
        for new, old in self.renamed.items():
            if path == new or _within(new, path):
                return old + path[len(new) :]
        return path


def _within(folder: str, path: str) -> bool:
    return folder == "." or path.startswith(f"{folder}/")


class Killed(BaseException):
    """Ends a rank's thread: no `except Exception` of its program stops it."""


@dataclass(frozen=True)
class Member:
    """What a program is told about its group: rank, world_size and barrier()."""

    rank: int
    world_size: int
    barrier: Callable[[], None]


@dataclass(frozen=True)
class Played:
    """returned: ranks whose program came to its end; operations: (rank, name and arguments), in order."""

    returned: frozenset[int]
    operations: tuple[tuple[int, str], ...]

    def by(self, rank: int) -> int:
        """Operations of one rank."""
        return sum(each == rank for each, _ in self.operations)


class InterleavedRanks:
    """Ranks as threads of which one moves at a time: the first in `order` that can, by one operation on the disk.

    stop_after: operations until all are killed. victim, victim_after: a rank, and operations of its own until it is
    killed; those that wait for it in a barrier are killed when nobody else can move. patience: how many questions
    a rank may ask in a row before it lets the others go first.
    """

    def __init__(
        self,
        disk: Disk,
        order: Sequence[int],
        stop_after: int | None = None,
        victim: int | None = None,
        victim_after: int = 0,
        patience: int = 1,
    ) -> None:
        self.disk, self.order, self.stop_after = disk, list(order), stop_after
        self.victim, self.victim_after = victim, victim_after
        self.patience, self.asked = patience, dict.fromkeys(order, 0)  # questions since it last changed something
        self.changed = threading.Condition()
        self.state = dict.fromkeys(order, "running")  # running, asking, at the barrier, returned, dead
        self.may_move: int | None = None
        self.operations: list[tuple[int, str]] = []
        self.error: BaseException | None = None

    def play(self, program: Callable[[Member, "Handle"], None]) -> Played:
        threads = [threading.Thread(target=self._rank, args=(rank, program), daemon=True) for rank in self.state]
        for thread in threads:
            thread.start()
        while self._next():
            pass
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        returned = frozenset(rank for rank, state in self.state.items() if state == "returned")
        return Played(returned, tuple(self.operations))

    def _rank(self, rank: int, program: Callable) -> None:
        member = Member(rank, len(self.state), lambda: self._wait(rank, "at the barrier"))
        try:
            program(member, Handle(self, rank))
            self._become(rank, "returned")
        except Killed:
            self._become(rank, "dead")
        except BaseException as error:
            self.error = self.error or error
            self._become(rank, "dead")

    def _become(self, rank: int, state: str) -> None:
        with self.changed:
            self.state[rank] = state
            self.changed.notify_all()

    def _wait(self, rank: int, state: str) -> None:
        """Until it is this rank's turn. Killed if there will be none."""
        with self.changed:
            if self.state[rank] == "dead":
                raise Killed
            self.state[rank] = state
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.state[rank] in ("running", "dead"))
            if self.state[rank] == "dead":
                raise Killed

    def operate(self, rank: int, name: str, *arguments: object) -> object:
        self._wait(rank, "asking")
        self.operations.append((rank, f"{name} {arguments[0] if arguments else '.'}"))
        self.asked[rank] = self.asked[rank] + 1 if name in ("read", "list", "exists") else 0
        if self.asked[rank] >= self.patience:
            self.order.sort(key=lambda each: each == rank)  # whoever polls lets the others go first
        return getattr(self.disk, name)(*arguments)

    def _next(self) -> bool:
        """Lets a rank move once all stand still. False when all have ended."""
        with self.changed:
            self.changed.wait_for(lambda: "running" not in self.state.values())
            asking = [rank for rank in self.order if self.state[rank] == "asking"]
            waiting = [rank for rank in self.order if self.state[rank] == "at the barrier"]
            done = len(self.operations)
            own = sum(rank == self.victim for rank, _ in self.operations)
            if self.victim in asking and own >= self.victim_after:
                self.state[self.victim] = "dead"
            elif self.error or done == self.stop_after or done >= MOST_OPERATIONS:
                self.state |= dict.fromkeys([*asking, *waiting], "dead")
            elif asking:
                self.state[asking[0]] = "running"
            elif len(waiting) == len(self.state):
                self.state |= dict.fromkeys(waiting, "running")
            elif waiting:  # for a rank that never comes
                self.state |= dict.fromkeys(waiting, "dead")
            self.changed.notify_all()
            return any(state not in ("returned", "dead") for state in self.state.values())


class Handle:
    """The disk as one rank sees it: every operation waits for its turn."""

    def __init__(self, ranks: InterleavedRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("_") or not hasattr(Disk, name) or name in ("copy", "after_a_cut"):
            raise AttributeError(f"a disk has write, flush, rename, remove, read, exists and list, but no {name}")
        return lambda *arguments: self._ranks.operate(self._rank, name, *arguments)
