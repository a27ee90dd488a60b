"""Serving: many requests through one model, with paged keys and values, shared prefixes and continuous batching.

    llm = LLM(model, tokenizer=tokenizer)
    for output in llm.generate(["def ", "class "], SamplingParams(max_tokens=32, n=2, temperature=0.8)): ...

Reading order:
1. `tiny.py`                    the engine on one page: block tables, token budget, continuous batching, preemption
2. `schedule/blocks.py`         which sequence holds which block; prefix cache, eviction, copy on write, swapping
3. `schedule/scheduler.py`      which tokens the next forward pass computes, of which `schedule/sequence.py`, and which
                                sequence is preempted when blocks run out (`schedule/policies.py`); what it holds
                                (`schedule/held.py`); of tenants (`schedule/share.py`) `schedule/fair.py` says who is
                                next, and `schedule/even_steps.py` how long the prompts of one may make others wait
4. `engine.py`                  add, step, cancel, stream
5. `requests/request.py`        a `Request`, asked for as in `requests/params.py`, and its `Sample`s: each is a sequence
                                of 3 whose tokens behind the prompt are the answer; `requests/table.py` holds all
                                requests that have not ended
6. `run/core.py`                a step in three parts: plan, execute, finish
7. `run/step.py`                the inputs of a step from live samples, as the plain arrays of `run/step_inputs.py`
8. `run/model_runner.py`        executes them: moves blocks, one forward pass and its sampling
9. `sample/next_tokens.py`      gives every sample its token: `Sample.accept`
10. `minillm/model/paged`       attention over blocks anywhere in memory
A token lives in one place: `Sample.tokens`. `Sample.accept` appends it, once the host knows it.
A mechanism alone:
- prefix cache: `schedule/blocks.py`, `schedule/sequence.py`
- sampler: `sample/reference.py` (one sequence), `sample/batch.py` (all of a step on the device), `sample/selection.py`
  (top-p without sorting a vocabulary)
Beside the path: `options.py` (what an engine can be asked for), `checks.py` (what it refuses), `requests/output.py`
(what a user gets of a request), `schedule/drafts.py` (the blocks of draft tokens), `sample/isolate.py` (a row whose
sampling raises), `sample/allowed.py` (ids that a first token may be),
`run/decode_graphs.py` (steps of single tokens as CUDA graphs), `run/async_scheduling.py` (the next step is prepared
while the device computes), `run/optimise.py` (fewer kernels), `run/build.py`, `run/memory.py` and `run/warm_up.py`
(how many blocks fit, what is compiled beforehand), `run/adapters.py` (a request's own adapter, of many beside one
model), `requests/prompts.py` (a prompt's tokens), `requests/recovery.py` (after a step that was interrupted),
`run/table_rows.py` (which row of the block tables a sequence has), `run/penalties.py` and `sample/seen.py` (which
tokens a penalty is for), `load.py` (a folder as an engine),
`async_engine.py` (`async for` over answers), `speculate/` (draft tokens), `ranks/` (one engine over several ranks; with
stages `run/pipelined.py` has a step in each of them).
`minillm/bench/load.py` sends the same requests through any engine.
"""

from minillm.serve.async_engine import AsyncLLM
from minillm.serve.engine import LLM
from minillm.serve.options import EngineOptions
from minillm.serve.ranks.engine import over_ranks
from minillm.serve.requests.output import Answer, Delta, Output, Timing
from minillm.serve.requests.params import SamplingParams, Token
from minillm.serve.requests.summary import summary
from minillm.serve.run.recorder import StepRecord
from minillm.serve.schedule.blocks import BlockPool, Prefix
from minillm.serve.schedule.policies import POLICIES
from minillm.serve.schedule.scheduler import Scheduler
from minillm.serve.schedule.sequence import Plan, Sequence, State
from minillm.serve.tiny import TinyLLM

__all__ = [
    "LLM",
    "POLICIES",
    "Answer",
    "AsyncLLM",
    "BlockPool",
    "Delta",
    "EngineOptions",
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
    "over_ranks",
    "summary",
]
