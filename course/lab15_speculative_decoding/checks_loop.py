"""Lab 15, the loop of speculation: draft, one pass, verify, append; its distribution and its passes."""

import random
from collections.abc import Callable, Sequence
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
    for name, draft, passes in (
        ("a draft that is always right", _Chain(1), 3),
        ("a draft that is always wrong", _Chain(2), 12),
        ("a draft that is right every other time", _Chain(1, wrong_after=0), None),
    ):
        target = _Chain(1)
        prompt = [*(random.randrange(5) for _ in range(random.randint(3, 9))), 1]
        answer = _wrote(learner, target, draft, prompt, 12, 3, torch.Generator().manual_seed(0))
        expected = passes or _passes(draft, 12, 3)
        rows.append(row(f"{name}: passes for 12 tokens, K = 3", expected, target.passes))
        if list(answer) != [(2 + i) % 5 for i in range(12)]:
            raise CheckFailed(
                f"with {name} the answer is {list(answer)}: rejected draft tokens must not stay in it", rows
            )
        if target.passes != expected:
            raise CheckFailed(_say_passes(name, target, draft, expected), rows)
    return receipt("the loop: distribution and passes", rows)


def _wrote(learner: Callable, target: Any, draft: Callable, prompt: list[int], count: int, k: int, draw: Any) -> tuple:
    found = learner(target, draft, list(prompt), count, k, draw)
    expect(tiny_models.is_tokens(found, target.vocab), found, "a list of tokens")
    if len(found) != count:
        raise CheckFailed(f"you returned {len(found)} tokens where {count} were asked for, without the prompt")
    return tuple(found)


def _passes(draft: "_Chain", count: int, k: int) -> int:
    target = _Chain(1)
    ANSWERS.speculate(target, draft, [0, 1], count, k, torch.Generator().manual_seed(0))
    return target.passes


def _say_passes(name: str, target: "_Chain", draft: "_Chain", expected: int) -> str:
    found = target.passes
    if found > expected and name.endswith("always right"):
        why = {4: "the bonus token of each pass is lost", 12: "each draft token has a pass of its own"}.get(found)
        if why is None and len(draft.asked) <= found:
            why = "no pass drafts more than one token, and K is 3"
        elif why is None and max(draft.asked) < min(draft.asked) + 3:
            why = "the draft is asked about the prompt in each pass, without what has been written so far"
        elif why is None:
            why = "draft each token after those drafted before it, not always after the verified tokens"
        return f"with {name}, {found} passes for 12 tokens where {expected} are enough: {why}"
    return f"with {name}, {found} passes where {expected} are due: one pass of the target per round, no more, no less"


class _Chain:
    """Says token + step (of 5) after a token, always; after the token `wrong_after` one more. asked: how many tokens it
    was given, call by call."""

    vocab = 5

    def __init__(self, step: int, wrong_after: int | None = None):
        self.step, self.wrong_after, self.passes = step, wrong_after, 0
        self.asked: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self.asked.append(len(tokens))
        right = torch.zeros(self.vocab, dtype=torch.float64)
        right[(tokens[-1] + self.step + (tokens[-1] == self.wrong_after)) % self.vocab] = 1
        return right

    rows = Tiny.rows
