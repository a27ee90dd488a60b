"""Try a learner's communicating function on real ranks and keep what it did.

One launch serves all world sizes: each trial runs on a group of the first few ranks. A `Trial` holds what a rank got
back, what became of its input and every message it sent, in order, so that a check can compare bytes, messages and
rounds with a prediction, and not just numbers with numbers. A hang comes back as CheckFailed with the table of who
waits for whom.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from course.kit.exercises import CheckFailed
from course.shared.groups import on_groups
from minillm import measure
from minillm.comm import Group, HangError, Work, launch

PATIENCE_S = 5.0  # of a rank in one operation: longer than any exercise needs on a busy machine
POINT_TO_POINT = {"exchange", "send", "recv"}
Step = tuple[list[tuple[int, int]], list[int]]  # of one call: sends posted (to, bytes), receives awaited (from)


@dataclass(frozen=True)
class CollectiveCall:
    """One call to make: `inputs[r]` is rank r's tensor, as many ranks as inputs."""

    inputs: Sequence[torch.Tensor]
    arguments: tuple[Any, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Trial:
    """What one rank did in one call. after: its input's memory afterwards; returned_input: whether the result is that
    input, or a view of it; calls: operations by name; sent: bytes by group name."""

    result: Any
    after: torch.Tensor
    returned_input: bool
    steps: list[Step]
    calls: Counter[str]
    sent: dict[str, int]

    @property
    def bytes(self) -> int:
        """Bytes this rank sent."""
        return sum(self.sent.values())

    @property
    def messages(self) -> int:
        """Messages this rank sent."""
        return sum(len(sends) for sends, _ in self.steps)


def try_on_ranks(function: Callable[..., Any], cases: Sequence[CollectiveCall]) -> list[list[Trial]]:
    """function(x, group, *arguments) for every case on real ranks; trials by case and rank."""
    by_rank = run(_all_cases, max(case.world_size for case in cases), function, cases)
    return [[by_rank[rank][index] for rank in range(case.world_size)] for index, case in enumerate(cases)]


def run(program: Callable[..., Any], nproc: int, *args: Any, advice: str | None = None) -> list[Any]:
    """`launch`, with a hang told as a failed check. advice: what ends its message, if not a guess from the table."""
    try:
        return launch(program, nproc, *args, timeout=PATIENCE_S, device="cpu")
    except HangError as hang:
        raise CheckFailed(_say_hang(hang.table, advice)) from None


def one_trial(x: torch.Tensor, groups: Sequence[Group], call: Callable[[torch.Tensor], Any]) -> Trial:
    """Run `call(x)` and note every message it sends in one of the groups."""
    steps: list[Step] = []
    memory = x.view_as(x)  # stays where it is if the learner gives x other data
    for group in groups:
        _note_messages(group, steps)
    try:
        with measure.ledger() as led:
            result = call(x)
    finally:
        for group in groups:
            del group.exchange  # the method shows through again
    sent = {group.name: led.bytes(group=group.name) for group in groups}
    returned_input = isinstance(result, torch.Tensor) and result.data_ptr() == memory.data_ptr()
    return Trial(result, memory, returned_input, steps, led.calls, sent)


def refuse_ready_made(trials: Sequence[Sequence[Trial]], needs_messages: bool = True) -> None:
    """CheckFailed if ready-made collectives, rather than messages, did the work."""
    used = Counter[str]()
    for trial in (trial for case in trials for trial in case):
        used += trial.calls
    ready = sorted(set(used) - POINT_TO_POINT)
    if ready == ["barrier"]:
        raise CheckFailed("you called barrier; leave it out: a receive waits for its message, and nothing else has to")
    if ready:
        raise CheckFailed(
            f"you called {', '.join(ready)}, which is what you are to build: use messages between two ranks only "
            "(group.exchange, group.send, group.recv)"
        )
    if needs_messages and not used:
        raise CheckFailed(
            "the ledger saw no message at all: the data must travel by group.exchange, group.send or group.recv"
        )


def rounds(steps_by_rank: Sequence[Sequence[Step]]) -> int:
    """Rounds these messages need if a rank can send one and receive one message per round.

    A message leaves one round after its sender's previous message, and after everything its sender has received.
    """
    size = len(steps_by_rank)
    sent, heard = [0] * size, [0] * size  # round of the last message out of and into each rank
    todo = [deque(steps) for steps in steps_by_rank]
    posted, mail = [False] * size, {}
    moving = True
    while moving:
        moving = False
        for rank in range(size):
            while todo[rank]:
                sends, recvs = todo[rank][0]
                if not posted[rank]:
                    posted[rank], earliest = True, max(sent[rank], heard[rank])
                    for to, _ in sends:
                        sent[rank] = earliest = earliest + 1
                        mail.setdefault((rank, to), deque()).append(earliest)
                if any(len(mail.get((source, rank), ())) < count for source, count in Counter(recvs).items()):
                    break
                for arrival in sorted(mail[source, rank].popleft() for source in recvs):
                    heard[rank] = max(heard[rank] + 1, arrival)
                todo[rank].popleft()
                posted[rank], moving = False, True
    return max(sent + heard)


def _all_cases(group: Group, function: Callable[..., Any], cases: Sequence[CollectiveCall]) -> list[Trial | None]:
    """One rank's trials; None where the case has fewer ranks."""

    def run(case: CollectiveCall, part: Group) -> Trial:
        return one_trial(case.inputs[part.rank].clone(), [part], lambda x: function(x, part, *case.arguments))

    return on_groups(group, cases, run)


def _note_messages(group: Group, steps: list[Step]) -> None:
    post = group.exchange

    def exchange(send: Any = (), recv: Any = (), async_op: bool = False, eager: bool = False) -> Any:
        # Peers are noted as global ranks, so that messages of several groups can be told apart.
        sends = [(group.ranks[to], x.numel() * x.element_size()) for x, to in _listed(send)]
        sources = [group.ranks[source] for _, source in _listed(recv)]
        steps.append((sends, [] if async_op else sources))
        result = post(send, recv, async_op, eager)
        if async_op:
            _note_wait(result, sources, steps)
        return result

    group.exchange = exchange


def _note_wait(work: Work, sources: list[int], steps: list[Step]) -> None:
    """What an asynchronous exchange receives is there once it has been waited for."""

    def wait() -> Any:
        del work.wait  # the method shows through again
        steps.append(([], sources))
        return work.wait()

    work.wait = wait


def _listed(messages: Any) -> list[tuple[torch.Tensor, int]]:
    one = len(messages) == 2 and isinstance(messages[0], torch.Tensor)
    return [messages] if one else list(messages)


def _say_hang(table: str, advice: str | None = None) -> str:
    """The table, and what to make of it."""
    where = re.findall(r"^\d+ +(\w+)", table, re.MULTILINE)
    if "starting" in where:
        return (
            "not every rank has even started, so your code is not to blame yet: this machine is too busy. "
            f"Run this cell again.\n{table}"
        )
    if where and set(where) <= {"in", "finished"}:  # in no operation
        return (
            f"no rank waits for a message, and after {PATIENCE_S:g} s not all are done: a loop that never ends, or a "
            f"machine that is too busy, where running this cell again helps.\n{table}"
        )
    return f"the ranks wait for each other for ever. Who waits for whom:\n{table}\n{advice or _advice(where)}"


def _advice(where: Sequence[str]) -> str:
    """A guess from the operations that the ranks are in."""
    if where and set(where) <= {"send", "recv", "exchange"}:
        stuck = {name for name in where if name != "exchange"}
    else:
        stuck = set(where) & POINT_TO_POINT
    if stuck == {"send"}:
        return (
            "Deadlock: these ranks are all in send, and a send returns only when the other side receives. Post both "
            "at once with group.exchange(send=..., recv=...), or let neighbours take turns."
        )
    if stuck == {"recv"}:
        return "These ranks are all in recv, and nobody sends to them: some rank skips its send."
    return (
        "Go from a rank to one that it waits for, until you reach a rank that waits for nobody, or for a message that "
        "nobody sends."
    )
