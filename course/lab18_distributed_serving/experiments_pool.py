"""Lab 18's hand-over in minillm's engine: a prefill pool in a process of its own, and what arrived from it."""

import random
from dataclasses import dataclass

import torch

from minillm.model import ModelConfig, load_hf
from minillm.model.generate import folder_of, generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.transfer import PrefillPool

ENGINE = {"num_blocks": 64, "block_size": 16, "prefix_cache": False}
PROMPT, ANSWER = 200, 8  # tokens


@dataclass(frozen=True)
class Pooled:
    """ids: greedy tokens of an engine with a prefill pool; alone: of a plain loop; layers: bytes that arrived of each
    layer; early: whether the first layer left before the last one was computed; shape: of the target."""

    ids: list[int]
    alone: list[int]
    received: int
    layers: tuple[int, ...]
    early: bool
    shape: ModelConfig


def with_a_pool() -> Pooled:
    """The committed target, and a pool of one rank that computes its prompts."""
    draw = random.Random(1)
    prompt = [draw.randrange(300, 3800) for _ in range(PROMPT)]
    model = load_hf(folder_of("target"), dtype=torch.float32)
    alone = list(generate(model, prompt, max_new_tokens=ANSWER, temperature=0.0))[-ANSWER:]
    with PrefillPool.spawn(folder_of("target"), dtype=torch.float32, min_tokens=64, **ENGINE) as pool:
        llm = LLM(model, prefill=pool, **ENGINE)
        ids = llm.generate([prompt], SamplingParams(max_tokens=ANSWER))[0].answers[0].ids
        side = llm.handovers
        (handed,) = side.handed_over
    early = any(receipt.began_early for receipt in side.receipts)  # the pool tells it once all has left
    return Pooled(ids, alone, handed.received, handed.nbytes, early, model.config)
