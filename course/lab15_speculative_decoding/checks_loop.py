"""Lab 15, the loop of speculation: draft, one pass, verify, append; its distribution and its passes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab15_speculative_decoding import tiny_models
from course.lab15_speculative_decoding.checks import PROMPT
from course.lab15_speculative_decoding.tiny_models import NOTHING, Tiny
from course.shared.diagnose import expect

ANSWERS = answers_of("15_speculative_decoding")
RIGHT = "a draft that is always right"


@exercise(
    "speculative-loop",
    minutes=20,
    difficulty=3,
    hints=(
        "One round: draft up to k tokens with the draft, each after those before it; one call of target.rows; verify; "
        "append what came out. How many draft tokens make sense when only two tokens are still to be written?",
        "A round writes at most one token more than it drafts, so draft min(k, left - 1). draft(tokens) gives the row "
        "that draft token i is sampled from, and the verifier needs all these rows.",
    ),
)
def check_loop(learner: Callable) -> Receipt:
    generator, rows = tiny_models.seeded(), []
    for k in (1, 2):
        target, draft = Tiny(generator, 2), Tiny(generator, 2)
        found = tiny_models.enumerated(lambda draw, t=target, d=draft, k=k: _wrote(learner, t, d, PROMPT, 3, k, draw))
        off = tiny_models.distance(found, tiny_models.written(target, PROMPT, 3))
        rows.append(row(f"3 tokens, K = {k}: distance from the target's distribution is 0", True, off < NOTHING))
        if off >= NOTHING:
            raise CheckFailed(
                f"K = {k}: the answer's distribution is off by {off:.3f} from the target's: is every token that is "
                "appended one that the verifier returned, and each draft token sampled from the row that it is "
                "verified with?",
                rows,
            )
    few, many = random.randint(2, 3), random.randint(4, 7)
    for name, draft, count, k in (
        (RIGHT, _Chain(1), random.randint(2, 4) * (few + 1), few),
        (RIGHT, _Chain(1), random.randint(2, 4) * (many + 1), many),
        (RIGHT, _Chain(1), many + 3, many),
        ("a draft that is always wrong", _Chain(2), 12, random.randint(2, 5)),
        ("a draft that is right every other time", _Chain(1, wrong_after=0), 12, random.randint(2, 5)),
    ):
        target = _Chain(1)
        prompt = [*(random.randrange(5) for _ in range(random.randint(3, 9))), 1]
        answer = _wrote(learner, target, draft, prompt, count, k, torch.Generator().manual_seed(0))
        expected = _passes(draft, prompt, count, k)
        rows.append(row(f"{name}: passes for {count} tokens, K = {k}", expected, target.passes))
        if list(answer) != [(2 + i) % 5 for i in range(count)]:
            raise CheckFailed(
                f"with {name} the answer is {list(answer)}: rejected draft tokens must not stay in it", rows
            )
        longest = max((each.drafted for each in target.rounds), default=0)
        if longest > k:
            raise CheckFailed(f"with {name}, a pass checks {longest} draft tokens, and K is {k}", rows)
        if target.passes != expected:
            what = f"with {name}, {target.passes} passes for {count} tokens, K = {k}, where {expected} are enough"
            raise CheckFailed(f"{what}: {_say_passes(name, target, len(prompt), count, k)}", rows)
    return receipt("the loop: distribution and passes", rows)


def _wrote(learner: Callable, target: Any, draft: Callable, prompt: list[int], count: int, k: int, draw: Any) -> tuple:
    found = learner(target, draft, list(prompt), count, k, draw)
    expect(tiny_models.is_tokens(found, target.vocab), found, "a list of tokens")
    if len(found) != count:
        raise CheckFailed(f"you returned {len(found)} tokens where {count} were asked for, without the prompt")
    return tuple(found)


def _passes(draft: "_Chain", prompt: list[int], count: int, k: int) -> int:
    target = _Chain(1)
    ANSWERS.speculate(target, draft, prompt, count, k, torch.Generator().manual_seed(0))
    return target.passes


def _say_passes(name: str, target: "_Chain", start: int, count: int, k: int) -> str:
    """The first pass that does less than it could. start: tokens of the prompt."""
    if target.calls:
        return f"{target.calls} of them are target(tokens), a pass of its own: target.rows has given that row already"
    if name != RIGHT:
        return "one pass of the target per round"
    ends = [each.before for each in target.rounds[1:]] + [start + count]
    for place, (each, end) in enumerate(zip(target.rounds, ends, strict=True), 1):
        head = f"pass {place} checks {each.drafted} draft token{'s' * (each.drafted != 1)}"
        due = min(k, start + count - each.before - 1)
        if each.drafted < due:
            return f"{head} where K and the end allow {due}"
        if end - each.before < each.right + 1:
            why = "the bonus token is lost" if end - each.before == each.drafted else "is a draft token dropped?"
            return f"{head}, {each.right} of them right, and {end - each.before} are appended: {why}"
        if each.right < each.drafted:
            return f"{head}, {each.right} of them right: was the draft asked about other tokens than all so far?"
    return "one pass of the target per round"


@dataclass(frozen=True)
class _Round:
    """before: tokens when the pass began; right: draft tokens that the target would have written, up to the first
    that it would not."""

    before: int
    drafted: int
    right: int


class _Chain:
    """Says token + step (of 5) after a token, always; after the token `wrong_after` one more. rounds: what `rows` was
    asked; calls: how often one row. Both are passes of a target."""

    vocab = 5

    def __init__(self, step: int, wrong_after: int | None = None):
        self.step, self.wrong_after = step, wrong_after
        self.calls = 0
        self.rounds: list[_Round] = []

    @property
    def passes(self) -> int:
        return len(self.rounds) + self.calls

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self.calls += 1
        return self._row(tokens)

    def rows(self, tokens: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        known = [*tokens, *drafted]
        found = torch.stack([self._row(known[: len(tokens) + i]) for i in range(len(drafted) + 1)])
        right = next((i for i, token in enumerate(drafted) if found[i, token] == 0), len(drafted))
        self.rounds.append(_Round(len(tokens), len(drafted), right))
        return found

    def _row(self, tokens: Sequence[int]) -> Tensor:
        right = torch.zeros(self.vocab, dtype=torch.float64)
        right[(tokens[-1] + self.step + (tokens[-1] == self.wrong_after)) % self.vocab] = 1
        return right
