"""Lab 13's broken engines: four real bugs of paged serving, each as small as it was, on one and the same traffic."""

import random
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from unittest import mock

from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.experiments import naive, target
from course.shared.measuring import one_thread
from minillm.serve import LLM, BlockPool, Prefix, SamplingParams, Sequence
from minillm.serve.requests import request
from minillm.serve.run import build
from minillm.serve.schedule.blocks import cache_namespace

SIZE, STEPS = 16, 80


class FreesShared(BlockPool):
    """A released block is free, even if other tables hold it (mini-sglang, pull request 142)."""

    def release(self, blocks) -> None:
        for block in reversed(blocks):
            if self.references[block]:
                self.references[block] = 1
                super().release([block])


def _one_byte(self, parent, tokens) -> None:
    """Only the last byte of each token enters the key (vllm-mlx, pull request 444)."""
    _whole_tokens(self, parent, tuple(token & 0xFF if isinstance(token, int) else token for token in tokens))


def _whole_prompt(self, blocks: int, block_size: int) -> list[Prefix]:
    """A hit may cover the whole prompt, its last token, too (nano-vllm, pull request 199)."""
    all_but_one = (self.num_tokens - 1) // block_size
    return _full_blocks(self, self.num_tokens // block_size if blocks == all_but_one else blocks, block_size)


def _without_salt(adapter: str | None = None, salt: str | None = None) -> Prefix:
    """Tenants share (of this kind: vLLM, issue 44701)."""
    return cache_namespace(adapter)


_whole_tokens, _full_blocks = Prefix.__init__, Sequence.prefixes


def _bug(name: str) -> AbstractContextManager:
    """Patches that make every engine built and run inside the block have the bug."""
    return {
        "none": nullcontext,
        "frees shared blocks": lambda: mock.patch.object(build, "BlockPool", FreesShared),
        "one byte per token": lambda: mock.patch.object(Prefix, "__init__", _one_byte),
        "whole prompt from the cache": lambda: mock.patch.object(Sequence, "prefixes", _whole_prompt),
        "no salt in the key": lambda: mock.patch.object(request, "cache_namespace", _without_salt),
    }[name]()


ENGINES = {
    "A": "one byte per token",
    "B": "no salt in the key",
    "C": "frees shared blocks",
    "D": "whole prompt from the cache",
}


@dataclass(frozen=True)
class Findings:
    """wrong: requests whose tokens are not the plain loop's. hit: tokens taken from the cache, hit_expected: by hand.
    uncounted: blocks that more tables hold than are counted, at worst. empty_steps: nothing was computed though
    sequences were running. unfinished: requests after all steps."""

    wrong: int
    hit: int
    hit_expected: int
    uncounted: int
    empty_steps: int
    unfinished: int


def some(tokens: int, seed: int) -> list[int]:
    """Token ids that are the same on every machine."""
    return random.Random(seed).choices(range(300, 3800), k=tokens)


@one_thread()
def run(bug: str = "none") -> Findings:
    """Seven requests through an engine with the bug."""
    beginning = some(40, 21)
    alike = [token ^ 0x100 * (index % 2) for index, token in enumerate(beginning)]  # other tokens, the same last bytes
    whole = beginning + some(8, 30)
    first = [(whole, "red", 32)]
    second = [
        (beginning + some(8, 31), "red", 2),
        (whole, "red", 12),
        (alike + some(8, 32), "red", 12),
        (beginning + some(8, 33), "blue", 12),
    ]
    third = [(some(150, 34), None, 4), (some(150, 35), None, 4)]
    with ExitStack() as stack:
        stack.enter_context(_bug(bug))
        llm = LLM(target(), block_size=SIZE, num_blocks=24, token_budget=1024, record_blocks=True)
        asked, outputs = {}, []
        for wave, steps in ((first, 1), (second, 4), (third, STEPS)):
            for prompt, salt, answer in wave:
                params = SamplingParams(answer, ignore_eos=True)
                asked[llm.add(prompt, params, salt=salt)] = (prompt, answer)
            for _ in range(steps):
                if llm.unfinished:
                    outputs += llm.step()
        unfinished = llm.unfinished
        empty = llm.scheduler.step - len(llm.records)
    shared = predict.cacheable_tokens(40, 48, SIZE) + predict.cacheable_tokens(48, 48, SIZE)
    return Findings(
        wrong=sum(o.answers[0].ids != naive(*asked[o.request_id]) for o in outputs),
        hit=sum(o.hit for o in outputs),
        hit_expected=shared,
        uncounted=max(_uncounted(record) for record in llm.records),
        empty_steps=empty,
        unfinished=unfinished,
    )


def _uncounted(record) -> int:
    holders = Counter(block for table in record.tables.values() for block in table)
    return sum(record.references[block] < count for block, count in holders.items())


def findings() -> dict[str, Findings]:
    """A sound engine, then each of ENGINES."""
    return {"sound": run(), **{name: run(bug) for name, bug in ENGINES.items()}}
