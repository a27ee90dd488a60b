"""Asynchronous scheduling: while the device computes step n, the host prepares step n + 1.

llm = LLM(model, async_scheduling=True)

    host     plan and execute n + 1 │ finish n │ plan and execute n + 2 │ finish n + 1 │ ...
    device   ········· pass n, sampling ····│···· pass n + 1, sampling ····│···

The tokens of step n stay on the device, where pass n + 1 takes them from. Until the host has read them a sequence has a
placeholder in their place: ~i, for row i of what was sampled (`step_inputs.fill_placeholders`). Answers are those of
the plain engine, token by token. What is different:

- A stop token is seen one step late; what the step after it computed for its sequence is dropped. A sequence that
  reaches its length is not computed again: that is known without its token. Both keep their seat for that step.
- Logits that are not finite are seen one step late, too. A step is therefore planned without the blocks that the one
  before it writes: no other request takes them over before it is known that they are good.
- Blocks that an answer fills are shared with others once it is known which tokens they hold (`Scheduler.publish`).
- A row that the sampler has to sample anew (`SampledTokens.resampled`) has fed the next pass a wrong token: that place
  is computed again, too, with the same random number.
- The record of a step is written when its tokens are read; what it says of the pool is as of then.
"""

from collections.abc import Iterable

import torch

from minillm.serve.requests.request import Sample
from minillm.serve.run.core import EngineCore
from minillm.serve.run.step import Step
from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.schedule.sequence import State


class AsyncScheduling(EngineCore):
    """A core without speculation, since drafts are made from tokens that the host knows. launched: the step whose
    tokens the host has not read; None = there is none."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.launched: Step | None = None

    @torch.inference_mode()
    def step(self) -> None:
        """Launches a step, if there is anything to compute, and reads the one before it."""
        before, self.launched = self.launched, None  # a step that is interrupted forgets both
        pool = self.scheduler.pool
        withhold(pool, [] if before is None else [before])
        step = self.plan()
        withhold(pool, [])
        if step is not None:
            step.in_flight += before is not None
            self.execute(step)
            if not step.error:
                self._hold(step)
        if before is not None:
            self._read(before, step)
        elif step is None and self.scheduler.handovers is not None:
            self.scheduler.handovers.wait()
        if step is not None and step.error:
            self.finish(step)
        else:
            self.launched = step

    def _hold(self, step: Step) -> None:
        """Its sequences end in placeholders, for tokens whose copy to the host is under way."""
        step.outputs.logits = None  # sampled from already, so the next pass may have their memory
        if step.outputs.sampled is not None:
            step.outputs.sampled.send()
        for row, (sample, _, _, _) in enumerate(step.ready):
            step.held.append((sample, sample.num_tokens))
            if sample.reason is None and sample.num_tokens + 1 < sample.limit:
                sample.tokens.append(~row)
                sample.num_pending += 1

    def _read(self, step: Step, following: Step | None) -> None:
        """Each sample of a step gets its token. following: what was launched with placeholders for them."""
        alive, later = [], []
        for sample, place in step.held:
            if sample.reason is None:
                alive.append((sample, place))
                later.append(sample.tokens[place + 1 :])
                del sample.tokens[place:]
                sample.num_pending = 0
        self.finish(step)
        resampled = () if step.outputs.sampled is None else step.outputs.sampled.resampled
        wrong = {step.ready[row][0] for row in resampled}
        for (sample, place), placeholders in zip(alive, later, strict=True):
            if sample.reason is not None:
                continue
            if sample not in wrong:
                sample.tokens += placeholders
                sample.num_pending = len(placeholders)
            elif following is not None:
                self._take_back(sample, place, following)
            self.scheduler.publish(sample, place)

    def _take_back(self, sample: Sample, place: int, following: Step) -> None:
        """The pass that follows has read a wrong token at `place`: what came of it is no token of the sample."""
        for row, (each, _, _, _) in enumerate(following.ready):
            if each is sample:
                following.dropped.add(row)
                sample.draw.count -= 1
        self.builder.seen.forget(sample)
        following.held = [each for each in following.held if each[0] is not sample]
        if sample.state is State.RUNNING:
            sample.num_computed = min(sample.num_computed, place)


def withhold(pool: BlockPool, steps: Iterable[Step]) -> None:
    """No lookup finds the blocks that the passes of these steps write."""
    for each in pool.kinds:
        each.withheld = frozenset()
    for step in steps:
        for each, tables in zip(pool.kinds, step.tables, strict=True):
            starts = zip(tables, step.starts, strict=True)
            each.withheld |= {block for table, start in starts for block in table[start // pool.block_size :]}
