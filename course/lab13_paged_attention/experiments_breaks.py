"""Lab 13's broken engines: four real bugs of paged serving, each as small as it was, on one and the same traffic."""

import random
from collections import Counter
from dataclasses import dataclass

from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.experiments import naive, target
from course.shared.faults import planted
from course.shared.faults import serving as faults
from course.shared.measuring import one_thread
from minillm.serve import LLM, SamplingParams

SIZE, STEPS = 16, 80


BUGS = {
    "none": (),
    "frees shared blocks": (faults.FREED_WHILE_SHARED,),
    "one byte per token": (faults.ONE_BYTE,),
    "whole prompt from the cache": (faults.WHOLE_PROMPT,),
    "no salt in the key": (faults.NO_SALT,),
}
ENGINES = {
    "A": "one byte per token",
    "B": "no salt in the key",
    "C": "frees shared blocks",
    "D": "whole prompt from the cache",
}


@dataclass(frozen=True)
class Findings:
    """wrong: requests whose tokens are not the plain loop's. hit: tokens taken from the cache, also by requests that
    never end, hit_expected: by hand. uncounted: blocks that more tables hold than are counted, at worst. empty_steps:
    nothing was computed though sequences were running. unfinished: requests after all steps."""

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
    with planted(BUGS[bug]):
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
        stuck = sum(sequence.hit_tokens for sequence in llm.scheduler.running)
        empty = llm.scheduler.step - len(llm.records)
    shared = predict.cacheable_tokens(40, 48, SIZE) + predict.cacheable_tokens(48, 48, SIZE)
    return Findings(
        wrong=sum(o.answers[0].ids != naive(*asked[o.request_id]) for o in outputs),
        hit=sum(o.hit for o in outputs) + stuck,
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
