"""Which requests come when: the options of `python -m minillm load`, or a trace, as a list of arrivals."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minillm.bench.arrival_times import TraceLine, bursty_times, stretched
from minillm.bench.load import Arrival, arrivals
from minillm.serve.requests.params import SamplingParams


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of answers: (least, most) each, uniform between."""

    prompt: tuple[int, int] = (64, 64)
    answer: tuple[int, int] = (32, 32)

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """ "64:32", "16-128:8-64": prompt, then answer. ValueError for what is not."""
        try:
            prompt, answer = (_range(part) for part in text.split(":"))
        except ValueError:
            raise ValueError(f"--lengths {text}: write PROMPT:ANSWER in tokens, as 64:32 or 16-128:8-64") from None
        return cls(prompt, answer)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


@dataclass(frozen=True)
class Plan:
    """requests: how many. cv: spread of their gaps, see `bursty_times`; 1 is Poisson. prefix: tokens that prompts of a
    group share, of `groups`. tenants: each request comes from one of them by chance, in these shares. vocab_size: of
    prompts, which are random ids below it."""

    requests: int = 100
    lengths: Lengths = field(default_factory=Lengths)
    cv: float = 1.0
    prefix: int = 0
    groups: int = 1
    tenants: dict[str, float] = field(default_factory=dict)
    vocab_size: int = 256
    seed: int = 0

    def at(self, rate: float) -> list[Arrival]:
        """The plan at so many requests per second. The same seed asks for the same prompts at every rate."""
        rng = random.Random(self.seed + 1)
        coming = arrivals(
            [rng.randint(*self.lengths.answer) for _ in range(self.requests)],
            times=bursty_times(self.requests, rate, self.cv, self.seed),
            prompt_tokens=self.lengths.prompt,
            shared_prefix=self.prefix,
            groups=self.groups,
            vocab_size=self.vocab_size,
            seed=self.seed,
            temperature=0.0,
        )
        if not self.tenants:
            return coming
        names = rng.choices(list(self.tenants), list(self.tenants.values()), k=len(coming))
        return [replace(each, tenant=name) for each, name in zip(coming, names, strict=True)]


def replayed(lines: Sequence[TraceLine], rate: float | None, *, vocab_size: int = 256, seed: int = 0) -> list[Arrival]:
    """The requests of a trace, at its own rate or at another. Prompts of a group begin alike, as far as they reach."""
    rng, groups = random.Random(seed), {}
    coming = []
    for line in lines if rate is None else stretched(list(lines), rate):
        fresh = [rng.randrange(vocab_size) for _ in range(line.prompt_tokens)]
        if line.group:
            kept = groups.setdefault(line.group, [])
            kept += fresh[len(kept) :]
            fresh = kept[: line.prompt_tokens]
        params = SamplingParams(max_tokens=line.answer_tokens, temperature=0.0, ignore_eos=True)
        coming.append(Arrival(line.at, fresh, params, tenant=line.tenant))
    return coming
