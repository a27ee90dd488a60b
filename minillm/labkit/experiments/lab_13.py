"""Lab 13's measurements: a decoder made of the learner's parts, waste, shared prefixes, forks, evictions, block sizes.

Everything runs the committed target model in this process. Blocks, tokens and copies are counted; times are shown.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minillm.data import Tokenizer, corpus
from minillm.labkit.experiments.lab_02 import one_thread
from minillm.model import Transformer, load_hf
from minillm.model.generate import KVCache, folder_of, generate
from minillm.model.paged import block_by_block, paged_attention
from minillm.predict import paging as predict
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


# A decoder made of the learner's parts.


@dataclasses.dataclass
class Parts:
    """What the exercises built."""

    slot_mapping: Callable
    pool: Any
    paged_attention: Callable
    block_keys: Callable
    find_prefix: Callable
    prepare_write: Callable


class SmallEngine:
    """One sequence after the other through the target model, keys and values in blocks that the learner's parts keep.

    passes: tokens put through the model in each pass. copies: (source, target) of every block copied.
    """

    def __init__(self, parts: Parts, num_blocks: int, block_size: int):
        self.parts, self.block_size, config = parts, block_size, target().config
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.memory = torch.full(shape, float("nan"))  # nobody may read what nobody wrote
        self.pool, self.cache, self.passes, self.copies = parts.pool(num_blocks), {}, [], []

    def prefill(self, prompt: list[int]) -> tuple[list[int], Tensor]:
        """(block table, logits after the last token), from as many cached blocks as the prompt allows."""
        from minillm.labkit.labs.lab_13_prefix import Entry

        size = self.block_size
        keys = self.parts.block_keys(prompt, size)
        table = list(self.parts.find_prefix(prompt, keys, self.cache, size))
        hit = len(table) * size
        for block in table:
            self.pool.share(block)
        table += [self.pool.allocate() for _ in range(predict.blocks_for(len(prompt), size) - len(table))]
        logits = self._pass(table, prompt[hit:], hit)
        for index, key in enumerate(keys):
            tokens = tuple(prompt[index * size : (index + 1) * size])
            self.cache.setdefault(key, Entry(table[index], tokens, table[index - 1] if index else None))
        return table, logits

    def fork(self, table: list[int]) -> list[int]:
        """One holder more of every block of the table."""
        for block in table:
            self.pool.share(block)
        return list(table)

    def decode(self, table: list[int], position: int, token: int) -> Tensor:
        """Logits after one more token."""
        self.parts.prepare_write(table, position, self.pool, self._copy, self.block_size)
        return self._pass(table, [token], position)

    def answer(self, prompt: list[int], count: int, first: int | None = None, table=None) -> list[int]:
        """Greedy tokens. first, table: go on from a fork with this first token instead of the likeliest."""
        if table is None:
            table, logits = self.prefill(prompt)
            first = int(logits.argmax())
        tokens = [first]
        while len(tokens) < count:
            position = len(prompt) + len(tokens) - 1
            tokens.append(int(self.decode(table, position, tokens[-1]).argmax()))
        return tokens

    @one_thread()
    @torch.no_grad()
    def _pass(self, table: list[int], tokens: list[int], start: int) -> Tensor:
        slots = torch.tensor(self.parts.slot_mapping(table, start, len(tokens), self.block_size))
        self.passes.append(len(tokens))

        def attend(q, k, v, *, layer, positions, window):
            k_pool, v_pool = self.memory[:, layer]
            k_pool.flatten(0, 1)[slots], v_pool.flatten(0, 1)[slots] = k[0].transpose(0, 1), v[0].transpose(0, 1)
            rows = q[0].transpose(0, 1)  # [tokens, heads, head_dim]
            y = [self.parts.paged_attention(row, k_pool, v_pool, table, start + i + 1) for i, row in enumerate(rows)]
            return torch.stack(y, 1)[None]

        positions = torch.arange(start, start + len(tokens))
        return target()(torch.tensor([tokens]), positions, attention=attend)[0, -1]

    def _copy(self, source: int, copied: int) -> None:
        self.copies.append((source, copied))
        self.memory[:, :, copied] = self.memory[:, :, source]


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
    llm = _engine(block_size, num_blocks or slots // block_size, record_blocks=True, prefix_cache=False)
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


def _engine(block_size: int, num_blocks: int, **options) -> LLM:
    return LLM(target(), block_size=block_size, num_blocks=num_blocks, token_budget=4096, **options)


# Sharing.


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
    llm = _engine(block_size, 8192 // block_size, record_blocks=True, prefix_cache=cache)
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
    llm = _engine(block_size, 48, record_blocks=True)
    params = SamplingParams(answer, temperature=1.0, seed=7, n=samples, ignore_eos=True)
    [output] = llm.generate([cut(prompt, 3)], params)
    alone = [
        _engine(block_size, 48).generate([cut(prompt, 3)], dataclasses.replace(params, n=1, seed=7 + i))[0]
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
    llm = _engine(block_size, num_blocks, record_blocks=True)
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


# Block sizes.


@one_thread()
def attention_seconds(block_size: int, context: int = 480, repeats: int = 15) -> dict[str, float]:
    """Median seconds per sequence of one layer's attention of one query, blocks scattered over the pool."""
    config, draw = target().config, torch.Generator().manual_seed(0)
    blocks, count = predict.blocks_for(context, block_size), 8
    shape = (blocks * count, block_size, config.num_kv_heads, config.head_dim)
    k_pool, v_pool = (torch.randn(shape, generator=draw) for _ in range(2))
    q = torch.randn(count, config.num_heads, config.head_dim, generator=draw)
    table = torch.randperm(blocks * count, generator=draw).view(count, blocks)
    found = {}
    for name, some, options in (("copied together", count, {}), ("block by block", 1, {"backend": block_by_block})):
        seconds = []
        for _ in range(repeats if some > 1 else 2):
            began = time.perf_counter()
            paged_attention(q[:some], k_pool, v_pool, table[:some], [1] * some, [context] * some, **options)
            seconds.append((time.perf_counter() - began) / some)
        found[name] = sorted(seconds)[len(seconds) // 2]
    return found


@cache
def sweep(sizes: Sequence[int] = (1, 4, 16, 64, 256), prefix: int = 200, own: int = 40, requests: int = 3):
    """By block size: waste share of `mixed` requests, tokens of a prefix that a hit covers, attention's time."""
    rows = []
    for size in sizes:
        wasted = waste(size, count=8, num_blocks=6144 // size)
        shared = share(prefix, own, requests, size, answer=2, compare=False)
        rows.append(
            {
                "block_size": size,
                "waste": 1 - wasted["filled"] / wasted["held"],
                "predicted_unused": predict.mean_unused_slots(size),
                "unused": sum(wasted["unused"]) / len(wasted["unused"]),
                "hit": shared["hit"] // (requests - 1),
                "hit_predicted": predict.cacheable_tokens(prefix, prefix + own, size),
                "blocks": sum(predict.blocks_for(length, size) for length in wasted["lengths"]),
                "attention_s": attention_seconds(size),
            }
        )
    return rows


def records_json(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Records as JSON, without times."""
    return [{k: v for k, v in dataclasses.asdict(r).items() if k not in ("started", "seconds")} for r in records]


# The wrong block.


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
