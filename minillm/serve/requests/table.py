"""The requests that have not ended: how one arrives, and the one place where it ends, whatever the reason.

    submit ──▶ arrived ──tidy──▶ queued ──▶ finish, sample by sample ──▶ close ──▶ ended: for `step` to return,
    cancelled ───────────tidy──────────────▶ end (also: timeout, failed) ──▲       or for the caller that awaits it

Only the step that is under way changes anything here. Other threads only append to `arrived` or `cancelled`, which is
atomic under the GIL; the step applies both. So the garbage collector may cancel a request in `__del__` at any moment,
where a lock that the same thread holds already would never be free, and a signal handler may, too.
"""

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

from minillm.model import ModelConfig
from minillm.serve.options import EngineOptions
from minillm.serve.requests.params import SamplingParams
from minillm.serve.requests.prompts import registered
from minillm.serve.requests.request import Request, Sample, new_request
from minillm.serve.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from minillm.serve.speculate.speculation import Speculation

FEW = 32  # deadlines that are not worth looking through


class RequestTable:
    """arrived, live: by id, the requests that are not queued yet, and those that are. ended: requests that `step` has
    not returned yet. ended_ids: of what ended since it was last cleared. cancelled: what the next `tidy` ends."""

    def __init__(
        self, scheduler: Scheduler, speculation: "Speculation | None", config: ModelConfig, options: EngineOptions
    ):
        self.scheduler, self.speculation, self.config, self.adapters = scheduler, speculation, config, options.adapters
        self.tokenizer, self.clock, self.generation = options.tokenizer, options.clock, options.generation
        self.arrived: dict[str, Request] = {}
        self.live: dict[str, Request] = {}
        self.ended: deque[Request] = deque()
        self.ended_ids: list[str] = []
        self.cancelled: deque[Request] = deque()
        self.deadlines: list[tuple[float, int, Request]] = []
        self._names, self.submitting = count(), Lock()

    def __len__(self) -> int:
        """Requests that have not ended and are not about to."""
        ending = {request for request in self.cancelled.copy() if request.ended is None}
        return len(self.arrived) + len(self.live) - sum(self._find(each.request_id) is each for each in ending)

    def request(
        self, prompt: str | list[int], params: SamplingParams | None, *, adapter: str | None = None, **options
    ) -> Request:
        """A `new_request` that can run, not submitted yet. adapter: its name. options: see there."""
        options |= {"generation": self.generation, "adapter": registered(self.adapters, adapter)}
        request = new_request(prompt, params, self.config, self.tokenizer, self.clock(), **options)
        self.scheduler.check(request.samples[0])
        return request

    def submit(self, request: Request, request_id: str | None = None) -> None:
        """Names it and leaves it for the next step. ValueError: the name is taken. RuntimeError: the queue is full."""
        with self.submitting:
            self.scheduler.check_queue(len(self.arrived))
            if request_id is None:
                waiting = {request.request_id for request in self.ended.copy()}
                names = (f"request-{number}" for number in self._names)
                request_id = next(name for name in names if self._find(name) is None and name not in waiting)
            elif self._find(request_id) is not None:
                raise ValueError(f"request id {request_id!r} is taken by a request that has not ended: choose another.")
            request.name(request_id)
            self.arrived[request_id] = request

    def cancel(self, request_id: str) -> None:
        request = self._find(request_id)
        if request is None or request.ended is not None or request in self.cancelled.copy():
            raise ValueError(f"request {request_id!r} cannot be cancelled: it is unknown or has ended.")
        self.cancelled.append(request)

    def tidy(self, now: float) -> None:
        """Before a step: what arrived is queued; what was cancelled, or whose time is over, ends."""
        self.ended_ids.clear()
        for name in list(self.arrived):
            request = self.live[name] = self.arrived[name]
            first = request.samples[0]
            self.scheduler.enqueue(first)
            if request.timeout_s is not None:
                heappush(self.deadlines, (request.arrived + request.timeout_s, first.rank[1], request))
            del self.arrived[name]
        self.end_cancelled()
        while self.deadlines and self.deadlines[0][0] <= now:
            self.end(self.deadlines[0][-1], "timeout")
            heappop(self.deadlines)
        if len(self.deadlines) > 2 * len(self.live) + FEW:  # most have ended: nothing holds them until their time
            self.deadlines = [each for each in self.deadlines if each[-1].ended is None]
            heapify(self.deadlines)

    def end_cancelled(self) -> None:
        """Ends what was cancelled, but for requests that are not queued yet: those wait for the next `tidy`."""
        for request in tuple(self.cancelled):
            if self.arrived.get(request.request_id) is not request:
                self.end(request, "cancelled")
                self.cancelled.remove(request)

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends all samples of a request that have not ended, and so the request."""
        if request.ended is not None or self.live.get(request.request_id) is not request:
            return
        request.error = error
        for sample in request.samples:
            if sample.reason is None:
                self.finish(sample, reason)

    def finish(self, sample: Sample, reason: str) -> None:
        """Ends one sample; the last one ends its request."""
        sample.close(reason)
        self.scheduler.finish(sample, wrong=reason == "failed")
        if self.speculation is not None:
            self.speculation.end(sample)
        if all(each.reason for each in sample.request.samples):
            self.close(sample.request)

    def close(self, request: Request) -> None:
        if request.ended is None:
            request.ended = self.clock()
        self.ended_ids.append(request.request_id)
        if not request.awaited and request not in self.ended:
            self.ended.append(request)
        del self.live[request.request_id]

    def _find(self, request_id: str) -> Request | None:
        """In this order: `tidy` queues a request before it takes it out of `arrived`."""
        return self.arrived.get(request_id) or self.live.get(request_id)
