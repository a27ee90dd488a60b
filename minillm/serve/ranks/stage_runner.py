"""A `RankRunner` of one stage: hidden states come from the stage before it and go on to the next one.

    rank 0      told ──▶ layers 0 .. ──▶ [n, hidden] ┐                              ┌──▶ tokens of the oldest step
    stage 1                 told ──▶ layers ─────────┴──▶ logits, sampling ──▶ reply ┘

Of a stage's ranks each sends to the one with the same part of the next stage: what lies between two layers is whole on
all of them. A send is waited for before the next one, so a stage computes a step while the one before it leaves.
"""

import time
from collections import deque

from torch import Tensor

from minillm.comm.operation import Work
from minillm.model.paged import PagedAttention
from minillm.model.parts import weight_of
from minillm.serve.ranks.reply import Replies
from minillm.serve.ranks.runner import RankRunner
from minillm.serve.run.model_runner import StepOutputs
from minillm.serve.run.step_inputs import StepInputs

EAGER_BYTES = 1 << 20  # hidden states up to this size leave without waiting for their receiver


class StageRunner(RankRunner):
    """model: a `Stage`. Until `lead` or `follow` is called, nothing arrives and nothing is sent."""

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.pipeline = self.model.mesh.pp
        self.pipeline.connect()
        self.stages = self.pipeline.world_size
        source = self.group.world_size - self.sharers.world_size
        self.replies = Replies(self.channel.group, source, self.model.config.vocab_size)
        self._is_linked = False
        self._leaving: Work | None = None
        self._unread: deque[tuple[StepInputs, StepOutputs]] = deque()

    def lead(self) -> None:
        self._is_linked = True
        super().lead()

    def follow(self) -> None:
        self._is_linked = True
        super().follow()
        self._wait_for_send()

    def end(self) -> None:
        if self._leads and self._failure is None:
            self.read_all()
            self._wait_for_send()
        super().end()

    def execute(self, step: StepInputs) -> StepOutputs:
        """On rank 0 the outputs are empty until they are `read`."""
        outputs = super().execute(step)
        if self._is_linked and self.group.rank == 0:
            self._unread.append((step, outputs))
        elif self._is_linked and self.group.rank == self.replies.source:
            self.replies.send(step, outputs)
        return outputs

    def read(self, outputs: StepOutputs) -> None:
        """On rank 0: waits for what the last stage has of a step, and so of all steps before it."""
        while any(each is outputs for _, each in self._unread):
            self._read_oldest()

    def read_all(self) -> None:
        while self._unread:
            self._read_oldest()

    def waited(self) -> list[float]:
        self.read_all()
        return super().waited()

    def _read_oldest(self) -> None:
        self.check()
        step, outputs = self._unread.popleft()
        started = time.monotonic()
        try:
            self.replies.receive(step, outputs, self.cache.pool.device)
        except BaseException as failure:
            self._failure = failure
            raise
        self.waited_s += time.monotonic() - started

    def _compute(self, tokens: Tensor, positions: Tensor, attention: PagedAttention, wanted: Tensor) -> Tensor | None:
        x = tokens if self.model.first else self._arriving(tokens.shape[1])
        y = self.model(x, positions, attention=attention, rows=wanted)
        if self.model.last:
            return y[0]
        self._send_on(y[0])
        return None

    def _arriving(self, tokens: int) -> Tensor:
        """[1, tokens, hidden], from the stage before."""
        x = self.model.nothing(tokens)
        if self._is_linked:
            started = time.monotonic()
            self.pipeline.exchange(recv=(x[0], self.pipeline.rank - 1), eager=x.nbytes <= EAGER_BYTES)
            self.waited_s += time.monotonic() - started
        return x

    def _send_on(self, x: Tensor) -> None:
        """x: [tokens, hidden], to the next stage."""
        self._wait_for_send()
        if self._is_linked:
            to_next = (x.to(weight_of(self.model).dtype).contiguous(), self.pipeline.rank + 1)
            self._leaving = self.pipeline.exchange(send=to_next, eager=x.nbytes <= EAGER_BYTES, async_op=True)

    def _wait_for_send(self) -> None:
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
