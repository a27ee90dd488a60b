"""The requests that have not ended: how one arrives, and the one place where it ends, whatever the reason.

    add ──▶ unfinished ──▶ finish, sample by sample ──▶ close ──▶ ended: for `step` to return, or for who awaits it
              end: cancelled, timed out, failed ──────────▲

Not locked: the engine takes its lock around every call.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from minillm.data import Tokenizer
from minillm.model import ModelConfig
from minillm.serve.blocks import root
from minillm.serve.request import Output, Request, Sample, prompt_ids
from minillm.serve.sampling import SamplingParams, whole
from minillm.serve.scheduler import Scheduler
from minillm.serve.sequence import Sequence

if TYPE_CHECKING:
    from minillm.serve.speculate.speculation import Speculation


class Unfinished:
    """samples: the sample of each sequence the scheduler has. ended: outputs that `step` has not returned yet.
    ended_ids: requests that ended since it was last cleared."""

    def __init__(
        self,
        scheduler: Scheduler,
        speculation: "Speculation | None",
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float],
    ):
        self.scheduler, self.speculation, self.config = scheduler, speculation, config
        self.tokenizer, self.clock = tokenizer, clock
        self.samples: dict[Sequence, Sample] = {}
        self.ended: list[Output] = []
        self.ended_ids: list[str] = []
        self._requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str | None = None,
        timeout_s: float | None = None,
        awaited: bool = False,
    ) -> Request:
        """Queues a request; see `LLM.add`. awaited: by a `generate` or `stream`, so `step` does not return it."""
        params = params or SamplingParams()
        tokens = prompt_ids(prompt, params, self.tokenizer, self.config)
        limit = min(len(tokens) + params.max_tokens, self.config.max_seq_len)
        if whole(priority) is None:
            raise ValueError(f"priority {priority!r} must be a whole number; lower is sooner.")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s {timeout_s} must be above 0, or None.")
        taken = self._requests.keys() | {output.request_id for output in self.ended}
        while request_id is None:
            name, self._count = f"request-{self._count}", self._count + 1
            request_id = None if name in taken else name
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is taken by a request that has not ended: choose another.")
        sequence = Sequence(list(tokens), limit, params.n, whole(priority), root(None, salt))
        self.scheduler.add(sequence)
        request = Request.arrived(request_id, tokens, params, self.tokenizer, self.clock())
        request.awaited = awaited
        self._requests[request_id] = request
        self.attach(request, sequence)
        if timeout_s is not None:
            heappush(self._deadlines, (request.output.timing.arrived + timeout_s, sequence.rank[1], request))
        return request

    def attach(self, request: Request, sequence: Sequence) -> Sample:
        """One more sample of the request."""
        taken = self.samples[sequence] = request.attach(sequence, self.tokenizer)
        return taken

    def cancel(self, request_id: str) -> None:
        if request_id not in self._requests:
            raise ValueError(f"request {request_id!r} cannot be cancelled: it is unknown or has ended.")
        self.end(self._requests[request_id], "cancelled")

    def expire(self, now: float) -> None:
        """Ends the requests whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self.end(heappop(self._deadlines)[-1], "timeout")

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends all samples of a request that have not ended."""
        if request.output.timing.ended is not None:
            return
        request.output.error = error
        for taken in request.samples:
            if taken.answer.reason is None:
                self.finish(taken, reason)
        self._close(request)

    def finish(self, taken: Sample, reason: str) -> None:
        """Ends one sample; `close_if_done` ends its request after the last."""
        taken.close(reason)
        self.scheduler.finish(taken.sequence, wrong=reason == "failed")
        del self.samples[taken.sequence]
        if self.speculation is not None:
            self.speculation.end(taken.sequence)
        output = taken.request.output
        output.hit += taken.sequence.hit_tokens
        output.preemptions += taken.sequence.preemptions

    def close_if_done(self, request: Request) -> None:
        if request.output.timing.ended is None and all(taken.answer.reason for taken in request.samples):
            self._close(request)

    def _close(self, request: Request) -> None:
        request.output.timing.ended = self.clock()
        del self._requests[request.output.request_id]
        self.ended_ids.append(request.output.request_id)
        if not request.awaited:
            self.ended.append(request.output)
