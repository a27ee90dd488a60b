"""Lab 13's small engine: the learner's parts under the committed target model, one sequence after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.checks_prefix import Entry
from course.lab13_paged_attention.experiments import cut, naive, target
from course.shared.measuring import one_thread


@dataclass
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
        self.memory = torch.full(shape, float("nan"))  # what was not written must not be read
        self.pool, self.cache, self.passes, self.copies = parts.pool(num_blocks), {}, [], []

    def prefill(self, prompt: list[int]) -> tuple[list[int], Tensor]:
        """(block table, logits after the last token), from as many cached blocks as the prompt allows."""
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


def three_requests(parts: Parts) -> tuple[SmallEngine, list[int], list[int], int, dict, dict]:
    """A prompt, another with the same beginning, a fork of the first: (engine, both prompts, the prompt's first block,
    tokens of each, tokens of the plain loop)."""
    engine = SmallEngine(parts, num_blocks=24, block_size=8)
    prompt = cut(27, 1)
    sibling = prompt[:18] + cut(6, 5)
    table, logits = engine.prefill(prompt)
    first, second = logits.topk(2).indices.tolist()
    fork = engine.fork(table)
    found = {
        "prompt": engine.answer(prompt, 4, first, table),
        "fork": engine.answer(prompt, 4, second, fork),
        "sibling": engine.answer(sibling, 4),
    }
    expected = {
        "prompt": naive(prompt, 4),
        "fork": [second, *naive([*prompt, second], 3)],
        "sibling": naive(sibling, 4),
    }
    return engine, prompt, sibling, table[0], found, expected
