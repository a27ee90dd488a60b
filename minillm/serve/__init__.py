"""Serving: many requests through one model, with paged keys and values, shared prefixes and continuous batching.

llm = LLM(model, tokenizer=tokenizer)
for output in llm.generate(["def ", "class "], SamplingParams(max_tokens=32, n=2, temperature=0.8)): ...

Reading order:
1. `tiny.py`        the whole engine on one page: block tables, token budget, continuous batching, preemption
2. `blocks.py`      which sequence holds which block; prefix cache, eviction, copy on write, swapping
3. `scheduler.py`   which tokens the next forward pass computes, and which sequence is preempted when blocks run out
4. `engine.py`      add, step, cancel, stream; its parts are `unfinished.py` (how a request arrives and ends),
                   `model_runner.py` (one forward pass), `next_tokens.py` (from logits to answers), `sampling.py` (of
                   one sequence; `sampler.py` of a batch, on the device, with `selection.py`)
5. `minillm/model/paged/cache.py`   attention over blocks anywhere in memory; `paged/` lists who computes it
Beside the path: `decode_graphs.py` (steps of single tokens as CUDA graphs), `async_scheduling.py` (the next step is
prepared while the device computes), `fused.py` and `compiled.py` (how the model computes), `async_engine.py` (`async
for` over answers), `speculate/` (draft tokens), `trace.py` (`replay` sends the same requests through any engine).
"""

from minillm.serve.async_engine import AsyncLLM
from minillm.serve.blocks import BlockPool, Prefix
from minillm.serve.engine import LLM
from minillm.serve.recorder import StepRecord
from minillm.serve.request import Answer, Delta, Output, Timing
from minillm.serve.sampling import SamplingParams, Token
from minillm.serve.scheduler import POLICIES, Scheduler
from minillm.serve.sequence import Plan, Sequence, State
from minillm.serve.tiny import TinyLLM
from minillm.serve.trace import Arrival, VirtualClock, replay, skewed, summary, uniform

__all__ = [
    "LLM",
    "POLICIES",
    "Answer",
    "Arrival",
    "AsyncLLM",
    "BlockPool",
    "Delta",
    "Output",
    "Plan",
    "Prefix",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "State",
    "StepRecord",
    "Timing",
    "TinyLLM",
    "Token",
    "VirtualClock",
    "replay",
    "skewed",
    "summary",
    "uniform",
]
