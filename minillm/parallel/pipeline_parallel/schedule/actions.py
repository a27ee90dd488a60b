"""What a pipeline schedule is: for every rank, the order of what it does. No tensors, no ranks, no time.

    rank 0   F0 F1 F2 F3 B0 B1 B2 B3        F  forward of one microbatch through one chunk
    rank 1   F0 F1 F2 F3 B0 B1 B2 B3        B  its whole backward, or in two halves:
                                            I  gradient of the input, which the rank before waits for
    the route of each microbatch:           W  gradient of the weights, which nobody waits for
    (rank 0, chunk 0) -> (rank 1, chunk 0)  U  update of the weights (asynchronous pipelines only)

The model is cut into parts; a *place* (rank, chunk) holds one part. A microbatch visits the places of its *route*
forward and comes back the same way. Orders and routes say everything: what each action needs, and, where that was
made on another rank, which message has to travel. `orders.py` has the orders themselves; the package's docstring
says which file answers which question about them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "U"]
NAME = re.compile(r"([FBIWU])(\d+)(?:\.(\d+))?")
MAKES = {"F": "F", "B": "IW", "I": "I", "W": "W", "U": "U"}  # a whole backward makes what its halves make


class ScheduleError(ValueError):
    """A schedule that no pipeline can run; the message names the dependency that is broken."""


@dataclass(frozen=True)
class Action:
    """One computation of one rank: `kind` for `microbatch` through the part of the model held as `chunk`."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.kind not in MAKES:
            raise ValueError(f"an action is one of {', '.join(MAKES)}, not {self.kind!r}")

    def __str__(self) -> str:
        """F3: microbatch 3 through chunk 0; F3.1: through chunk 1."""
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of `str`."""
        if not (match := NAME.fullmatch(text)):
            raise ValueError(f"{text!r} is not an action: write F3, or F3.1 for chunk 1")
        kind, microbatch, chunk = match.groups(default="0")
        return Action(kind, int(microbatch), int(chunk))


class Place(NamedTuple):
    """Where a part of the model is held."""

    rank: int
    chunk: int


Route = tuple[Place, ...]


class Task(NamedTuple):
    """An action and the rank that does it."""

    rank: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank}"


class Edge(NamedTuple):
    """`target` needs what `source` makes. Between two ranks this is a message; in a rank's order it stands for the
    send on the source's rank and for the receive on the target's rank."""

    source: Task
    target: Task

    @property
    def ranks(self) -> tuple[int, int]:
        """The sending rank and the receiving rank."""
        return self.source.rank, self.target.rank

    @property
    def crosses(self) -> bool:
        return self.source.rank != self.target.rank

    @property
    def is_gradient(self) -> bool:
        """Whether it brings the gradient of an activation, on the way back, and not the activation."""
        return self.target.action.kind != "F"

    def partner(self, rank: int) -> int:
        """The other of the two ranks."""
        return self.target.rank if self.source.rank == rank else self.source.rank

    def __str__(self) -> str:
        return f"{self.source.action} from rank {self.source.rank} to rank {self.target.rank}"


Step = Action | Edge


@dataclass(frozen=True)
class Schedule:
    """orders[rank]: what the rank does, in order; routes[microbatch]: the places it visits, in forward order."""

    name: str
    orders: tuple[tuple[Step, ...], ...]
    routes: tuple[Route, ...]

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def microbatches(self) -> int:
        return len(self.routes)

    @property
    def num_parts(self) -> int:
        """How many parts the model is cut into: ranks * chunks, except where two ranks hold the same part."""
        return len(self.routes[0])

    @cached_property
    def part_of(self) -> dict[Place, int]:
        """Which part of the model each place holds, counted from the input; every rank's chunks are among the keys."""
        return {place: part for route in set(self.routes) for part, place in enumerate(route)}

    @property
    def has_messages(self) -> bool:
        """Whether the orders say when messages are sent and received, or leave that to `with_messages`."""
        return any(isinstance(step, Edge) for order in self.orders for step in order)

    def actions(self, rank: int) -> list[Action]:
        """The rank's order without its messages."""
        return [step for step in self.orders[rank] if isinstance(step, Action)]

    @cached_property
    def tasks(self) -> list[Task]:
        return [Task(rank, action) for rank in range(self.ranks) for action in self.actions(rank)]

    @cached_property
    def _maker(self) -> dict[tuple[str, int, Place], Task]:
        return {
            (product, action.microbatch, Place(rank, action.chunk)): Task(rank, action)
            for rank, action in self.tasks
            for product in MAKES[action.kind]
        }

    def needs(self, task: Task) -> list[Edge]:
        """What must be finished before `task` can start. ScheduleError if nobody makes it."""
        rank, (kind, microbatch, chunk) = task.rank, (task.action.kind, task.action.microbatch, task.action.chunk)
        route = self.routes[microbatch] if microbatch < self.microbatches else ()
        if Place(rank, chunk) not in route:
            raise ScheduleError(f"{task} is not on the route of microbatch {microbatch}")
        at = route.index(Place(rank, chunk))
        backward = [("F", at), ("I", at + 1)]
        wanted = {"F": [("F", at - 1)], "B": backward, "I": backward, "W": [("I", at)], "U": [("W", at)]}[kind]
        edges = []
        for product, position in wanted:
            if 0 <= position < len(route):
                place = route[position]
                if (source := self._maker.get((product, microbatch, place))) is None:
                    missing = Action(product, microbatch, place.chunk)
                    raise ScheduleError(f"{task} needs {missing} on rank {place.rank}, which is in no order")
                edges.append(Edge(source, task))
        return edges

    @cached_property
    def edges(self) -> dict[Task, list[Edge]]:
        """`needs` of every task."""
        return {task: self.needs(task) for task in self.tasks}

    @cached_property
    def messages(self) -> list[Edge]:
        """Every dependency that crosses ranks: what has to be sent, whether or not the orders say so yet."""
        return [edge for edges in self.edges.values() for edge in edges if edge.crosses]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, self.actions(rank)))}" for rank in range(self.ranks))


def straight(stages: int, chunks: int = 1) -> Route:
    """A route through all ranks, then again for the next chunk: part = chunk * stages + rank."""
    return tuple(Place(rank, chunk) for chunk in range(chunks) for rank in range(stages))


def there_and_back(stages: int) -> Route:
    """A route through all ranks with chunk 0 and back with chunk 1, so the first rank holds both ends of the model."""
    return tuple(Place(rank, 0) for rank in range(stages)) + tuple(Place(rank, 1) for rank in reversed(range(stages)))


def stuck(waits_for: dict[int, Edge]) -> ScheduleError:
    """A sentence that says why no rank can go on: an action stands before what it needs, or ranks wait in a circle."""
    rank, circle = min(waits_for), []
    while rank not in [edge.target.rank for edge in circle]:
        circle.append(edge := waits_for[rank])
        if not edge.crosses:
            return ScheduleError(f"rank {rank} does {edge.target.action} before {edge.source.action}, which it needs")
        rank = edge.source.rank
    circle = circle[[edge.target.rank for edge in circle].index(rank) :]
    waits = [f"rank {edge.target.rank} cannot do {edge.target.action} before {edge.source}" for edge in circle]
    return ScheduleError("the ranks wait for each other: " + ", ".join(waits))
