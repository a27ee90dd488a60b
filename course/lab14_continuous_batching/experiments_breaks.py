"""Lab 14's broken schedulers: four that are nearly right, and recorded runs of each to be told apart.

All of them are real bugs: phases that are never mixed, a preempted request that loses its place (vLLM#41951), a retry
without end (nano-vllm#274), tokens counted before the prefix hits were known (nano-vllm PR#211).
"""

import random
from typing import Any

from course.lab14_continuous_batching.experiments import Flight, play, requests
from minillm.serve import Plan, Scheduler
from minillm.serve import Sequence as Seq

HEALTHY = "healthy"


class PromptsFirst(Scheduler):
    """A step computes prompts or decodes, never both: while any prompt is left, no sequence decodes, chunks or not."""

    def schedule(self) -> Plan:
        self.step += 1
        plan, budget = Plan(), self.token_budget
        for sequence in [s for s in self.running if s.num_uncomputed > 1]:
            budget -= self._give(sequence, budget, plan)
        while budget and (sequence := self._first_waiting()) and self._admit(sequence):
            plan.admitted.append(sequence)
            budget -= self._give(sequence, budget, plan)
        if plan.batch:
            return plan
        self.step -= 1
        return super().schedule()


class BackOfTheQueue(Scheduler):
    """A preempted request queues up again as if it had just arrived."""

    def _preempt(self, sequence: Seq) -> None:
        arrival = next(self._arrivals)
        sequence.rank = (arrival + self.patience * sequence.priority, arrival, 0)
        super()._preempt(sequence)


class ThrowsAnyoneOut(Scheduler):
    """A request that does not fit preempts a running one, earlier or later, and tries again."""

    def schedule(self) -> Plan:
        thrown = []
        while (waiting := self._first_waiting()) and self.running and self._short(waiting):
            thrown.append(self.running[-1])
            self._preempt(thrown[-1])
        plan = super().schedule()
        plan.preempted += thrown
        return plan

    def _short(self, sequence: Seq) -> bool:
        return self.pool.blocks_for(sequence.num_tokens) > self.pool.available - self.reserve * len(self.running)


class CountsTooEarly(Scheduler):
    """Counts what a returning sequence lacks before it looks up which of its blocks are still cached."""

    def _admit(self, sequence: Seq) -> bool:
        self._num_uncomputed = sequence.num_uncomputed if sequence.preemptions else None
        return super()._admit(sequence)

    def _give(self, sequence: Seq, budget: int, plan: Plan) -> int:
        counted, self._num_uncomputed = getattr(self, "_num_uncomputed", None), None
        if counted is None:
            return super()._give(sequence, budget, plan)
        tokens = min(counted, budget, self.chunk)
        plan.batch.append((sequence, tokens))
        return tokens


FAULTS: dict[str, type[Scheduler]] = {
    HEALTHY: Scheduler,
    "phases never mixed": PromptsFirst,
    "place in the queue lost": BackOfTheQueue,
    "livelock": ThrowsAnyoneOut,
    "tokens that do not exist": CountsTooEarly,
}


def case(fault: str, seed: int, **others: Any) -> Flight:
    """A flight of 8 requests through a scheduler with this fault, on a pool and a trace where it shows.

    make=Scheduler: the same without the fault.
    """
    draw = random.Random(f"{fault} {seed}")
    where = fault if fault != HEALTHY else list(FAULTS)[1 + seed % 4]  # healthy ones fly everywhere
    lengths = [(draw.randint(18, 30), draw.randint(14, 24)) for _ in range(8)]
    options = {"num_blocks": 26, "block_size": 4, "token_budget": 12, "max_num_seqs": 4, "chunk": 8, "reserve": 0}
    every = 0.0
    if where == "phases never mixed":  # prompts come while others decode
        options["num_blocks"], every = 80, 0.012
    if where == "livelock":  # no two fit at once
        lengths = [(draw.randint(29, 34), draw.randint(14, 20)) for _ in range(8)]
        options |= {"num_blocks": 14, "prefix_cache": False}
    if where == "tokens that do not exist":  # a whole return fits one step
        options |= {"token_budget": 64, "chunk": None}
    return play(requests(lengths, every=every), **({"make": FAULTS[fault]} | options | others))
