"""Lab 15's claims and tables, each a function that the notebook calls in one line; CLAIMS need no learner."""

from collections.abc import Callable, Sequence

import torch

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, receipt, row
from course.lab15_speculative_decoding import checks as answers
from course.lab15_speculative_decoding import checks_gain as gain
from course.lab15_speculative_decoding import experiments, experiments_breaks, experiments_peers, formulas
from course.lab15_speculative_decoding import experiments_runs as runs
from course.lab15_speculative_decoding.tiny_models import NOTHING, Tiny, distance, first
from course.shared.step_cost import FOUR_H100_70B, H100_8B
from course.shared.table import Table, seconds, table
from minillm.predict.serving import speculation as predict
from minillm.serve.speculate import Draft, NGram, verify

ANSWERS = answers_of("15_speculative_decoding")
H100 = 989e12, 3.35e12  # FLOP/s in bf16 without sparsity, bytes/s (NVIDIA H100 SXM datasheet)


def pass_cost(counts: Sequence[int] = (1, 2, 4, 8, 16, 64)) -> Table:
    """One pass of the target by the number of tokens in it."""
    times = runs.pass_seconds(counts)
    return table(
        "one forward pass of the target, CPU time",
        ("tokens in the pass", "measured", "/ a pass over one token"),
        [(str(count), seconds(each), each / times[0]) for count, each in zip(counts, times, strict=True)],
    )


def one_draft_token(temperature: float = 1.0) -> Receipt:
    """What one draft token and its verification yield on real distributions, by the right rule and three wrong ones."""
    p, q = experiments.distributions(tuple(x.double() for x in experiments.logits_of("code")), temperature)
    found = [
        row("Σ min(p, q) = 1 - total variation of p and q", 1 - float(experiments_breaks.total_variation(p, q).mean()),
            float(experiments.overlap(p, q).mean()), "", 1e-9)
    ]  # fmt: skip
    for place, (name, way) in enumerate(experiments_breaks.one_draft_token(p, q).items()):
        off = float(experiments_breaks.total_variation(way, p).mean())
        found.append(row(f"{name}: exact", True, off < NOTHING) if place == 0 else row(f"{name}: off by", None, off))
    return receipt(
        "one draft token at 192 positions of code: distance from the target's distribution", found, show="off by"
    )


def your_loop(answer: Sequence[int], passes: int, prompt: Sequence[int]) -> Receipt:
    """The learner's loop on the committed pair beside the engine without speculation."""
    plain = experiments.generate(None, 1, [prompt], new=len(answer))
    same = sum(a == b for a, b in zip(answer, plain.answers[0], strict=True))
    return receipt(
        f"{len(answer)} tokens, greedy, K = 3",
        [
            row("your tokens, equal to plain decoding's", len(answer), same),
            row("passes of the target", None, passes),
            row("passes of plain decoding", len(answer), plain.passes + 1),
        ],
    )


def temperature(alpha: dict[str, list[float]], guess: str, at: tuple[float, float] = (0.5, 1.5)) -> Table:
    """Acceptance at a low and at a high temperature."""
    from course.lab15_speculative_decoding.figures import TEMPERATURES

    low, high = map(TEMPERATURES.index, at)
    found = [
        (name, each[low], each[high], "more" if each[high] > each[low] else "fewer") for name, each in alpha.items()
    ]
    return table(
        f"share of draft tokens accepted (your guess for sampled ones: {guess})",
        ("draft tokens", *(f"temperature {t}" for t in at), "accepted at the higher one"),
        found,
    )


def how_many(guess_tokens: float, guess_speedup: float, speedup: Callable, best_k: Callable) -> Table:
    """The reader's guesses and functions beside the closed forms, α = 0.8."""
    best = best_k(0.8, 0.1, 64)
    return table(
        "α = 0.8",
        ("quantity", "your guess", "your function", "formula"),
        [
            ("tokens per pass, K = 4", guess_tokens, float(speedup(0.8, 0.0, 4)), predict.tokens_per_pass(0.8, 4)),
            ("speedup, K = 4, c = 0.1", guess_speedup, float(speedup(0.8, 0.1, 4)), predict.speedup(0.8, 0.1, 4)),
            ("    K = 16, c = 0.1", None, float(speedup(0.8, 0.1, 16)), predict.speedup(0.8, 0.1, 16)),
            ("    best K, c = 0.1", None, int(best), predict.best_k(0.8, 0.1)),
            ("    speedup at the best K, c = 0.1", None, float(speedup(0.8, 0.1, int(best))),
             predict.speedup(0.8, 0.1, best)),
            ("    the same, c = 0.02", None, float(speedup(0.8, 0.02, int(best_k(0.8, 0.02, 64)))),
             predict.speedup(0.8, 0.02, predict.best_k(0.8, 0.02))),
        ],
    )  # fmt: skip


def sweep(found: runs.Sweep) -> Table:
    """The draft model by K: the formula fed with measured acceptance and cost, beside the engine."""
    lines = [
        (f"K = {k}", each.same, predict.tokens_per_pass(found.alpha[:k]), each.run.tokens_per_pass, found.predicted(k),
         each.speedup)
        for k, each in found.runs.items()
    ]  # fmt: skip
    longest = found.runs[max(found.runs)].run.counts
    shares = tuple(round(a, 2) for a in found.alpha)
    return table(
        f"draft model, greedy, code; c = {found.c:.2f} measured; acceptance by place {shares} "
        f"of {tuple(longest.tried)} draft tokens",
        ("", "same tokens", "tokens/pass, formula", "measured", "speedup, formula", "measured"),
        lines,
    )


def adaptive(found: runs.Sweep) -> Receipt:
    """K that follows the acceptance, with the measured cost of a draft token."""
    following = runs.adaptive(found)
    return receipt(
        "K that follows the acceptance",
        [
            row("draft tokens per drafting pass", None, following.run.places),
            row("adaptive K: tokens equal to plain decoding's", True, following.same),
            row("speedup, CPU time", None, following.speedup),
        ],
    )


def proposers(found: dict) -> Table:
    """Every proposer: does it write the same, how much, at which price."""
    extra = {name: runs.memory(name, one) for name, one in runs.available() if one is not None}
    lines = [
        (f"{name}, K = {runs.K[name]}", each.same, experiments.formula(each.run), each.run.tokens_per_pass, each.c,
         each.predicted, each.speedup, f"{extra[name]['weights'] / 1e6:.1f} MB",
         f"{extra[name]['keys and values'] / 1e3:.0f} kB")
        for name, each in found.items() if each is not None
    ]  # fmt: skip
    return table(
        "code, greedy, one sequence at a time",
        ("proposer", "same tokens", "tokens/pass from its acceptance", "measured", "c, measured",
         "speedup from both", "measured",
         "own weights", "own keys and values"),
        lines,
    )  # fmt: skip


def programs(verdict: Callable) -> Table:
    """The six programs: the learner's verdict and what it rests on."""
    return table(
        "six programs: distance from the target's distribution",
        ("program", "your verdict", "first token", "three tokens", "accepted / possible"),
        [
            (name, verdict(found, true, accepted, possible), distance(first(found, 1), first(true, 1)),
             distance(found, true), accepted / possible)
            for name, (found, true, accepted, possible) in experiments_breaks.all_evidence().items()
        ],
    )  # fmt: skip


def preempted() -> Receipt:
    """Four sequences with draft tokens in a pool that cannot hold them all."""
    found = runs.preempted()
    undisturbed = experiments.generate(None, 1, experiments.prompts("code", 4), batch=4)
    return receipt(
        "4 sequences, 20 blocks where 32 are wanted, draft model",
        [
            row("preemptions", None, found["preemptions"]),
            row("answers equal to plain decoding's", True, found["answers"] == undisturbed.answers),
            row("blocks still held at the end", 0, found["used"]),
        ],
    )


def batches_here(batches: Sequence[int] = (1, 4, 12)) -> Table:
    """Prompt lookup on this machine with more and more sequences in a pass."""
    return table(
        "prompt lookup, K = 6, greedy, code, CPU time",
        ("sequences", "same tokens", "tokens per pass and sequence", "a verifying pass / a plain one", "speedup"),
        [
            (str(batch), each.same, each.run.tokens_per_pass, each.verify, each.speedup)
            for batch, each in runs.by_batch(batches).items()
        ],
    )


def batches_h100(batches: Sequence[int] = (1, 32, 64, 128, 256), contexts: Sequence[int] = (0, 512, 1536)) -> Table:
    """Speculation on an H100 by batch and context, α = 0.8, c = 0.05, K = 4: formula."""
    return table(
        "8B on one H100, α = 0.8, c = 0.05, K = 4: speedup by formula",
        ("sequences", *(f"context {context:,}" for context in contexts)),
        [(str(b), *(h100_speedup(0.8, 0.05, 4, b, context) for context in contexts)) for b in batches],
    )


def h100_speedup(alpha: float, c: float, k: int, batch: int, context: int) -> float:
    """Plain seconds per token / speculative ones for the 8B model on one H100, keys and values read once per pass.
    c: seconds of a draft token of the whole batch / of a plain pass at this batch and context."""
    plain, verifying = (H100_8B.step([(context, each)] * batch) for each in (1, k + 1))
    return predict.tokens_per_pass(alpha, k) * plain / (verifying + k * c * plain)


def transformers() -> Receipt:
    """The same pair in transformers' assisted generation, where it is installed."""
    asked = experiments.prompts("code", 2)
    theirs = experiments_peers.peers(asked, 3, 6)
    if theirs is None:
        return receipt("transformers is not installed here: pip install transformers", [])
    plain_answers, plain_passes = theirs[experiments_peers.PLAIN]
    ours = experiments.generate(None, 1, asked).answers
    proposed = {experiments_peers.DRAFT: (runs.draft_model(), 3), experiments_peers.LOOKUP: (NGram(), 6)}
    found = [
        row("greedy: tokens equal to minillm's", True, plain_answers == ours),
        row("    passes of the target", len(asked) * experiments.NEW, plain_passes),
    ]
    for way in (experiments_peers.DRAFT, experiments_peers.LOOKUP):
        same, passes = theirs[way]
        proposer, k = proposed[way]
        here = experiments.generate(proposer, k, asked).passes + len(asked)  # with the one over the prompt
        found += [
            row(f"{way}: same tokens", True, same == plain_answers),
            row(f"    passes, K = {k}", None, passes),
            row(f"    passes of minillm, {type(proposer).__name__}, K = {k}", None, here),
        ]
    return receipt("transformers, assisted generation", found, show="passes")


def interview() -> Table:
    """Numbers that the questions rest on."""
    lines = [
        ("α = 0.8, K = 4: tokens per pass", predict.tokens_per_pass(0.8, 4)),
        ("    K without end: 1 / (1 - α)", 1 / (1 - 0.8)),
    ]
    for c in (0.02, 0.1, 0.25):
        best = predict.best_k(0.8, c)
        lines.append((f"α = 0.8, c = {c}: best K, its speedup", (best, round(predict.speedup(0.8, c, best), 2))))
    lines += [
        ("smallest α at which K = 1 pays, c = 0.1: α > c", 0.1),
        (
            "H100, K = 4, context 0: most sequences with a memory-bound verifying pass",
            int(H100[0] / H100[1] / 5),
        ),
        ("p = (0.7, 0.2, 0.1), q = (0.2, 0.5, 0.3): accepted", formulas.acceptance((0.7, 0.2, 0.1), (0.2, 0.5, 0.3))),
    ]
    return table("by formula", ("quantity", "formula"), lines)


def design_tpot(alphas: Sequence[float] = (0.7, 0.4)) -> Table:
    """D1: TPOT of a 70B model on four H100s, 16 sequences of 4,096 tokens, by K."""

    def pass_seconds(new: int) -> float:
        return FOUR_H100_70B.step([(4096, new)] * 16)

    def tpot(k: int, alpha: float) -> float:
        return (pass_seconds(k + 1) + 0.03 * k * pass_seconds(1)) / predict.tokens_per_pass(alpha, k)

    return table(
        "D1: TPOT by formula",
        ("", *(f"α = {alpha}" for alpha in alphas)),
        [(f"K = {k}", *(seconds(tpot(k, alpha)) for alpha in alphas)) for k in range(9)],
    )


def design_draft(batches: Sequence[int] = (8, 128), context: int = 500) -> Table:
    """D2: two drafts at their best K, for the 8B model on one H100."""
    found = []
    for batch in batches:
        for alpha, c in ((0.65, 0.02), (0.8, 0.1)):
            gains = {k: h100_speedup(alpha, c, k, batch, context) for k in range(17)}
            best = max(gains, key=gains.get)
            found.append((f"{batch} sequences, α = {alpha}, c = {c}", best, gains[best]))
    return table("D2: by formula", ("draft", "best K", "speedup"), found)


# Claims that need no learner, beside `one_draft_token` and `preempted`.


def exact_by_enumeration() -> Receipt:
    """minillm's verifier on tiny models, and the verdict on six programs."""
    generator = torch.Generator().manual_seed(0)
    target, draft = Tiny(generator), Tiny(generator)

    def course(p, drafted, q, draw):
        return verify(p, Draft(drafted, q), draw)

    rows = answers.check_verifier_exactly(course, target, draft, 2)
    verdicts = {name: ANSWERS.verdict(*found) for name, found in experiments_breaks.all_evidence().items()}
    usual, said = (tuple(each.values()) for each in (gain.USUAL, verdicts))
    rows.append(row("six programs, one of them exact, one exact but strict", usual, said))
    return receipt("every outcome, enumerated", rows)


def proposers_in_the_engine() -> Receipt:
    """Every proposer in the engine: the same tokens, and as many per pass as the acceptance says."""
    rows = []
    asked = experiments.prompts("code", 1)
    plain = experiments.generate(None, 1, asked, new=24)
    for name, proposer in runs.available():
        if proposer is None:
            continue
        found = experiments.compare(proposer, runs.K[name], plain, asked, new=24)
        rows.append(row(f"{name}, greedy: tokens equal to plain decoding's", True, found.same))
        rows.append(row("    tokens per pass", experiments.formula(found.run), found.run.tokens_per_pass, "", 0.15))
        rows.append(row("    CPU time, times faster", None, found.speedup))
    rows.append(
        row(
            "α = 0.8, c = 0.1: best K and its speedup",
            (6, round(predict.speedup(0.8, 0.1, 6), 2)),
            (predict.best_k(0.8, 0.1), 2.47),
        )
    )
    return receipt("proposers on code, greedy", rows)


CLAIMS = (exact_by_enumeration, one_draft_token, proposers_in_the_engine, preempted)
