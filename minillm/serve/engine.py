"""Many requests through one model, a step at a time.

    add ──▶ scheduler.schedule ──▶ one forward pass over a flat row of tokens ──▶ sample ──▶ stop? ──▶ Output
    ▲          blocks, budget         prompt pieces and single tokens mixed        each by its own seed
    └── cancel, from any thread

Greedy tokens are those of `minillm.model.generate`, whatever is switched on and whatever else runs.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from minillm.model import Transformer
from minillm.model.kernels import gpu_of
from minillm.model.parts import weight_of
from minillm.serve.checks import check_model, check_scheduling
from minillm.serve.load import engine_options
from minillm.serve.options import EngineOptions
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


class LLM:
    """`LLM(model).generate(prompts, params)`, or `add` and `step` until what was added comes back.

    options: fields of `EngineOptions`, and what its scheduler takes beside them (`Scheduler`); on a GPU max_num_seqs
    and token_budget are 256 and 8,192, or what its memory allows. handovers: what came of prefill.
    Any thread may add, cancel, generate and stream, also during a forward pass; steps happen one at a time. A step that
    Ctrl-C ends fails the requests that had begun, once the next step finds it so; those that wait stay queued.
    """

    def __init__(self, model: Transformer, **options):
        check_model(model)
        settings, scheduling = EngineOptions.of(options)
        check_scheduling(settings.scheduler, scheduling)
        settings = prepare_model(model, settings)
        self.model, self.tokenizer, self.clock = model, settings.tokenizer, settings.clock
        self.device = weight_of(model).device
        self.adapters, self.backend = settings.adapters, settings.backend
        scheduling = gpu_limits(model, scheduling) | scheduling
        self.pool = build_pool(model, settings, scheduling)
        fits = {} if self.adapters is None else {"adapters_fit": self.adapters.has_room}
        self.scheduler = settings.scheduler(self.pool, **scheduling, **fits)
        self.runner = build_runner(model, self.scheduler, settings)
        self.cache = self.runner.cache
        self.speculation = build_speculation(model, settings)
        self.requests = RequestTable(self.scheduler, self.speculation, model.config, settings)
        core = Pipelined if self.runner.stages > 1 else AsyncScheduling if settings.async_scheduling else EngineCore
        self.core = core(self.runner, self.requests, settings)
        self.records = self.core.records
        self.stepping = Lock()  # a step at a time; nothing else needs one, see `requests/table.py`
        self.handovers = None if settings.prefill is None else settings.prefill.attach(self, model.config)
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
        """One output per prompt, in order. Refuses all if one cannot run; warns of those that fail (`Output.error`).

        params, adapter: for all, or one for each. progress: a bar; None = on a terminal, if there are many prompts.
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
        outputs = [output_of(request) for request in mine]
        if failed := [output.error for output in outputs if output.error]:
            warnings.warn(f"{len(failed)} of {len(outputs)} requests failed, the first: {failed[0]}", stacklevel=2)
        return outputs

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
        adapter: the name of one; None = the base alone. ValueError for what can never run, RuntimeError while the queue
        is full (`max_waiting`)."""
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
        """One forward pass, if there is anything to compute. Returns what ended since the last call, each once, but not
        what a `generate` or a `stream` added."""
        self.advance()
        with self.stepping:
            return [output_of(self.requests.ended.popleft()) for _ in range(len(self.requests.ended))]

    def advance(self) -> None:
        """One step, whatever it computes; what ends in it waits for `step`. One thread at a time is in here."""
        with self.stepping, gpu_of(self.device):
            if self.interrupted:
                self.core.recover(self.interrupted)
            self.interrupted = "the step was interrupted"
            try:
                self.core.step()
            except BaseException as failure:
                self.interrupted = f"the step was interrupted by {type(failure).__name__}: {failure}"
                raise
            self.interrupted = ""
