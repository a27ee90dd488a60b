"""A small engine that answers a few requests with patches planted, beside the naive loop with minillm's own code.

    served = serve(Traffic((Asked(prompt, SamplingParams(12)),), {"block_size": 8}), patches)
    served.wrong, served.hit, served.records

Time is counted in steps of the engine, so that a run is the same on every machine. The model is so small that a run
takes a tenth of a second, and its weights are random: its answers are no language, but each follows from every key and
value that it read, so that a wrong one shows within a token or two.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch

from course.shared.faults.patches import Patch, planted
from course.shared.measuring import one_thread
from minillm.model import ModelConfig, Transformer
from minillm.model.draw import Draw, sample_seed
from minillm.serve import LLM, Output, SamplingParams, StepRecord
from minillm.serve.sample.reference import sample

SMALL = ModelConfig(512, 32, 64, 2, 4, 2, max_seq_len=128, init_std=0.2)
ENGINE = {"block_size": 8, "num_blocks": 64, "token_budget": 64, "max_num_seqs": 8, "reserve": 0}
MOST_STEPS = 600


@dataclass(frozen=True)
class Asked:
    """A request. at: the step before which it arrives; leaves: the step before which its client goes away."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at: int = 0
    leaves: int | None = None
    salt: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class Traffic:
    """engine: options of `LLM` other than ENGINE's. proposer: makes one for an engine. steps: after which the run ends,
    whatever still waits: a server that does nothing for so long has failed."""

    asked: tuple[Asked, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)
    model: Transformer | None = None
    proposer: Callable[[], Any] | None = None
    steps: int = MOST_STEPS

    def alone(self, number: int) -> "Traffic":
        """One of its requests with the engine to itself."""
        return replace(self, asked=(replace(self.asked[number], at=0, leaves=None),))

    @property
    def low_precision(self) -> bool:
        """Whether rounding is so coarse that equal tokens cannot be asked for."""
        return self.model is not None and self.model.embedding.weight.dtype == torch.bfloat16

    def with_engine(self, **options: Any) -> "Traffic":
        return replace(self, engine={**self.engine, **options})


@dataclass(frozen=True, eq=False)
class Served:
    """What came of each request, by its place in the traffic. ended: the step in which it ended; None = it did not.

    seats: sequences that the scheduler counts when everything is over; used: blocks with a holder then; copied: blocks
    that were copied on write; steps: that the engine was asked for.
    """

    traffic: Traffic
    patches: tuple[Patch, ...]
    outputs: tuple[Output | None, ...]
    ended: tuple[int | None, ...]
    records: tuple[StepRecord, ...]
    seats: int
    used: int
    copied: int
    steps: int

    def again(self, traffic: Traffic) -> "Served":
        """Other traffic through the same code, faults included."""
        return serve(traffic, self.patches)

    def again_with(self, patches: Sequence[Patch]) -> "Served":
        """The same traffic through other code."""
        return serve(self.traffic, patches)

    def answers(self, number: int) -> list[list[int]]:
        output = self.outputs[number]
        return [] if output is None else [answer.ids for answer in output.answers]

    def right(self, number: int) -> list[list[int]]:
        """What the naive loop answers."""
        asked = self.traffic.asked[number]
        return [loop(self.traffic.model or small(), asked, index) for index in range(asked.params.n)]

    @cached_property
    def wrong(self) -> list[int]:
        """Of each request, tokens of its answers that are not the naive loop's; of one that was cancelled, as far as
        it came."""
        return self.wrong_of(range(len(self.traffic.asked)))

    def wrong_of(self, numbers: Iterable[int]) -> list[int]:
        """The same of some requests."""
        found = []
        for number in numbers:
            right, cut = self.right(number), self.traffic.asked[number].leaves is not None
            mine = self.answers(number) or [[] for _ in right]
            found.append(sum(_differing(*pair, cut) for pair in zip(mine, right, strict=True)))
        return found

    @property
    def hit(self) -> list[int]:
        """Tokens of each request that were taken from the cache."""
        return [0 if output is None else output.hit for output in self.outputs]

    @property
    def details(self) -> list[int]:
        """Numbers in which two wrong runs differ: of all answers, and of the plans of all steps."""
        answers = [self.answers(number) for number in range(len(self.outputs))]
        plans = [record.batch for record in self.records]
        return [crc32(repr(answers).encode()), crc32(repr(plans).encode()), self.seats]

    @property
    def unfinished(self) -> int:
        return self.ended.count(None)

    @property
    def errors(self) -> int:
        failed = sum(output is not None and output.error is not None for output in self.outputs)
        return failed + sum(record.error is not None for record in self.records)

    def uncounted(self) -> int:
        """Blocks that more sequences hold than are counted, in the worst step. Needs record_blocks=True."""
        return max((_uncounted(record) for record in self.records), default=0)

    def steps_of(self, number: int) -> list[int]:
        """The steps in which a request took part."""
        name = f"{number}/"
        return [record.step - 1 for record in self.records if any(entry[0].startswith(name) for entry in record.batch)]

    def longest_gap(self, number: int) -> int:
        """The most steps from one of its tokens to the next."""
        places = self.steps_of(number)
        return max((after - before for before, after in pairwise(places)), default=0)


def runs(make: Callable[[random.Random], Traffic]) -> Callable[[Sequence[Patch], int], Served]:
    """`Exhibit.run` for traffic that a seed draws."""
    return lambda patches, seed: serve(make(random.Random(seed)), patches)


@one_thread()
def serve(traffic: Traffic, patches: Sequence[Patch]) -> Served:
    """The traffic through an engine that is built and run with the patches planted."""
    with planted(patches):
        options = {**ENGINE, **traffic.engine}
        if traffic.proposer is not None:
            options["proposer"] = traffic.proposer()
        llm = LLM(traffic.model or small(), **options)
        outputs: dict[str, Output] = {}
        ended: dict[str, int] = {}
        step = 0
        while step < traffic.steps:
            for number, asked in enumerate(traffic.asked):
                if asked.at == step:
                    how = {"salt": asked.salt, "priority": asked.priority}
                    llm.add(list(asked.prompt), asked.params, request_id=str(number), **how)
                if asked.leaves == step and str(number) not in outputs:
                    llm.cancel(str(number))
            for output in llm.step():
                outputs[output.request_id], ended[output.request_id] = output, step
            step += 1
            if not llm.unfinished and all(asked.at < step for asked in traffic.asked):
                break
        names = [str(number) for number in range(len(traffic.asked))]
        return Served(
            traffic,
            tuple(patches),
            tuple(outputs.get(name) for name in names),
            tuple(ended.get(name) for name in names),
            tuple(llm.records),
            llm.scheduler.num_seqs,
            llm.pool.used,
            llm.pool.copied,
            step,
        )


@cache
def small() -> Transformer:
    return Transformer(SMALL, seed=2)


def tokens(draw: random.Random, count: int, vocab_size: int = SMALL.vocab_size) -> tuple[int, ...]:
    return tuple(draw.randrange(vocab_size) for _ in range(count))


def loop(model: Transformer, asked: Asked, index: int = 0) -> list[int]:
    """The naive loop: the whole sequence through the model for each token, no cache, no batch. index: of n samples."""
    return list(_loop(model, asked.prompt, asked.params, index))


@cache
def _loop(model: Transformer, prompt: tuple[int, ...], params: SamplingParams, index: int) -> tuple[int, ...]:
    ids, draw = list(prompt), Draw(sample_seed(params.seed or 0, index))
    with one_thread(), torch.inference_mode():
        while len(ids) < min(len(prompt) + params.max_tokens, model.config.max_seq_len):
            logits = model(torch.tensor([ids]))[0, -1].float()
            ids.append(sample(logits, params, ids, draw).id)
    return tuple(ids[len(prompt) :])


def _differing(mine: list[int], right: list[int], cut: bool) -> int:
    lengths = 0 if cut else abs(len(mine) - len(right))
    return lengths + sum(one != another for one, another in zip(mine, right, strict=False))


def _uncounted(record: StepRecord) -> int:
    holders = Counter(block for table in (record.tables or {}).values() for block in table)
    return sum(record.references[block] < count for block, count in holders.items())
