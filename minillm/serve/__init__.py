"""Serving: many requests through one model, with paged keys and values, shared prefixes and continuous batching.

llm = LLM(model, tokenizer=tokenizer)
for output in llm.generate(["def ", "class "], SamplingParams(max_tokens=32, n=2, temperature=0.8)): ...

What it is compared with has its face: `Naive`, `StaticBatches`, `TimerBatches`; `replay` sends a trace through any.
"""

from minillm.serve.blocks import BlockPool, Prefix
from minillm.serve.engine import LLM
from minillm.serve.recorder import StepRecord
from minillm.serve.request import Answer, Output, Timing
from minillm.serve.sampling import SamplingParams, Token
from minillm.serve.scheduler import POLICIES, Scheduler
from minillm.serve.sequence import Plan, Sequence, State
from minillm.serve.trace import Arrival, VirtualClock, replay, skewed, summary, uniform

__all__ = [
    "LLM",
    "POLICIES",
    "Answer",
    "Arrival",
    "BlockPool",
    "Output",
    "Plan",
    "Prefix",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "State",
    "StepRecord",
    "Timing",
    "Token",
    "VirtualClock",
    "replay",
    "skewed",
    "summary",
    "uniform",
]
