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
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.data import Tokenizer
from minillm.model import Transformer
from minillm.model.paged import Backend, PagedCache, default_backend
from minillm.serve.blocks import BlockPool
from minillm.serve.memory import default_num_blocks, default_num_host_blocks
from minillm.serve.model_runner import ForwardPass, InputBuffers
from minillm.serve.next_tokens import NextTokens
from minillm.serve.recorder import StepRecord, record
from minillm.serve.request import Delta, Output, Request, pairs
from minillm.serve.sampling import SamplingParams
from minillm.serve.scheduler import Scheduler
from minillm.serve.sequence import Plan
from minillm.serve.unfinished import Unfinished

if TYPE_CHECKING:
    from minillm.serve.speculate.adaptive import AdaptiveK
    from minillm.serve.speculate.proposal import Proposer


class LLM:
    """`LLM(model).generate(prompts, params)`, or `add` and `step` until what was added comes back.

    tokenizer: for prompts and stops that are text. num_blocks: None = what `gpu_memory_utilization` allows, see
    `memory.default_num_blocks`. num_host_blocks: to swap to; None = num_blocks if preemption="swap", else 0.
    scheduling: see `Scheduler`, or the subclass of it given as `scheduler`. backend: of `paged_attention`; None =
    `default_backend`: the Triton kernel on a CUDA GPU, gathered elsewhere. records: the last `keep_records` steps;
    record_blocks adds every block table (costs time and memory). proposer: guesses tokens that the model only checks,
    k in a pass; the tokens' distribution is the same.
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
        scheduler: type[Scheduler] = Scheduler,
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
        self.scheduler = scheduler(self.pool, **scheduling)
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
        self._unfinished = Unfinished(self.scheduler, self.speculation, model.config, tokenizer, clock)
        self._samples = self._unfinished.samples
        self._next_tokens = NextTokens(self._unfinished)

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
            self._unfinished.cancel(request_id)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._unfinished)

    def step(self) -> list[Output]:
        """One forward pass, if there is anything to compute. Returns what ended since the last call, each once.

        What a `generate` or a `stream` added is theirs and not among it.
        """
        self._step()
        with self._lock:
            ended, self._unfinished.ended = self._unfinished.ended, []
            return ended

    def _add(self, prompt: str | list[int], params: SamplingParams | None, **options) -> Request:
        with self._lock:
            return self._unfinished.add(prompt, params, **options)

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
                    self._unfinished.end(request, "cancelled")

    @torch.inference_mode()
    def _step(self) -> None:
        """Schedule, compute (without the lock: what is cancelled meanwhile is skipped after it), sample."""
        with self._stepping:
            with self._lock:
                started = self.clock()
                self._unfinished.ended_ids.clear()
                self._unfinished.expire(started)
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
            raised_in = "the forward pass"
            with self._lock:
                for output, (_, tokens) in zip(outputs, plan.batch, strict=True):
                    output.computed += tokens
                sampled = 0
                try:
                    if failure is None:
                        sampled = self._next_tokens.after(plan, run, logits)
                except BaseException as raised:
                    failure, raised_in = raised, "sampling"
                if failure is not None:
                    self._failed(plan, run, f"{raised_in} raised {type(failure).__name__}: {failure}")
                if self.speculation is not None:
                    self.speculation.observe(plan, run, self._samples)
                error = None if failure is None else f"{type(failure).__name__}: {failure}"
                facts = {"ended": tuple(self._unfinished.ended_ids), "sampled": sampled, "error": error}
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

    def _failed(self, plan: Plan, run: ForwardPass, error: str) -> None:
        """The step raised: its requests end and nothing it wrote is ever hit; the others and the pool stay whole."""
        self.pool.invalidate(block for table in run.tables for block in table)
        for taken in [self._samples[sequence] for sequence, _ in plan.batch if sequence in self._samples]:
            self._unfinished.end(taken.request, "failed", error)
