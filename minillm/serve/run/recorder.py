"""The flight recorder: what each step computed, who came and went, and where the blocks were.

`[dataclasses.asdict(record) for record in llm.records]` is JSON.
"""

from collections import deque
from dataclasses import dataclass

from minillm.serve.run.step import Step
from minillm.serve.schedule.scheduler import Scheduler

MOST_ENTRIES = 640_000  # of sequences in steps: some 50 MB, however many sequences a step has


@dataclass(frozen=True)
class StepRecord:
    """One step. started: on the engine's clock; seconds: scheduling, forward pass and sampling.

    batch: (sequence, first position, tokens) of each; a sequence's name is "request id/sample". sampled: new tokens.
    ended: request ids. waiting includes those preempted. tables: sequence -> blocks, and references: holders of each
    block, only if the engine was asked for them. in_flight: steps under way when this one was launched, and itself.
    windowed: blocks used by layers with a sliding window, if they have a pool of their own (`BlockPool.windowed`).
    """

    step: int
    started: float
    seconds: float
    batch: tuple[tuple[str, int, int], ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    ended: tuple[str, ...]
    sampled: int
    running: int
    waiting: int
    free: int
    cached: int
    used: int
    error: str | None = None
    tables: dict[str, list[int]] | None = None
    references: list[int] | None = None
    in_flight: int = 1
    windowed: int | None = None

    @property
    def tokens(self) -> int:
        return sum(entry[2] for entry in self.batch)


class RecordLog(deque[StepRecord]):
    """The last `steps` records, or fewer that have MOST_ENTRIES entries together. They come by `append` alone."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps, self.entries = steps, 0

    def append(self, new: StepRecord) -> None:
        super().append(new)
        self.entries += len(new.batch)
        while len(self) > self.steps or (self.entries > MOST_ENTRIES and len(self) > 1):
            self.entries -= len(self.popleft().batch)

    def clear(self) -> None:
        super().clear()
        self.entries = 0


def record(scheduler: Scheduler, step: Step, *, blocks: bool, **facts) -> StepRecord:
    """The record of a step that is over. facts: the fields that neither of them knows. blocks: with every table."""
    pool, running, plan = scheduler.pool, scheduler.running, step.plan
    return StepRecord(
        step=step.number,
        started=step.started,
        batch=tuple([(s.name, start, tokens) for (s, tokens), start in zip(plan.batch, step.starts, strict=True)]),
        admitted=tuple(sequence.name for sequence in plan.admitted),
        preempted=tuple(sequence.name for sequence in plan.preempted),
        running=len(running),
        waiting=scheduler.num_waiting,
        free=pool.free,
        cached=pool.cached,
        used=pool.used,
        tables={sequence.name: sequence.held_blocks for sequence in running} if blocks else None,
        references=list(pool.references) if blocks else None,
        in_flight=step.in_flight,
        windowed=None if pool.windowed is None else pool.windowed.used,
        **facts,
    )
