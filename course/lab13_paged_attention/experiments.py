"""Lab 13's measurements, on the committed target model in this process: what reservations and what blocks waste.

The learner's parts at work: `experiments_engine.py`. Prefixes, forks, evictions: `experiments_sharing.py`. Block sizes:
`experiments_sizes.py`. Blocks, tokens and copies are counted; times are only shown.
"""

import dataclasses
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from course.shared.measuring import one_thread
from minillm.data import Tokenizer, corpus
from minillm.model import Transformer, load_hf
from minillm.model.generate import KVCache, folder_of, generate
from minillm.serve import LLM, SamplingParams, StepRecord


@cache
def target() -> Transformer:
    """The committed target model in float32."""
    return load_hf(folder_of("target"), dtype=torch.float32)


@cache
def code() -> tuple[int, ...]:
    """Token ids of some held-out files of the standard library, one after the other."""
    tokenizer = Tokenizer.load(folder_of("target"))
    texts = [document.text for document in corpus().documents("validation")][:12]
    return tuple(token for ids in tokenizer.encode_batch(texts) for token in ids.tolist())


def cut(tokens: int, where: int) -> list[int]:
    """A piece of code of so many tokens; another `where`, another piece."""
    start = where * 997 % (len(code()) - tokens)
    return list(code()[start : start + tokens])


def naive(prompt: list[int], answer: int) -> list[int]:
    """The answer of the plain loop with a contiguous cache."""
    return list(_naive(tuple(prompt), answer))


@cache
def _naive(prompt: tuple[int, ...], answer: int) -> tuple[int, ...]:
    return tuple(generate(target(), list(prompt), answer))


# Waste.


def mixed(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Requests of code with short and long prompts and answers, as many tokens as were asked for."""
    draw = random.Random(seed)
    return [
        (cut(draw.randint(8, 160), draw.randrange(1000)), SamplingParams(draw.randint(4, 48), ignore_eos=True))
        for _ in range(count)
    ]


@one_thread()
def waste(block_size: int, count: int = 24, num_blocks: int | None = None) -> dict[str, Any]:
    """Slots held and filled, step by step, while `mixed` requests are served.

    unused: unused slots of each sequence after each step. held, filled: sums over the last steps of all sequences.
    running: the most sequences at once.
    """
    slots = 4 * target().config.max_seq_len  # what four reservations of the whole context would take
    llm = engine(block_size, num_blocks or slots // block_size, record_blocks=True, prefix_cache=False)
    requests = mixed(count)
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    unused, held, filled = [], 0, 0
    for record in llm.records:
        computed = {name: start + tokens for name, start, tokens in record.batch}
        for name, table in record.tables.items():
            if name in computed:
                unused.append(len(table) * block_size - computed[name])
                held, filled = held + len(table) * block_size, filled + computed[name]
    lengths = [len(o.prompt) + len(o.answers[0].tokens) - 1 for o in outputs]
    return {
        "block_size": block_size,
        "unused": unused,
        "held": held,
        "filled": filled,
        "lengths": lengths,
        "running": max(record.running for record in llm.records),
        "blocks": llm.pool.total,
        "preemptions": sum(o.preemptions for o in outputs),
        "correct": all(o.error is None for o in outputs),
    }


@one_thread()
@torch.no_grad()
def reserve(slots: int, count: int = 4) -> tuple[list[int], list[int]]:
    """(slots written, tokens of prompt and answer but the last) of the first `mixed` requests, each in a contiguous
    cache of so many slots, counted in the cache itself."""
    model, written, lengths = target(), [], []
    for prompt, params in mixed(count):
        cache = KVCache(model.config, slots)
        cache.keys.fill_(float("nan"))
        tokens, start = list(prompt), 0
        for _ in range(params.max_tokens):
            fresh = torch.tensor([tokens[start:]])
            logits = model(fresh, torch.arange(start, len(tokens)), attention=cache)[0, -1]
            start = len(tokens)
            tokens.append(int(logits.argmax()))
        written.append(int((~cache.keys[0, 0, 0, :, 0].isnan()).sum()))
        lengths.append(len(prompt) + params.max_tokens - 1)
    return written, lengths


def engine(block_size: int, num_blocks: int, **options) -> LLM:
    """minillm's engine on the target model, its budget so large that prompts are never cut."""
    return LLM(target(), block_size=block_size, num_blocks=num_blocks, token_budget=4096, **options)


def records_json(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Records as JSON, without times."""
    return [{k: v for k, v in dataclasses.asdict(r).items() if k not in ("started", "seconds")} for r in records]
