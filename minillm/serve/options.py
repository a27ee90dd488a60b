"""What an engine can be asked for beside its model: one object, which travels from `LLM` to whoever builds a part."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from minillm.data import Tokenizer
from minillm.model.hf.generation_config import GenerationDefaults
from minillm.model.paged import Backend
from minillm.quantize.formats import Format
from minillm.quantize.kv import kv_format_named
from minillm.serve.numbers import check_whole
from minillm.serve.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from minillm.adapters.store import AdapterStore
    from minillm.serve.speculate.adaptive import AdaptiveK
    from minillm.serve.speculate.proposal import Proposer


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineOptions:
    """tokenizer: for prompts and stops that are text. generation: what the model's folder says, see `load`. num_blocks:
    None = what `gpu_memory_utilization` allows, see `memory.pool_sizes`. num_host_blocks: to swap to; None = as many as
    the host has room for, if preemption="swap". backend: of `paged_attention`; None = `default_backend`: the Triton
    kernel on a CUDA GPU, on a CPU the C++ kernel. records: the last `keep_records` steps; record_blocks adds every
    block table (costs time and memory). proposer: drafts tokens that the model only checks, k in a pass; the tokens'
    distribution is the same. fused: see `optimise.fuse`, which changes how the model computes; None = on a CUDA GPU.
    compile: blocks through torch.compile, see `run/optimise.py`: True, or the name of one of its backends. graphs:
    whether steps of single tokens are replayed, see `run/decode_graphs.py`; None = on a CUDA GPU whose backend reads
    keys where they lie. warm_up: compile kernels and record graphs now and not while the first requests wait, see
    `run/warm_up.py`; None = on a CUDA GPU. async_scheduling: the host prepares a step while the device computes the one
    before it, see `run/async_scheduling.py`. kv_dtype: "int8" or "fp8" keeps keys and values in 8 bits with a scale for
    each token and head (`minillm/model/paged/quantized.py`); None = as the model computes them. windows_apart: where
    some layers have a sliding window and others see everything, the former have blocks of their own, which are given
    back once no token sees them; False = all layers share a block, as with prefill. adapters: folders of peft's by
    name, or an `AdapterStore` with limits of its own; a request names one. prefill: a `PrefillPool`, or where there is
    one (`PrefillAt`), that computes the keys of long prompts, see `minillm/serve/transfer`. scheduler: the class, or
    what makes one. ValueError, with the value and the fix, for what no engine can work with.
    """

    tokenizer: Tokenizer | None = None
    generation: GenerationDefaults | None = None
    block_size: int = 16
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_cache: bool = True
    backend: Backend | None = None
    clock: Callable[[], float] = time.perf_counter
    keep_records: int = 10_000
    record_blocks: bool = False
    proposer: "Proposer | None" = None
    k: "int | str | AdaptiveK" = 4
    fused: bool | None = None
    compile: bool | str = False
    graphs: bool | None = None
    warm_up: bool | None = None
    async_scheduling: bool = False
    kv_dtype: str | None = None
    windows_apart: bool = True
    adapters: "AdapterStore | Mapping[str, str | Path] | None" = None
    prefill: Any = None
    scheduler: Callable[..., Scheduler] = Scheduler

    def __post_init__(self):
        check_whole("block_size", self.block_size, 1)
        check_whole("keep_records", self.keep_records, 0)
        if self.tokenizer is not None and not hasattr(self.tokenizer, "stream"):
            raise ValueError(f"tokenizer {self.tokenizer!r} must be a Tokenizer, as `Tokenizer.load()`, or None.")
        if not callable(self.clock):
            raise ValueError(f"clock {self.clock!r} must be a function that returns seconds, as time.perf_counter.")
        if self.backend is not None and not callable(self.backend):
            what = "must be an attention function, as `model.paged.gathered`, or None."
            raise ValueError(f"backend {self.backend!r} {what}")
        lacking = [
            name for name in ("propose", "observe", "forget", "wants_hidden") if not hasattr(self.proposer, name)
        ]
        if self.proposer is not None and lacking:
            what = f"has no {lacking[0]}: it must be a Proposer, as `NGram()`, or None."
            raise ValueError(f"proposer {self.proposer!r} {what}")
        if self.async_scheduling not in (True, False):
            raise ValueError(f"async_scheduling {self.async_scheduling!r} must be True or False.")
        if self.async_scheduling and self.proposer is not None:
            what = "drafts need tokens that are not read yet, leave one out."
            raise ValueError(f"async_scheduling with a proposer: {what}")
        if self.prefill is not None and not hasattr(self.prefill, "attach"):
            raise ValueError(f"prefill {self.prefill!r} must be a PrefillPool, or PrefillAt('HOST:PORT'), or None.")

    @classmethod
    def of(cls, given: dict[str, Any]) -> tuple[Self, dict[str, Any]]:
        """(those of the engine, those of its scheduler)."""
        own = {each.name: given[each.name] for each in fields(cls) if each.name in given}
        return cls(**own), {name: value for name, value in given.items() if name not in own}

    @property
    def kv_format(self) -> Format | None:
        return kv_format_named(self.kv_dtype, self.backend)
