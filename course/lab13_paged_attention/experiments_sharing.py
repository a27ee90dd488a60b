"""Lab 13's sharing, measured: one prefix, samples of one prompt, chats in a small pool, and a wrong block."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from course.lab13_paged_attention.experiments import cut, engine, naive, target
from course.shared.measuring import one_thread
from minillm.model.draw import sample_seed
from minillm.model.generate import KVCache
from minillm.serve import SamplingParams


@one_thread()
def share(
    prefix: int,
    own: int,
    requests: int,
    block_size: int = 16,
    answer: int = 8,
    cache: bool = True,
    compare: bool = True,
) -> dict[str, Any]:
    """R requests with one prefix, the first a step before the others: what was computed, hit and held.

    passed: prompt tokens in the forward passes. blocks: different ones in all tables when all prompts are computed;
    held: entries of those tables. ttft: median seconds of the others. equal: their tokens are the plain loop's.
    """
    llm = engine(block_size, 8192 // block_size, record_blocks=True, prefix_cache=cache)
    prompts = [cut(prefix, 1) + cut(own, 50 + r) for r in range(requests)]
    params = SamplingParams(answer, ignore_eos=True)
    first = llm.add(prompts[0], SamplingParams(4 * answer, ignore_eos=True))  # still there when the others come
    outputs = llm.step()
    for prompt in prompts[1:]:
        llm.add(prompt, params)
    outputs += llm.step()
    then = llm.records[-1]
    while llm.unfinished:
        outputs += llm.step()
    others = [output for output in outputs if output.request_id != first]
    return {
        "computed": sum(len(p) for p in prompts) - sum(o.hit for o in outputs),
        "passed": sum(tokens for record in list(llm.records)[:2] for _, _, tokens in record.batch) - 1,
        "hit": sum(o.hit for o in others),
        "blocks": len({block for table in then.tables.values() for block in table}),
        "held": sum(len(table) for table in then.tables.values()),
        "holders": max(then.references),
        "ttft": sorted(o.timing.ttft for o in others)[len(others) // 2],
        "equal": all(o.answers[0].ids == naive(o.prompt, len(o.answers[0].ids)) for o in outputs) if compare else None,
    }


@one_thread()
def forks(prompt: int = 22, samples: int = 3, answer: int = 14, block_size: int = 4) -> dict[str, Any]:
    """n drawn samples of one prompt, beside n requests for one sample each with the same seeds: tokens and blocks."""
    llm = engine(block_size, 48, record_blocks=True)
    params = SamplingParams(answer, temperature=1.0, seed=7, n=samples, ignore_eos=True)
    [output] = llm.generate([cut(prompt, 3)], params)
    alone = [
        engine(block_size, 48).generate([cut(prompt, 3)], dataclasses.replace(params, n=1, seed=sample_seed(7, i)))[0]
        for i in range(samples)
    ]
    return {
        "records": list(llm.records),
        "copied": llm.pool.copied,
        "blocks": max(record.used for record in llm.records),
        "computed": output.computed,
        "prompt": len(output.prompt),
        "equal": [a.ids for a in output.answers] == [a.answers[0].ids for a in alone],
        "left": (llm.pool.free + llm.pool.cached, llm.pool.total),
    }


@one_thread()
def chats(num_blocks: int, users: int = 3, turns: int = 4, block_size: int = 8) -> dict[str, Any]:
    """Users who take turns, each sending all that was said so far and a little more: hits by turn, evictions."""
    llm = engine(block_size, num_blocks, record_blocks=True)
    talks = {user: cut(40, 10 + user) for user in range(users)}
    hits, prompts = [], []
    for turn in range(turns):
        for user, talk in talks.items():
            [output] = llm.generate([talk], SamplingParams(9, ignore_eos=True))
            hits.append(output.hit)
            prompts.append(len(talk))
            talks[user] = talk + output.answers[0].ids + cut(12, 100 + 10 * turn + user)
    return {
        "hits": hits,
        "prompts": prompts,
        "evicted": llm.pool.evicted,
        "records": list(llm.records),
        "free": (llm.pool.free, llm.pool.cached, llm.pool.used),
    }


@one_thread()
@torch.no_grad()
def same_tokens_elsewhere(block: int = 32) -> dict[str, Any]:
    """Keys and values of the same tokens after two beginnings of equal length, and after a longer one.

    By layer, the relative difference of keys and of values; and how far the next token's distribution moves (total
    variation) when one beginning is combined with the other's block.
    """
    model, same = target(), cut(block, 5)
    caches, after = {}, {}
    for name, beginning in (("here", cut(block, 1)), ("there", cut(block, 2)), ("later", cut(2 * block, 3))):
        tokens = beginning + same
        caches[name] = KVCache(model.config, len(tokens) + 1)
        model(torch.tensor([tokens]), torch.arange(len(tokens)), attention=caches[name])
        after[name] = len(beginning)

    def part(name: str, kind: str) -> Tensor:
        return getattr(caches[name], kind)[:, 0, :, after[name] : after[name] + block]

    def next_token(cache: KVCache) -> Tensor:
        last = torch.tensor([[cut(1, 9)[0]]])
        return model(last, torch.tensor([2 * block]), attention=cache)[0, -1].softmax(-1)

    differences = {
        f"{kind}, {name}": [
            float((a - b).norm() / a.norm()) for a, b in zip(part("here", kind), part(name, kind), strict=True)
        ]
        for name in ("there", "later")
        for kind in ("keys", "values")
    }
    right = next_token(caches["here"])
    for kind in ("keys", "values"):
        getattr(caches["here"], kind)[:, :, :, block : 2 * block] = getattr(caches["there"], kind)[
            :, :, :, block : 2 * block
        ]
    wrong = next_token(caches["here"])
    return differences | {"moved": float((right - wrong).abs().sum() / 2)}
