"""Pipelined stages: as many steps under way as there are stages, each in another one.

    stage 0   step 1 │ step 2 │ step 3 │ step 4 │ ...        rank 0: launches step 3 once step 1's tokens are there
    stage 1          │ step 1 │ step 2 │ step 3 │ ...        ──▶ tokens of step 1, 2, ... back to rank 0

Each step takes its share of the sequences (`Scheduler.stages`), since a sequence whose token is under way has nothing
to compute. A prompt needs no token of its own: its pieces follow each other through the stages. Answers are those of
the plain engine, token by token. What is different:

- Every stage executes the steps in the order in which they were launched. So blocks that are given away, because a
  request ended, are written by the next one only after the steps under way have read them; a sequence that waits for
  its token is not preempted, since it would come back without it.
- Logits that are not finite are seen when a step is read, so until then no other request takes over the blocks that it
  writes (`BlockPool.withheld`).
"""

from collections import deque

import torch

from minillm.serve.run.async_scheduling import withhold
from minillm.serve.run.core import EngineCore
from minillm.serve.run.step import Step


class Pipelined(EngineCore):
    """launched: steps whose tokens rank 0 has not read, the oldest first."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.launched: deque[Step] = deque()
        self.scheduler.stages = self.runner.stages

    @torch.inference_mode()
    def step(self) -> None:
        """Launches a step, if there is anything to compute, and reads the oldest if no other can be launched."""
        launched, pool = self.launched, self.scheduler.pool
        withhold(pool, launched)
        step = self.plan()
        withhold(pool, [])
        if step is not None:
            step.in_flight += len(launched)
            self.execute(step)
            if step.error:
                self.finish(step)
            else:
                launched.append(step)
        if launched and (step is None or len(launched) == self.runner.stages):
            self._read(launched.popleft())

    def recover(self, error: str) -> None:
        self.launched.clear()  # the runner reads what it has of them before anything later
        super().recover(error)

    def _read(self, step: Step) -> None:
        try:
            self.runner.read(step.outputs)
            self.requests.end_cancelled()
            for row, failure in step.outputs.faults.items():
                self.next_tokens.failed(step.ready[row][0], failure)
        except Exception as failure:
            step.raised(failure)
        self.finish(step)
