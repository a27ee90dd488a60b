"""Many requests through one model, a step at a time.

    add ──▶ scheduler.schedule ──▶ one forward pass over a flat row of tokens ──▶ sample ──▶ stop? ──▶ Output
    ▲          blocks, budget         prompt pieces and single tokens mixed        each by its own seed
    └── cancel, from any thread

Greedy tokens are those of `minillm.model.generate`, whatever is switched on and whatever else runs.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from minillm.data import Tokenizer
from minillm.model import Transformer
from minillm.model.hf.generation_config import GenerationDefaults
from minillm.model.kernels import gpu_of
from minillm.model.paged import Backend, default_backend
from minillm.model.parts import weight_of
from minillm.quantize.kv import kv_format_named
from minillm.serve.checks import check_engine
from minillm.serve.load import engine_options
from minillm.serve.numbers import check_whole
from minillm.serve.progress import progress_bar
from minillm.serve.requests.output import Delta, Output, deltas_of, output_of
from minillm.serve.requests.params import SamplingParams
from minillm.serve.requests.prompts import adapter_of_each, pairs
from minillm.serve.requests.table import RequestTable
from minillm.serve.run.async_scheduling import AsyncScheduling
from minillm.serve.run.build import build_pool, build_runner, build_speculation, prepare_model
from minillm.serve.run.core import EngineCore
from minillm.serve.run.memory import gpu_limits
from minillm.serve.run.pipelined import Pipelined
from minillm.serve.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from minillm.adapters.store import AdapterStore
    from minillm.serve.speculate.adaptive import AdaptiveK
    from minillm.serve.speculate.proposal import Proposer


class LLM:
    """`LLM(model).generate(prompts, params)`, or `add` and `step` until what was added comes back.

    tokenizer: for prompts and stops that are text. generation: what the model's folder says, see `load`. max_num_seqs,
    token_budget: 256 and 8,192 on a GPU, or what its memory allows; else the scheduler's. num_blocks: None = what
    `gpu_memory_utilization` allows, see `memory.pool_sizes`. num_host_blocks: to swap to; None = as many as the host
    has room for, if preemption="swap". scheduling: see `Scheduler`, or the subclass of it given as `scheduler`.
    backend: of `paged_attention`; None = `default_backend`: the Triton kernel on a CUDA GPU, on a CPU the C++ kernel.
    records: the last `keep_records` steps; record_blocks adds every block table (costs time and memory). proposer:
    drafts tokens that the model only checks, k in a pass; the tokens' distribution is the same. fused: see
    `optimise.fuse`, which changes how the model computes; None = on a CUDA GPU. compile: blocks through torch.compile,
    see `run/optimise.py`: True, or the name of one of its backends. graphs: whether steps of single tokens are
    replayed, see `run/decode_graphs.py`; None = on a CUDA GPU whose backend reads keys where they lie. warm_up: compile
    kernels and record graphs now and not while the first requests wait, see `run/warm_up.py`; None = on a CUDA GPU.
    async_scheduling: the host prepares a step while the device computes the one before it, see
    `run/async_scheduling.py`. kv_dtype: "int8" or "fp8" keeps keys and values in 8 bits with a scale for each token and
    head (`minillm/model/paged/quantized.py`); None = as the model computes them. adapters: folders of peft's by name,
    or an `AdapterStore` with limits of its own; a request names one.
    windows_apart: where some layers have a sliding window and others see everything, the former have blocks of their
    own, which are given back once no token sees them; False = all layers share a block, as with prefill.
    prefill: a `PrefillPool`, or where there is one (`PrefillAt`), that computes the keys of long prompts, see
    `minillm/serve/transfer`; handovers says what came of it.
    Any thread may add, cancel, generate and stream, also during a forward pass; steps happen one at a time. A step that
    Ctrl-C ends fails the requests that had begun, once the next step finds it so; those that wait stay queued.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        tokenizer: Tokenizer | None = None,
        generation: GenerationDefaults | None = None,
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
        fused: bool | None = None,
        compile: bool | str = False,
        graphs: bool | None = None,
        warm_up: bool | None = None,
        async_scheduling: bool = False,
        kv_dtype: str | None = None,
        windows_apart: bool = True,
        adapters: "AdapterStore | Mapping[str, str | Path] | None" = None,
        prefill: Any = None,
        scheduler: type[Scheduler] = Scheduler,
        **scheduling,
    ):
        check_engine(model, tokenizer, clock, backend, proposer, scheduler, scheduling, async_scheduling, prefill)
        check_whole("block_size", block_size, 1)
        check_whole("keep_records", keep_records, 0)
        self.model, self.tokenizer, self.clock = model, tokenizer, clock
        weight = weight_of(model)
        self.adapters = prepare_model(model, adapters, fused=fused, compile=compile)
        self.backend = backend or default_backend(weight.device, weight.dtype)
        kv_format = kv_format_named(kv_dtype, self.backend)
        scheduling = gpu_limits(model, scheduling) | scheduling
        options = {"utilization": gpu_memory_utilization, "prefix_cache": prefix_cache, "scheduling": scheduling}
        options |= {"kv_format": kv_format, "drafts": 0 if proposer is None else k, "adapters": self.adapters}
        options |= {"windows_apart": windows_apart and prefill is None}
        self.pool = build_pool(model, self.backend, block_size, num_blocks, num_host_blocks, **options)
        fits = {} if self.adapters is None else {"adapters_fit": self.adapters.has_room}
        self.scheduler = scheduler(self.pool, **scheduling, **fits)
        options = {"graphs": graphs, "warm_up": warm_up, "adapters": self.adapters}
        self.runner = build_runner(model, self.scheduler, self.backend, kv_format, **options)
        self.cache = self.runner.cache
        self.speculation = build_speculation(proposer, k, model.config)
        about = (model.config, tokenizer, clock, generation, self.adapters)
        self.requests = RequestTable(self.scheduler, self.speculation, *about)
        core = Pipelined if self.runner.stages > 1 else AsyncScheduling if async_scheduling else EngineCore
        self.core = core(self.runner, self.requests, keep_records=keep_records, record_blocks=record_blocks)
        self.records = self.core.records
        self.stepping = Lock()  # a step at a time; nothing else needs one, see `requests/table.py`
        self.handovers = None if prefill is None else prefill.attach(self, model.config)
        self.interrupted = ""  # what ended a step amid its bookkeeping; "" = nothing

    @classmethod
    def load(cls, folder: str | Path, **options) -> "LLM":
        """For a Hugging Face folder: its tokenizer, the tokens that end an answer there, and its sampling for requests
        that bring no `SamplingParams`. options: of `LLM`, and device, dtype, max_seq_len and int8_head of
        `engine_options`."""
        return cls(**engine_options(folder, **options))

    def generate(
        self,
        prompts: list[str | list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        adapter: str | list[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """One output per prompt, in order. params, adapter: for all, or one for each. Refuses all if one cannot run.

        progress: a bar on standard error; None = if that is a terminal and there are many prompts.
        """
        each = zip(pairs(prompts, params), adapter_of_each(prompts, adapter), strict=True)
        mine = [self.requests.request(*asked, adapter=name, awaited=True) for asked, name in each]
        try:
            for request in mine:
                self.requests.submit(request)
            for request in progress_bar(mine, progress):
                while request.ended is None:
                    self.advance()
        finally:  # marks what has not ended; a signal cannot come between
            self.requests.cancelled.extend(mine)
        return [output_of(request) for request in mine]

    def stream(self, prompt, params: SamplingParams | None = None, **options) -> Iterator[Delta]:
        """Adds a request, and yields what is new of its samples as they grow; closing the iterator cancels it.

        options: see `add`, whose errors are raised here. RuntimeError, after the last token, if the request failed.
        """
        request_id = options.pop("request_id", None)
        request = self.requests.request(prompt, params, awaited=True, **options)
        deltas = deltas_of(request, request_id, self.requests, self.advance)
        next(deltas)  # into its `try`: an iterator that is closed before its first value cancels the request, too
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
        adapter: str | None = None,
    ) -> str:
        """Queues a request and returns its id. priority: lower is sooner. salt: shares cached prefixes with its like.
        adapter: the name of one; None = the base alone.

        ValueError for what can never run, RuntimeError while the queue is full (`max_waiting`).
        """
        options = {"priority": priority, "salt": salt, "timeout_s": timeout_s, "adapter": adapter}
        request = self.requests.request(prompt, params, **options)
        self.requests.submit(request, request_id)
        return request.request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request: it gets no token more, and what it has so far comes out of the next `step`."""
        self.requests.cancel(request_id)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.requests)

    def step(self) -> list[Output]:
        """One forward pass, if there is anything to compute. Returns what ended since the last call, each once.

        What a `generate` or a `stream` added is theirs and not among it.
        """
        self.advance()
        with self.stepping:
            return [output_of(self.requests.ended.popleft()) for _ in range(len(self.requests.ended))]

    def advance(self) -> None:
        """One step, whatever it computes; what ends in it waits for `step`. One thread at a time is in here."""
        with self.stepping, gpu_of(weight_of(self.model).device):
            if self.interrupted:
                self.core.recover(self.interrupted)
            self.interrupted = "the step was interrupted"
            try:
                self.core.step()
            except BaseException as failure:
                self.interrupted = f"the step was interrupted by {type(failure).__name__}: {failure}"
                raise
            self.interrupted = ""
