"""What the baselines share: requests in the order they came, and the face of `LLM`.

A baseline fills in `compute`: one forward pass, and a token for each row it has logits for. A request's n samples are
n rows that share nothing.
"""

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from minillm.data import Tokenizer
from minillm.model import Transformer
from minillm.serve.requests.output import Output, output_of
from minillm.serve.requests.params import SamplingParams
from minillm.serve.requests.prompts import pairs, prompt_ids
from minillm.serve.requests.request import Request, Sample, new_request
from minillm.serve.run.recorder import StepRecord
from minillm.serve.sample import reference


class FirstCome:
    """`add` and `step` until what was added comes back, or `generate`, as with `LLM`; in one thread.

    computed: tokens put through the model so far, all of them. waste: those among them that no answer needed.
    records: one for each forward pass; its batch names every row, with padding and rows that had ended.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model, self.tokenizer, self.clock = model, tokenizer, clock
        self.waiting: deque[Sample] = deque()
        self.computed = self.waste = 0
        self.records: list[StepRecord] = []
        self._requests: dict[str, Request] = {}
        self._ended: list[Output] = []
        self._count = 0

    def compute(self) -> None:
        """One forward pass, if there is anything to compute."""
        raise NotImplementedError

    @property
    def starts_at(self) -> float | None:
        """Before this time `step` has nothing to compute; None = it has now."""
        return None

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queues a request and returns its id. priority is not looked at: first come, first served."""
        while request_id is None:
            name, self._count = f"request-{self._count}", self._count + 1
            request_id = None if name in self._requests else name
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is taken by a request that has not ended: choose another.")
        request = new_request(prompt, params, self.model.config, self.tokenizer, self.clock())
        request.name(request_id)
        self._requests[request_id] = request
        self.waiting += request.samples
        return request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request now; what it has so far comes out of the next `step`."""
        if request_id not in self._requests:
            raise ValueError(f"request {request_id!r} cannot be cancelled: it is unknown or has ended.")
        self._end(self._requests[request_id], "cancelled")

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One forward pass, if there is anything to compute. Returns what ended since the last call, each once."""
        started, before = self.clock(), len(self._ended)
        self._batch, self._sampled = (), 0
        self.compute()
        if self._batch:
            times = {"started": started, "seconds": self.clock() - started}
            counts = {"sampled": self._sampled, "running": len(self._batch), "waiting": len(self.waiting)}
            names = tuple(output.request_id for output in self._ended[before:])
            none = {"admitted": (), "preempted": (), "free": 0, "cached": 0, "used": 0}
            self.records.append(
                StepRecord(step=len(self.records) + 1, batch=self._batch, ended=names, **times, **counts, **none)
            )
        ended, self._ended = self._ended, []
        return ended

    def generate(
        self, prompts: list[str | list[int]], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[Output]:
        """One output per prompt, in order. params: for all, or one for each. Refuses all if one cannot run."""
        each = [(prompt, wanted or SamplingParams()) for prompt, wanted in pairs(prompts, params)]
        for prompt, wanted in each:
            prompt_ids(prompt, wanted, self.tokenizer, self.model.config)
        names = [self.add(prompt, wanted) for prompt, wanted in each]
        outputs: dict[str, Output] = {}
        while not outputs.keys() >= set(names):
            outputs |= {output.request_id: output for output in self.step()}
            if self.unfinished and (wakes := self.starts_at) is not None:
                getattr(self.clock, "sleep", time.sleep)(max(0.0, wakes - self.clock()))
        self._ended += [output for name, output in outputs.items() if name not in names]  # others', left for `step`
        return [outputs[name] for name in names]

    def logits(self, samples: list[Sample], tokens: list[list[int]], useful: list[int], **inputs) -> Tensor:
        """The model's logits for `tokens`, one list for each sample, `useful` of them needed: [samples, n, vocab_size].

        Counts what is computed, and notes when a request was computed first.
        """
        now = self.clock()
        for sample, wanted in zip(samples, useful, strict=True):
            sample.forwarded += wanted
            if sample.request.scheduled is None:
                sample.request.scheduled = now
        batch = torch.tensor(tokens, device=self.model.embedding.weight.device)
        starts = [sample.num_tokens - max(each, 1) for sample, each in zip(samples, useful, strict=True)]
        names = (sample.name for sample in samples)
        self._batch = tuple(zip(names, starts, map(len, tokens), strict=True))
        self.computed += batch.numel()
        self.waste += batch.numel() - sum(useful)
        return self.model(batch, **inputs).float().cpu()

    def accept(self, sample: Sample, logits: Tensor) -> None:
        """The sample's next token, from logits [vocab_size], if it goes on; its request ends with its last sample."""
        request = sample.request
        if not is_running(sample):
            return
        if not logits.amax().isfinite():
            tokens = sample.num_tokens
            self._end(request, "failed", f"its logits are not finite after {tokens} tokens (NaN or infinite)")
            return
        token = reference.sample(logits, request.params, sample.tokens, sample.draw)
        self._sampled += 1
        if request.first_token is None:
            request.first_token = self.clock()
        if (reason := sample.accept(token)) is not None:
            sample.close(reason)
            if all(each.reason is not None for each in request.samples):
                self._end(request, reason)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        for sample in request.samples:
            if sample.reason is None:
                sample.close(reason)
        request.error, request.ended = error, self.clock()
        del self._requests[request.request_id]
        self._ended.append(output_of(request))


def is_running(sample: Sample) -> bool:
    return sample.reason is None
