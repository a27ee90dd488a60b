"""The engine's core: one step of all requests at a time, in three parts.

    plan      what arrived is queued, what was cancelled ends; which tokens of which sequences   (scheduler)
    execute   their inputs as plain arrays, one forward pass, a token for each sample              (runner)
    finish    the host reads the tokens: accepted, does one end its answer?                   (next_tokens)

`AsyncScheduling` calls the same three, in another order. Whoever calls them takes care that it is one thread at a time.
"""

import torch

from minillm.serve.options import EngineOptions
from minillm.serve.requests.recovery import start_anew
from minillm.serve.requests.table import RequestTable
from minillm.serve.run.adapters import hold_adapters
from minillm.serve.run.model_runner import Runner
from minillm.serve.run.recorder import RecordLog, record
from minillm.serve.run.step import InputBuilder, Step
from minillm.serve.sample.next_tokens import NextTokens
from minillm.serve.schedule.blocks import CLOSE, RECEIVE


class EngineCore:
    """records: of the last steps, see `EngineOptions`."""

    def __init__(self, runner: Runner, requests: RequestTable, options: EngineOptions):
        self.runner, self.requests, self.record_blocks = runner, requests, options.record_blocks
        self.scheduler, self.speculation, self.clock = requests.scheduler, requests.speculation, requests.clock
        self.builder = InputBuilder(self.scheduler.pool, *runner.tables.host.shape)
        self.next_tokens = NextTokens(requests)
        self.records = RecordLog(options.keep_records)

    @torch.inference_mode()
    def step(self) -> None:
        """One step, if there is anything to compute."""
        step = self.plan()
        if step is not None:
            self.execute(step)
            self.finish(step)
        elif self.scheduler.handovers is not None:
            self.scheduler.handovers.wait()

    def plan(self) -> Step | None:
        """The next step, after what arrived or was cancelled since the last one; None = there is nothing to compute."""
        started = self.clock()
        self.runner.ready()
        self.requests.tidy(started)
        if self.scheduler.handovers is not None:
            self.scheduler.handovers.poll()
        plan = self.scheduler.schedule()
        if self.requests.adapters is not None:
            hold_adapters(plan, self.requests.adapters, self.scheduler, self.requests.end)
        for sample in plan.admitted:
            if sample.request.scheduled is None:
                sample.request.scheduled = started
        if not plan.batch and any(kind in (RECEIVE, CLOSE) for kind, _, _ in self.scheduler.pool.moves):
            self.runner.execute(self.builder.moves_alone())
        return self.builder.start(self.scheduler.step, started, plan) if plan.batch else None

    def execute(self, step: Step) -> None:
        """Launches the pass and its sampling. What it raises is left in `step.error`, for `finish`."""
        speculation = self.speculation
        try:
            if speculation is not None:
                speculation.draft(step)
            hidden = speculation is not None and speculation.wants_hidden
            inputs = self.builder.build(step, sampled=speculation is None, hidden=hidden)
            try:
                step.outputs = self.runner.execute(inputs)
            except Exception:
                self.scheduler.pool.moves[:0] = map(tuple, inputs.moves[self.runner.moved :].tolist())
                raise
            self.requests.end_cancelled()  # what was cancelled during the pass gets no token
            step.stage = "sampling"
            self.next_tokens.advance(step)
        except Exception as failure:
            step.raised(failure)

    def finish(self, step: Step) -> None:
        """Every sequence of the step gets its tokens. If the step raised, its requests end as failed."""
        sampled = 0
        if not step.error:
            try:
                sampled = self.next_tokens.finish(step)
            except Exception as failure:
                step.raised(failure)
        if step.error:
            self.requests.end_cancelled()
            self._fail(step)
        error = step.error
        if self.speculation is not None:
            self.speculation.observe(step)
            error = error or self.speculation.take_error()
        facts = {"seconds": self.clock() - step.started, "sampled": sampled, "error": error or None}
        ended = tuple(self.requests.ended_ids)
        self.records.append(record(self.scheduler, step, blocks=self.record_blocks, ended=ended, **facts))
        self.requests.ended_ids.clear()

    def recover(self, error: str) -> None:
        """After a step that was interrupted anywhere: requests that had begun have failed, the others are queued."""
        self.builder.reset()
        start_anew(self.requests, error)
        if self.scheduler.handovers is not None:
            self.scheduler.handovers.reset()

    def _fail(self, step: Step) -> None:
        """Nothing that the step wrote is ever hit; the other requests and the pool stay whole."""
        for place in range(len(step.plan.batch)):
            step.invalidate(self.scheduler.pool, place)
        self.builder.reset()
        for sample, _ in step.plan.batch:
            if sample.reason is None:
                self.requests.end(sample.request, "failed", f"{step.stage} raised {step.error}")
