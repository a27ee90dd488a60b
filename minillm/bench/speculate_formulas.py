"""What `predict.serving.speculation` says of a draft model, beside what is measured: while all go, and to the end.

    passes    1  2  3  4  5  6  7  8  9
    text a    █  █  █  █  █                 all go:       passes 1 .. 5, the speed that the papers' formula is about
    text b    █  █  █  █  █  █  █  █  █     to the end:   a batch lasts as long as its last text, and its last passes
    text c    █  █  █  █  █  █              cost nearly as much as the first ones; plain decoding ends all at once

Each input is measured by itself, in runs that no measured side is taken from: the seconds of a step by engines of which
one runs the target, one the draft, and one checks guesses that are all wrong; of prompts; and α, one number for all
places, on each text alone. α is of the same texts: what its row tests is that places are alike, no unseen text.

To the end, sequences end at different passes, and a batch is over when its last sequence is:

    seconds     s₀ · E[max X] + s₁ · (E[X₁] + … + E[X_b])                X: passes until a sequence has its tokens

s₀: of any pass, s₁: more for each sequence in it. Without draft tokens every X is the number of tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from minillm.bench.harness import BenchRow, Comparison, bench_row
from minillm.model import Transformer
from minillm.predict.serving import speculation as predict
from minillm.serve import LLM, SamplingParams
from minillm.serve.run.recorder import StepRecord
from minillm.serve.speculate import Draft
from minillm.serve.speculate.adaptive import Counts
from minillm.serve.speculate.proposal import Proposer

Texts = list[list[int]]


def formula_rows(
    target: Transformer,
    proposer: Proposer,
    k: int,
    groups: Sequence[Texts],
    new_tokens: int,
    label: str,
    found: Comparison,
) -> Iterator[BenchRow]:
    """Rows with ours: measured, theirs: the formula. groups: the texts of each batch, all of one size.

    proposer: a `DraftModel`. found: (tokens/s with it, without) of whole answers of new_tokens, as `serve` writes them.
    """
    if not found.correct:
        yield bench_row(f"{label}: formulas", "formula", found, "times", higher_is_better=True)
        return
    engines = Engines.of(target, proposer, k)
    alphas = [[acceptance(engines.guessing, text, new_tokens) for text in group] for group in groups]
    flat = [alpha for group in alphas for alpha in group]
    expected_tokens = statistics.mean(predict.tokens_per_pass(alpha, k) for alpha in flat)
    passes, tokens, speeds, shares = round((new_tokens - 1) / expected_tokens), [], [], []
    for _ in found.pairs:
        measured, speed = all_going(engines, groups, passes)
        step = engines.step_seconds(groups[0])
        c, verify = share = step.draft / step.plain, step.check / step.plain
        shares.append(share)
        tokens.append((measured, expected_tokens))
        speeds.append((speed, statistics.mean(predict.speedup(alpha, c, k, verify=verify) for alpha in flat)))
    c, verify = (statistics.median(each) for each in zip(*shares, strict=True))
    about = f"c {c:.2f}, pass of {k + 1} {verify:.2f}"
    rows = (
        (f"tokens per pass, all going, α {statistics.mean(flat):.2f}", "tokens", tokens),
        (f"speedup, all going, {about}", "times", speeds),
        ("speedup, whole answers", "times", whole_answers(engines, groups, new_tokens, alphas, found)),
    )
    for name, unit, pairs in rows:
        yield bench_row(f"{label}: {name}", "formula", Comparison(True, tuple(pairs)), unit, higher_is_better=True)


@dataclass(frozen=True)
class Step:
    """Seconds of a decode step of the target, of the draft (one guess each), of the target over k + 1 tokens each."""

    plain: float
    draft: float
    check: float


@dataclass(frozen=True)
class Engines:
    """guessing and plain are what is measured; draft and wrong measure the formulas' inputs."""

    plain: LLM
    guessing: LLM
    draft: LLM
    wrong: LLM
    k: int

    @classmethod
    def of(
        cls, target: Transformer, proposer: Proposer, k: int, clock: Callable[[], float] = time.perf_counter
    ) -> "Engines":
        build = partial(LLM, prefix_cache=False, clock=clock)
        guessing, wrong = (build(target, proposer=each, k=k) for each in (proposer, _Wrong()))
        return cls(build(target), guessing, build(proposer.model), wrong, k)

    def step_seconds(self, texts: Texts) -> Step:
        """Medians of steps with all texts going and all guesses in them."""
        params = SamplingParams(max_tokens=20 + self.k, ignore_eos=True)
        medians = []
        for llm, rows in ((self.plain, 1), (self.draft, 1), (self.wrong, self.k + 1)):
            llm.records.clear()
            llm.generate(texts, params)
            medians.append(statistics.median(r.seconds for r in llm.records if r.tokens == rows * len(texts)))
        return Step(*medians)


def acceptance(guessing: LLM, text: list[int], new_tokens: int) -> float:
    """α: of the guesses that were reached, the share accepted, in one text's answer."""
    counts = guessing.speculation.counts = Counts()
    guessing.generate([text], SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    return counts.accepted


def all_going(engines: Engines, groups: Sequence[Texts], passes: int) -> tuple[float, float]:
    """(tokens per pass and sequence, speedup) of `passes` decode steps in which nobody ends, of every group.

    Plain decoding is measured over as many tokens.
    """
    ours, theirs, tokens, steps = 0.0, 0.0, 0, 0
    for texts in groups:
        guessed = window(engines.guessing, texts, passes)
        each = sum(record.sampled for record in guessed) / len(texts)
        alone = window(engines.plain, texts, round(each))
        ours += sum(record.seconds for record in guessed)
        theirs += statistics.mean(record.seconds for record in alone) * each
        tokens, steps = tokens + each, steps + passes
    return tokens / steps, theirs / ours


def window(llm: LLM, texts: Texts, steps: int) -> list[StepRecord]:
    """Records of `steps` steps with all texts going and their prompts read, by the target and by the draft."""
    llm.records.clear()
    prompt = max(map(len, texts))
    params = SamplingParams(max_tokens=llm.model.config.max_seq_len - prompt, ignore_eos=True)
    names = [llm.add(text, params) for text in texts]
    first = prompt - 1
    while first < prompt:  # the last such step is left out, too: in it the draft may still read a prompt
        llm.step()
        first = min(start for _, start, _ in llm.records[-1].batch)
    llm.records.clear()
    for _ in range(steps):
        llm.step()
    found = list(llm.records)
    for name in names:
        llm.cancel(name)
    llm.step()
    return found


def whole_answers(
    engines: Engines, groups: Sequence[Texts], new_tokens: int, alphas: list[list[float]], found: Comparison
) -> list[tuple[float, float]]:
    """(measured, expected) speedups; the inputs are measured as often as the speeds were."""
    pairs = []
    for ours, theirs in found.pairs:
        one, all_of_them = (engines.step_seconds(texts) for texts in (groups[0][:1], groups[0]))
        plain = split(one.plain, all_of_them.plain, len(groups[0]))
        guessing = split(*(engines.k * s.draft + s.check for s in (one, all_of_them)), len(groups[0]))
        without = having = 0.0
        for texts, each in zip(groups, alphas, strict=True):
            prompt, drafts = (prompt_seconds(llm, texts) for llm in (engines.plain, engines.draft))
            without += prompt + batch_seconds(each, 0, new_tokens - 1, *plain)
            having += prompt + drafts + batch_seconds(each, engines.k, new_tokens - 1, *guessing)
        pairs.append((ours / theirs, without / having))
    return pairs


def split(one: float, many: float, count: int) -> tuple[float, float]:
    """(s₀, s₁): seconds of a step whoever is in it, and more for each sequence, from steps of 1 and of `count`."""
    each = (many - one) / (count - 1) if count > 1 else 0.0
    return one - each, each


def prompt_seconds(llm: LLM, texts: Texts) -> float:
    """Until each text has its first token."""
    llm.records.clear()
    llm.generate(texts, SamplingParams(max_tokens=1, ignore_eos=True))
    return sum(record.seconds for record in llm.records)


class _Wrong:
    """Guesses that no text goes on with: tokens of the tables' end, one after the other."""

    wants_hidden = False

    def propose(self, asked) -> list[Draft]:
        return [Draft(list(range(4000, 4000 + each.k))) for each in asked]

    def observe(self, key, start, hidden) -> None:
        pass

    def forget(self, key) -> None:
        pass


def going(alpha: float, k: int, tokens: int) -> list[float]:
    """[passes]: the chance that a sequence needs pass 1, 2, ... to write `tokens` tokens; their sum is E[X].

    As the engine does it, no more is guessed than there are tokens left after the one that a pass gives anyway.
    """
    if tokens < 1:
        raise ValueError(f"tokens {tokens} must be at least 1.")
    left, chances = {tokens: 1.0}, []
    while left:
        chances.append(sum(left.values()))
        after: dict[int, float] = {}
        for missing, chance in left.items():
            guesses = min(k, missing - 1)
            for right in range(guesses + 1):
                given = alpha**right * (1 - alpha if right < guesses else 1)
                if missing > right + 1 and given:
                    after[missing - right - 1] = after.get(missing - right - 1, 0.0) + chance * given
        left = after
    return chances


def batch_passes(alphas: Sequence[float], k: int, tokens: int) -> tuple[float, float]:
    """(E[max X], ΣE[X]) of sequences that write `tokens` tokens each. alphas: of each, all places of a draft alike."""
    each = [going(alpha, k, tokens) for alpha in alphas]
    longest = 0.0
    for place in range(max(map(len, each))):
        none = 1.0
        for chances in each:
            none *= 1 - (chances[place] if place < len(chances) else 0.0)
        longest += 1 - none
    return longest, sum(map(sum, each))


def batch_seconds(alphas: Sequence[float], k: int, tokens: int, fixed: float, each: float) -> float:
    """Seconds of all passes after the prompts. fixed, each: s₀ and s₁, guesses included; k 0: without guesses."""
    longest, total = batch_passes(alphas, k, tokens)
    return fixed * longest + each * total
