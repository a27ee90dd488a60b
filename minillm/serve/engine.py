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

import torch
from torch import Tensor

from minillm.data import Tokenizer
from minillm.model import Transformer
from minillm.model.paged import Backend, PagedCache, default_backend
from minillm.serve.blocks import BlockPool, root
from minillm.serve.model_runner import ForwardPass
from minillm.serve.recorder import StepRecord, record
from minillm.serve.request import Output, Request, Sample, pairs, prompt_ids
from minillm.serve.sampling import SamplingParams, Token
from minillm.serve.scheduler import Scheduler
from minillm.serve.sequence import Plan, Sequence
from minillm.serve.speculate.adaptive import AdaptiveK
from minillm.serve.speculate.proposal import Proposer
from minillm.serve.speculate.speculation import Speculation


class LLM:
    """`LLM(model).generate(prompts, params)`, or `add` and `step` until what was added comes back.

    tokenizer: for prompts and stops that are text. num_blocks: None = room for 16 sequences of full length.
    num_host_blocks: to swap to; None = num_blocks if preemption="swap", else 0. scheduling: see `Scheduler`.
    backend: of `paged_attention`; None = `default_backend`: the Triton kernel on a CUDA GPU, gathered elsewhere.
    records: the last `keep_records` steps; record_blocks adds every block table (costs time and memory).
    proposer: guesses tokens that the model only checks, k in a pass; the tokens' distribution is the same.
    Any thread may add and cancel, also during a forward pass; steps happen one at a time.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        tokenizer: Tokenizer | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        num_host_blocks: int | None = None,
        prefix_cache: bool = True,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.perf_counter,
        keep_records: int = 10_000,
        record_blocks: bool = False,
        proposer: Proposer | None = None,
        k: int | str | AdaptiveK = 4,
        **scheduling,
    ):
        self.model, self.tokenizer, self.clock = model, tokenizer, clock
        if num_blocks is None:
            num_blocks = 16 * -(-model.config.max_seq_len // max(block_size, 1))
        if num_host_blocks is None:
            num_host_blocks = num_blocks if scheduling.get("preemption") == "swap" else 0
        options = {"num_host_blocks": num_host_blocks, "prefix_cache": prefix_cache}
        self.pool = BlockPool(num_blocks, block_size, **options)
        self.scheduler = Scheduler(self.pool, **scheduling)
        weight = model.embedding.weight
        self.backend = backend or default_backend(weight.device, weight.dtype)
        where = {"num_host_blocks": num_host_blocks, "device": weight.device, "dtype": weight.dtype}
        self.cache = self.pool.storage = PagedCache(model.config, num_blocks, block_size, **where)
        self.records: deque[StepRecord] = deque(maxlen=keep_records)
        self.record_blocks = record_blocks
        self.speculation = Speculation(proposer, k, model.config, clock)
        self._lock, self._stepping = RLock(), RLock()  # of the bookkeeping; of a whole step
        self._requests: dict[str, Request] = {}
        self._samples: dict[Sequence, Sample] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ended: list[Output] = []
        self._count = 0

    def generate(
        self, prompts: list[str | list[int]], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[Output]:
        """One output per prompt, in order. params: for all, or one for each. Refuses all if one cannot run."""
        each, mine = pairs(prompts, params), []
        with self._keeping_others(mine) as others:
            for prompt, wanted in each:
                with self._lock:  # nobody may end it before we have it
                    mine.append(self._requests[self.add(prompt, wanted)].output)
            while any(output.timing.ended is None for output in mine):
                others += self.step()
        return mine

    def stream(self, prompt, params: SamplingParams | None = None, **options) -> Iterator[tuple[int, Token]]:
        """Adds a request, steps, and yields (sample, token) as they come; closing the iterator cancels the request."""
        with self._lock:
            output = self._requests[self.add(prompt, params, **options)].output
        given: list[int] = []
        with self._keeping_others([output]) as others:
            ended = False
            while not ended:
                others += self.step() if output.timing.ended is None else []
                ended = output.timing.ended is not None  # asked before the tokens: others may step at every yield
                given += [0] * (len(output.answers) - len(given))
                for index, answer in enumerate(output.answers):
                    while given[index] < len(answer.tokens):
                        given[index] += 1
                        yield index, answer.tokens[given[index] - 1]
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id!r} failed: {output.error}")

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
        params = params or SamplingParams()
        tokens = prompt_ids(prompt, params, self.tokenizer, self.model.config)
        limit = min(len(tokens) + params.max_tokens, self.model.config.max_seq_len)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority {priority!r} must be a whole number; lower is sooner.")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s {timeout_s} must be above 0, or None.")
        with self._lock:
            if request_id is None:
                request_id = f"request-{self._count}"
            if request_id in self._requests:
                raise ValueError(f"request id {request_id!r} is taken by a request that has not ended: choose another.")
            sequence = Sequence(list(tokens), limit, params.n, priority, root(None, salt))
            self.scheduler.add(sequence)
            request = Request.arrived(request_id, tokens, params, self.tokenizer, self.clock())
            self._requests[request_id] = request
            self._attach(request, sequence)
            self._count += 1
            if timeout_s is not None:
                heappush(self._deadlines, (request.output.timing.arrived + timeout_s, self._count, request))
        return request_id

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

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One forward pass, if there is anything to compute. Returns what ended since the last call, each once."""
        with self._stepping:
            with self._lock:
                started = self.clock()
                while self._deadlines and self._deadlines[0][0] <= started:
                    self._end(heappop(self._deadlines)[-1], "timeout")
                plan = self.scheduler.schedule()
                run = ForwardPass(plan, self.cache, self.backend)
                asked = self.speculation.ask(plan, self._samples)
                outputs = self._note(plan, started)
            if plan.batch:
                self._compute(plan, run, asked, outputs, started)
            with self._lock:
                ended, self._ended = self._ended, []
                return ended

    @contextmanager
    def _keeping_others(self, mine: list[Output]) -> Iterator[list[Output]]:
        """While a loop steps for its own requests: others' outputs are left for `step`, own unended ones cancelled."""
        others: list[Output] = []
        try:
            yield others
        finally:
            with self._lock:
                for output in mine:
                    if output.timing.ended is None:
                        self.cancel(output.request_id)
                known = {id(output) for output in mine}
                self._ended = [output for output in others + self._ended if id(output) not in known]

    def _note(self, plan: Plan, started: float) -> list[Output]:
        """The output of each sequence of the plan."""
        outputs = [self._samples[sequence].request.output for sequence, _ in plan.batch]
        for output in outputs:
            if output.timing.scheduled is None:
                output.timing.scheduled = started
        return outputs

    def _compute(self, plan: Plan, run: ForwardPass, asked: list, outputs: list[Output], started: float) -> None:
        """The forward pass, without the lock: what is cancelled meanwhile is skipped after it."""
        error, sampled, before = None, 0, len(self._ended)
        try:
            self.speculation.guess(asked, plan, run)
            logits = run.logits(self.model, hidden=self.speculation.wants_hidden)
        except BaseException as failure:  # whatever it was: these requests end, the others and the pool stay whole
            error = f"{type(failure).__name__}: {failure}"
            with self._lock:
                self.pool.invalidate(block for table in run.tables for block in table)
                for taken in [self._samples[s] for s, _ in plan.batch if s in self._samples]:
                    self._end(taken.request, "failed", f"the forward pass raised {error}")
            if not isinstance(failure, Exception):
                raise
        with self._lock:
            for output, (_, tokens) in zip(outputs, plan.batch, strict=True):
                output.computed += tokens
            if error is None:
                sampled = self._sample(self.scheduler.advance(plan), run, logits)
            self.speculation.observe(plan, run, self._samples)
            ended = tuple(output.request_id for output in self._ended[before:])
            facts = {"ended": ended, "sampled": sampled, "times": (started, self.clock() - started), "error": error}
            self.records.append(record(self.scheduler, plan, run.starts, blocks=self.record_blocks, **facts))

    def _sample(self, sequences: list[Sequence], run: ForwardPass, logits: Tensor) -> int:
        """The next tokens of each, logits: [Σ run.rows, vocab_size]; at the end of its prompt one becomes n first."""
        sampled, end, sound, likeliest = 0, 0, logits.amax(-1).isfinite().tolist(), logits.argmax(-1).tolist()
        for sequence, count in zip(sequences, run.rows, strict=True):
            start, end = end, end + count
            if sequence not in self._samples:  # cancelled meanwhile, or failed by another sample of its request
                self.pool.invalidate(() if sound[start] else run.table(sequence))
                continue
            request = self._samples[sequence].request
            if not sound[start] and count > 1:  # a guess may have spoilt it: 0 · nan is nan, also behind a mask
                self.speculation.drop(sequence)
                self.scheduler.commit_accepted(sequence)
                continue
            if not sound[start]:
                reason = f"its logits are not finite after {sequence.num_tokens} tokens (NaN or infinite)"
                self._end(request, "failed", reason)
                continue
            forks = [self._attach(request, fork) for fork in self.scheduler.fork(sequence)]
            family = [self._samples[sequence], *forks]
            usable = next((row for row in range(start, end) if not sound[row]), end)
            try:
                for taken in family:
                    sampled += self._next(taken, logits[start:usable], likeliest[start:usable])
            except Exception as failure:  # of this request's sampling or text
                self._end(request, "failed", f"{type(failure).__name__}: {failure}")
                continue
            if all(taken.answer.reason is not None for taken in request.samples):
                self._close(request)
        return sampled

    def _next(self, taken: Sample, logits: Tensor, likeliest: list[int]) -> int:
        """Adds the next token, or the guesses that were right and one more; returns how many."""
        output, tokens = taken.request.output, self.speculation.check(taken, logits, likeliest)
        output.passes += bool(taken.answer.tokens)
        if output.timing.first_token is None:
            output.timing.first_token = self.clock()
        given, reason = 0, None
        while reason is None and given < len(tokens):
            reason, given = taken.accept(tokens[given]), given + 1
        self.scheduler.commit_accepted(taken.sequence)
        self.speculation.want(taken.sequence)
        if reason is not None:
            self._finish(taken, reason)
        return given

    def _finish(self, taken: Sample, reason: str) -> None:
        taken.close(reason)
        self.scheduler.finish(taken.sequence, wrong=reason == "failed")
        del self._samples[taken.sequence]
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
        request.output.timing.ended = self.clock()
        del self._requests[request.output.request_id]
        self._ended.append(request.output)

    def _attach(self, request: Request, sequence: Sequence) -> Sample:
        taken = self._samples[sequence] = request.attach(sequence, self.tokenizer)
        return taken
