"""Stop 15: speculation by every proposer: the target's tokens, its distribution, and fewer of its passes."""

from collections.abc import Iterator

import torch

from course.lab15_speculative_decoding import checks as answers
from course.lab15_speculative_decoding import checks_gain as gain
from course.lab15_speculative_decoding import experiments
from course.lab15_speculative_decoding import experiments_breaks as breaks
from course.lab15_speculative_decoding import experiments_runs as runs
from course.lab15_speculative_decoding.guessing import NOTHING, Tiny
from minillm.labkit.receipts import Row, row
from minillm.predict import speculation as predict
from minillm.serve.speculate import Draft, verify


def rows() -> Iterator[Row]:
    """Enumeration on tiny models, acceptance and exactness on the committed pair, every proposer in the engine."""
    yield from _exact()
    yield from _pair()
    yield from _engine()


def _exact() -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    target, draft = Tiny(generator), Tiny(generator)

    def course(p, guesses, q, draw):
        return verify(p, Draft(guesses, q), draw)

    yield from answers.hold_verifier(course, target, draft, 2)
    verdicts = {name: gain.verdict(*found) for name, found in breaks.all_evidence().items()}
    yield row(
        "six programs, one of them exact, one exact but strict", tuple(gain.USUAL.values()), tuple(verdicts.values())
    )


def _pair() -> Iterator[Row]:
    for temperature in (0.7, 1.0):
        p, q = experiments.distributions(tuple(x.double() for x in experiments.logits_of("code", 2)), temperature)
        ways = breaks.one_guess(p, q)
        off = [float(breaks.total_variation(way, p).mean()) for way in ways.values()]
        yield row(
            f"target and draft, temperature {temperature}: Σ min(p, q) = 1 - TV",
            1 - float(breaks.total_variation(p, q).mean()),
            float(experiments.overlap(p, q).mean()),
            "",
            1e-9,
        )
        yield row("    distance from the target: none", True, off[0] < NOTHING)
        yield row("    if resampled from q; with the ratio inverted", None, (off[1], off[3]))


def _engine() -> Iterator[Row]:
    asked = experiments.prompts("code", 1)
    plain = experiments.generate(None, 1, asked, new=24)
    for name, proposer in runs.available():
        if proposer is None:
            continue
        found = experiments.compare(proposer, runs.K[name], plain, asked, new=24)
        yield row(f"{name}, greedy: tokens equal to plain decoding's", True, found.same)
        yield row("    tokens per pass", experiments.formula(found.run), found.run.tokens_per_pass, "", 0.15)
        yield row("    CPU time, times faster", None, found.speedup)
    yield row(
        "α = 0.8, c = 0.1: best K and its speedup",
        (6, round(predict.speedup(0.8, 0.1, 6), 2)),
        (predict.best_k(0.8, 0.1), 2.47),
    )


CLAIMS = (rows,)
