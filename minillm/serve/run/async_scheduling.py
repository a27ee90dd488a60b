"""Asynchronous scheduling: while the device computes step n, the host prepares step n + 1.

llm = LLM(model, async_scheduling=True)

    host     schedule n + 1, inputs, launch │ read n, accept, stream │ schedule n + 2, ...
    device   ········· pass n, sampling ····│···· pass n + 1, sampling ····│···

The tokens of step n stay on the device, where pass n + 1 takes them from. Until the host has read them a sequence has a
placeholder in their place: ~i, for row i of what was sampled (`model_runner.resolved`). Answers are those of the plain
engine, token by token. What is different:

- A sequence that says its stop is found out one step late, and what the next step computed for it is dropped. One that
  reaches its length is not computed again: that is known without its token. Both keep their seat for that step.
- So are logits that are not finite. A step is therefore planned without the blocks that the one before it writes: no
  other request takes them over before it is known that they are good.
- Blocks that an answer fills are shared with others once it is known which tokens they hold (`Scheduler.publish`).
- A row that the sampler has to do again (`SampledTokens.redone`) has fed the next pass a wrong token: that place is
  computed again, too, with the same random number.
- The record of a step is written when its tokens are read; what it says of the pool is as of then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from minillm.model import Transformer
from minillm.serve.requests.table import RequestTable
from minillm.serve.run.model_runner import ForwardPass, InputBuffers
from minillm.serve.sample.batch import SampledTokens
from minillm.serve.sample.next_tokens import NextTokens, Ready
from minillm.serve.schedule.scheduler import Scheduler
from minillm.serve.schedule.sequence import Plan, Sequence, State


class Engine(Protocol):
    """What of `engine.LLM` is used here."""

    model: Transformer
    clock: Callable[[], float]
    scheduler: Scheduler
    buffers: InputBuffers
    _unfinished: RequestTable
    _next_tokens: NextTokens

    def _plan(self, started: float) -> Plan: ...

    def _record(
        self, plan: Plan, run: ForwardPass, started: float, sampled: int, error: str | None, number: int
    ) -> None: ...

    def _failed(self, plan: Plan, run: ForwardPass, error: str) -> None: ...


@dataclass(eq=False)
class Launched:
    """A step whose tokens the host has not read. places: where among its sequence's tokens each one belongs."""

    number: int
    started: float
    plan: Plan
    run: ForwardPass
    ready: list[Ready] = field(default_factory=list)
    tokens: SampledTokens | None = None
    places: list[int] = field(default_factory=list)
    error: str | None = None
    raised_in: str = "the forward pass"

    def written(self, block_size: int) -> frozenset[int]:
        """The blocks that its pass writes."""
        starts = zip(self.run.tables, self.run.starts, strict=True)
        return frozenset(block for table, start in starts for block in table[start // block_size :])


class AsyncScheduling:
    """The steps of an engine without speculation: drafts are made from tokens that the host knows."""

    def __init__(self, llm: Engine):
        self.llm = llm
        self._launched: Launched | None = None

    @torch.inference_mode()
    def compute(self) -> None:
        """Launches a step, if there is anything to compute, and reads the one before it."""
        llm, before, self._launched = self.llm, self._launched, None  # a step that is interrupted forgets both
        started, pool = llm.clock(), llm.scheduler.pool
        pool.withheld = frozenset() if before is None else before.written(pool.block_size)
        plan = llm._plan(started)
        pool.withheld = frozenset()
        step = self._launch(plan, started) if plan.batch else None
        llm._unfinished.end_cancelled()
        if before is not None:
            self._read(before, step)
        if step is not None and step.error is not None:
            self._fail(step)
        else:
            self._launched = step

    def _launch(self, plan: Plan, started: float) -> Launched:
        """The pass and its sampling are under way, and its sequences end in placeholders."""
        llm = self.llm
        step = Launched(llm.scheduler.step, started, plan, ForwardPass(plan, llm.buffers))
        try:
            logits = step.run.logits(llm.model)
            step.raised_in = "sampling"
            ready, tokens = llm._next_tokens.sample(plan, step.run, logits)
        except Exception as failure:
            step.error, llm.buffers.sampled = f"{type(failure).__name__}: {failure}", None
            return step
        llm.buffers.sampled = tokens.ids if ready else None
        if tokens is None:
            return step
        tokens.send()
        step.ready, step.tokens = ready, tokens
        for row, (sequence, taken, _, _) in enumerate(ready):
            step.places.append(sequence.num_tokens)
            if taken is not None and sequence.num_tokens + 1 < sequence.limit:
                sequence.tokens.append(~row)
                sequence.num_pending += 1
        return step

    def _read(self, step: Launched, following: Launched | None) -> None:
        """Each sequence of a step gets its token. following: what was launched with placeholders for them."""
        try:
            sampled = 0 if step.tokens is None else self._give(step, following)
        except Exception as failure:
            step.error, step.raised_in = f"{type(failure).__name__}: {failure}", "sampling"
            return self._fail(step)
        self.llm._record(step.plan, step.run, step.started, sampled, None, step.number)

    def _give(self, step: Launched, following: Launched | None) -> int:
        tokens = step.tokens.read()
        wrong = {step.ready[row][0] for row in step.tokens.redone}
        alive, ahead = [], []
        for (sequence, taken, _, _), place in zip(step.ready, step.places, strict=True):
            if taken is not None and taken.answer.reason is None:
                alive.append((sequence, taken, place))
                ahead.append([] if sequence in wrong else sequence.tokens[place + 1 :])
                del sequence.tokens[place:]
                sequence.num_pending = 0
        given = [token and [token] for token in tokens]
        sampled = self.llm._next_tokens.give(step.ready, given, step.run)
        for (sequence, taken, place), placeholders in zip(alive, ahead, strict=True):
            if taken.answer.reason is None:
                sequence.tokens += placeholders
                sequence.num_pending = len(placeholders)
                if sequence in wrong and following is not None:
                    self._take_back(sequence, place, following)
                self.llm.scheduler.publish(sequence, place)
        return sampled

    def _take_back(self, sequence: Sequence, place: int, following: Launched) -> None:
        """The pass that follows has read a wrong token at `place`: what came of it is no token of the sequence."""
        for row, (each, taken, start, end) in enumerate(following.ready):
            if each is sequence and taken is not None:
                following.ready[row] = sequence, None, start, end
                taken.draw.count -= 1
        if sequence.state is State.RUNNING:
            sequence.num_computed = min(sequence.num_computed, place)

    def _fail(self, step: Launched) -> None:
        self.llm._failed(step.plan, step.run, f"{step.raised_in} raised {step.error}")
        self.llm._record(step.plan, step.run, step.started, 0, step.error, step.number)
