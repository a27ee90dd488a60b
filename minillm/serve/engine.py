"""Many requests through one model, a step at a time.

    add ──▶ scheduler.schedule ──▶ one forward pass over a flat row of tokens ──▶ sample ──▶ stop? ──▶ Output
    ▲          blocks, budget         prompt pieces and single tokens mixed        each by its own seed
    └── cancel, from any thread

Greedy tokens are those of `minillm.model.generate`, whatever is switched on and whatever else runs.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.data import Tokenizer
from minillm.model import Transformer
from minillm.model.paged import Backend, PagedCache, default_backend
from minillm.serve.blocks import BlockPool, root
from minillm.serve.memory import default_num_blocks, default_num_host_blocks
from minillm.serve.model_runner import ForwardPass, InputBuffers
from minillm.serve.recorder import StepRecord, record
from minillm.serve.request import Delta, Output, Request, Sample, pairs, prompt_ids
from minillm.serve.sampler import sample_batch
from minillm.serve.sampling import RULED_OUT, SamplingParams, Token, whole
from minillm.serve.scheduler import Scheduler
from minillm.serve.sequence import Plan, Sequence

if TYPE_CHECKING:
    from minillm.serve.speculate.adaptive import AdaptiveK
    from minillm.serve.speculate.proposal import Proposer


class LLM:
    """`LLM(model).generate(prompts, params)`, or `add` and `step` until what was added comes back.

    tokenizer: for prompts and stops that are text. num_blocks: None = what `gpu_memory_utilization` allows, see
    `memory.default_num_blocks`. num_host_blocks: to swap to; None = num_blocks if preemption="swap", else 0.
    scheduling: see `Scheduler`. backend: of `paged_attention`; None = `default_backend`: the Triton kernel on a CUDA
    GPU, gathered elsewhere. records: the last `keep_records` steps; record_blocks adds every block table (costs time
    and memory). proposer: guesses tokens that the model only checks, k in a pass; the tokens' distribution is the same.
    Any thread may add, cancel, generate and stream, also during a forward pass; steps happen one at a time.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        tokenizer: Tokenizer | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        num_host_blocks: int | None = None,
        gpu_memory_utilization: float | None = None,
        prefix_cache: bool = True,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.perf_counter,
        keep_records: int = 10_000,
        record_blocks: bool = False,
        proposer: "Proposer | None" = None,
        k: "int | str | AdaptiveK" = 4,
        **scheduling,
    ):
        self.model, self.tokenizer, self.clock = model, tokenizer, clock
        weight = model.embedding.weight
        self.backend = backend or default_backend(weight.device, weight.dtype)
        if num_blocks is None:
            limits = {name: scheduling[name] for name in ("max_num_seqs", "token_budget") if name in scheduling}
            num_blocks = default_num_blocks(model, block_size, gpu_memory_utilization, **limits)
        if num_host_blocks is None:
            swaps = scheduling.get("preemption") == "swap"
            num_host_blocks = default_num_host_blocks(model, block_size, num_blocks) if swaps else 0
        self.pool = BlockPool(num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(self.pool, **scheduling)
        where = {"num_host_blocks": num_host_blocks, "device": weight.device, "dtype": weight.dtype}
        self.cache = self.pool.storage = PagedCache(model.config, num_blocks, block_size, **where)
        self.buffers = InputBuffers(self.cache, self.backend)
        self.records: deque[StepRecord] = deque(maxlen=keep_records)
        self.record_blocks = record_blocks
        self.speculation = None
        if proposer is not None:
            from minillm.serve.speculate.speculation import Speculation

            self.speculation = Speculation(proposer, k, model.config, clock)
        self._lock, self._stepping = RLock(), RLock()  # of the bookkeeping; of a whole step
        self._requests: dict[str, Request] = {}
        self._samples: dict[Sequence, Sample] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ended: list[Output] = []  # for `step` to return
        self._ended_ids: list[str] = []  # for the record of the step that runs
        self._count = 0

    def generate(
        self, prompts: list[str | list[int]], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[Output]:
        """One output per prompt, in order. params: for all, or one for each. Refuses all if one cannot run."""
        mine: list[Request] = []
        with self._cancelling(mine):
            for prompt, wanted in pairs(prompts, params):
                mine.append(self._add(prompt, wanted, awaited=True))
            while any(request.output.timing.ended is None for request in mine):
                self._step()
        return [request.output for request in mine]

    def stream(self, prompt, params: SamplingParams | None = None, **options) -> Iterator[Delta]:
        """Adds a request, and yields what is new of its samples as they grow; closing the iterator cancels it.

        options: see `add`, whose errors are raised here. RuntimeError, after the last token, if the request failed.
        """
        request = self._add(prompt, params, awaited=True, **options)
        deltas = self._deltas(request)
        next(deltas)  # into its `with`: an iterator that is closed before its first value cancels the request, too
        return deltas

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Queues a request and returns its id. priority: lower is sooner. salt: shares cached prefixes with its like.

        ValueError for what can never run, RuntimeError while the queue is full (`max_waiting`).
        """
        options = {"request_id": request_id, "priority": priority, "salt": salt, "timeout_s": timeout_s}
        return self._add(prompt, params, **options).output.request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request now; what it has so far comes out of the next `step`."""
        with self._lock:
            if request_id not in self._requests:
                raise ValueError(f"request {request_id!r} cannot be cancelled: it is unknown or has ended.")
            self._end(self._requests[request_id], "cancelled")

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def step(self) -> list[Output]:
        """One forward pass, if there is anything to compute. Returns what ended since the last call, each once.

        What a `generate` or a `stream` added is theirs and not among it.
        """
        self._step()
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def _add(
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
        params = params or SamplingParams()
        tokens = prompt_ids(prompt, params, self.tokenizer, self.model.config)
        limit = min(len(tokens) + params.max_tokens, self.model.config.max_seq_len)
        if whole(priority) is None:
            raise ValueError(f"priority {priority!r} must be a whole number; lower is sooner.")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s {timeout_s} must be above 0, or None.")
        with self._lock:
            taken = self._requests.keys() | {output.request_id for output in self._ended}
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
            self._attach(request, sequence)
            if timeout_s is not None:
                heappush(self._deadlines, (request.output.timing.arrived + timeout_s, sequence.rank[1], request))
        return request

    def _deltas(self, request: Request) -> Iterator[Delta]:
        """First nothing, so that the caller can enter the `with`; then what is new, sample by sample."""
        output, tokens, characters = request.output, [], []
        with self._cancelling([request]):
            yield None
            ended = False
            while not ended:
                if output.timing.ended is None:
                    self._step()
                with self._lock:
                    ended = output.timing.ended is not None  # asked before the tokens: others may step at every yield
                    grown = [(list(each.answer.tokens), each.safe_text) for each in request.samples]
                for index, (now, text) in enumerate(grown):
                    if index == len(tokens):
                        tokens.append(0)
                        characters.append(0)
                    new, more = now[tokens[index] :], text[characters[index] :]
                    tokens[index], characters[index] = len(now), len(text)
                    if new or more:
                        yield Delta(index, new, more)
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id!r} failed: {output.error}")

    @contextmanager
    def _cancelling(self, mine: list[Request]) -> Iterator[None]:
        """Ends those of `mine` that have not ended when the block is left, however that happens."""
        try:
            yield
        finally:
            with self._lock:
                for request in mine:
                    self._end(request, "cancelled")

    @torch.inference_mode()
    def _step(self) -> None:
        """Schedule, compute (without the lock: what is cancelled meanwhile is skipped after it), sample."""
        with self._stepping:
            with self._lock:
                started = self.clock()
                self._ended_ids.clear()
                while self._deadlines and self._deadlines[0][0] <= started:
                    self._end(heappop(self._deadlines)[-1], "timeout")
                plan = self.scheduler.schedule()
                if not plan.batch:
                    return
                run = ForwardPass(plan, self.buffers)
                asked = self.speculation and self.speculation.ask(plan, self._samples)
                outputs = [self._samples[sequence].request.output for sequence, _ in plan.batch]
                for output in outputs:
                    if output.timing.scheduled is None:
                        output.timing.scheduled = started
            logits, failure = self._forward(plan, run, asked)
            with self._lock:
                for output, (_, tokens) in zip(outputs, plan.batch, strict=True):
                    output.computed += tokens
                sampled = self._after(plan, run, logits) if failure is None else self._failed(plan, run, failure)
                if self.speculation is not None:
                    self.speculation.observe(plan, run, self._samples)
                error = None if failure is None else f"{type(failure).__name__}: {failure}"
                facts = {"ended": tuple(self._ended_ids), "sampled": sampled, "error": error}
                times = (started, self.clock() - started)
                self.records.append(
                    record(self.scheduler, plan, run.starts, blocks=self.record_blocks, times=times, **facts)
                )
            if failure is not None and not isinstance(failure, Exception):
                raise failure

    def _forward(self, plan: Plan, run: ForwardPass, asked: list) -> tuple[Tensor | None, BaseException | None]:
        """(logits, None), or (None, whatever was raised)."""
        try:
            if self.speculation is not None:
                self.speculation.guess(asked, plan, run)
            hidden = self.speculation is not None and self.speculation.wants_hidden
            return run.logits(self.model, hidden=hidden), None
        except BaseException as failure:
            return None, failure

    def _failed(self, plan: Plan, run: ForwardPass, failure: BaseException) -> int:
        """The pass raised: its requests end and nothing it wrote is ever hit; the others and the pool stay whole."""
        self.pool.invalidate(block for table in run.tables for block in table)
        for taken in [self._samples[sequence] for sequence, _ in plan.batch if sequence in self._samples]:
            self._end(taken.request, "failed", f"the forward pass raised {type(failure).__name__}: {failure}")
        return 0

    def _after(self, plan: Plan, run: ForwardPass, logits: Tensor) -> int:
        """The next tokens of the sequences whose last token was computed; returns how many were sampled."""
        complete = self.scheduler.advance(plan)
        if not complete:
            return 0
        most, likeliest = logits.max(-1)
        ready = self._ready(complete, run, most.isfinite().tolist())
        for taken, rows in ready:
            if taken.request.params.first_tokens and not taken.answer.tokens:
                allowed = torch.full_like(logits[rows.start], RULED_OUT)
                allowed[list(taken.request.params.first_tokens)] = 0
                logits[rows.start] += allowed
                likeliest[rows.start] = logits[rows.start].argmax()
        chosen = self._choose(ready, logits, likeliest)
        sampled = sum(self._accept(taken, tokens) for (taken, _), tokens in zip(ready, chosen, strict=True))
        for taken, _ in ready:
            if taken.answer.reason is not None and all(each.answer.reason for each in taken.request.samples):
                self._close(taken.request)
        return sampled

    def _ready(self, complete: list[Sequence], run: ForwardPass, sound: list[bool]) -> list[tuple[Sample, slice]]:
        """(sample, its rows of the logits) of all that get a token: without those that were cancelled during the pass
        or whose logits are not finite, and with the forks of those that have just completed their prompt."""
        ready, end = [], 0
        for sequence, count in zip(complete, run.rows, strict=True):
            start, end = end, end + count
            taken = self._samples.get(sequence)
            if taken is None:  # cancelled meanwhile, or failed by another sample of its request
                self.pool.invalidate(() if sound[start] else run.table(sequence))
            elif sound[start]:
                family = [taken]
                if sequence.num_seqs > 1:
                    family += [self._attach(taken.request, fork) for fork in self.scheduler.fork(sequence)]
                usable = end if count == 1 else next((row for row in range(start, end) if not sound[row]), end)
                ready += [(each, slice(start, usable)) for each in family]
            elif count > 1:  # a draft token may have spoilt it: 0 · nan is nan, also behind a mask
                self.speculation.drop(sequence)
                self.scheduler.commit_accepted(sequence)
            else:
                reason = f"its logits are not finite after {sequence.num_tokens} tokens (NaN or infinite)"
                self._end(taken.request, "failed", reason)
        return [(taken, rows) for taken, rows in ready if taken.answer.reason is None]

    def _choose(self, ready: list[tuple[Sample, slice]], logits: Tensor, likeliest: Tensor) -> list[list[Token]]:
        """The next tokens of each sample: one, or with speculation the accepted draft tokens and one more."""
        if self.speculation is not None:
            logits, ids = logits.cpu(), likeliest.tolist()
            return [self.speculation.check(taken, logits[rows], ids[rows]) for taken, rows in ready]
        places = [rows.start for _, rows in ready]
        if places != list(range(len(logits))):
            logits, likeliest = logits[places], likeliest[places]
        rows = [(taken.request.params, taken.sequence.tokens, taken.draw) for taken, _ in ready]
        return [[token] for token in sample_batch(logits, rows, likeliest)] if rows else []

    def _accept(self, taken: Sample, tokens: list[Token]) -> int:
        """Adds tokens to the answer until one ends it; returns how many."""
        output = taken.request.output
        output.passes += bool(taken.answer.tokens)
        if output.timing.first_token is None:
            output.timing.first_token = self.clock()
        given, reason = 0, None
        try:
            while reason is None and given < len(tokens):
                reason, given = taken.accept(tokens[given]), given + 1
        except Exception as failure:  # of the tokenizer: this request's own
            self._end(taken.request, "failed", f"{type(failure).__name__}: {failure}")
            return given
        self.scheduler.commit_accepted(taken.sequence)
        if reason is not None:
            self._finish(taken, reason)
        elif self.speculation is not None:
            self.speculation.want(taken.sequence)
        return given

    def _finish(self, taken: Sample, reason: str) -> None:
        taken.close(reason)
        self.scheduler.finish(taken.sequence, wrong=reason == "failed")
        del self._samples[taken.sequence]
        if self.speculation is not None:
            self.speculation.end(taken.sequence)
        output = taken.request.output
        output.hit += taken.sequence.hit_tokens
        output.preemptions += taken.sequence.preemptions

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends all samples of a request that have not ended."""
        if request.output.timing.ended is not None:
            return
        request.output.error = error
        for taken in request.samples:
            if taken.answer.reason is None:
                self._finish(taken, reason)
        self._close(request)

    def _close(self, request: Request) -> None:
        if request.output.timing.ended is not None:
            return
        request.output.timing.ended = self.clock()
        del self._requests[request.output.request_id]
        self._ended_ids.append(request.output.request_id)
        if not request.awaited:
            self._ended.append(request.output)

    def _attach(self, request: Request, sequence: Sequence) -> Sample:
        taken = self._samples[sequence] = request.attach(sequence, self.tokenizer)
        return taken
