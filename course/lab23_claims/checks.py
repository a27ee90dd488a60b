"""Lab 23: refuting a claim takes one example, and the example has to be one."""

from numbers import Integral
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from course.shared.diagnose import expect_list, expect_number


@exercise(
    "counterexample",
    minutes=10,
    difficulty=2,
    hints=(
        "When is the mean of two means the mean of all? Break exactly that.",
        "Give the ranks unequal numbers of tokens, and the losses so that the short shard differs.",
    ),
)
def check_counterexample(learner: Any) -> list[Row]:
    tokens, losses = expect_list(learner(), "two lists, (tokens, losses)", count=2, of=list)
    if len(tokens) != len(losses) or len(tokens) < 2:
        raise CheckFailed(
            f"{len(tokens)} numbers of tokens and {len(losses)} losses: give as many of both, at least 2."
        )
    tokens = [expect_number(count, "a whole number of tokens per rank in the first list") for count in tokens]
    losses = [expect_number(loss, "a number in nats per rank in the second list") for loss in losses]
    if any(not isinstance(count, Integral) or count < 1 for count in tokens):
        raise CheckFailed(f"{tokens} tokens: every rank has a whole number of at least 1.", evidence=tokens)
    if any(not 0 < loss < 20 for loss in losses):
        raise CheckFailed(f"losses {losses}: a mean loss in nats lies above 0 and below 20.", evidence=losses)
    whole = sum(count * loss for count, loss in zip(tokens, losses, strict=True)) / sum(tokens)
    means = sum(losses) / len(losses)
    off = abs(means - whole) / whole
    if len(set(tokens)) == 1:
        raise CheckFailed("With equal shards the claim is right: no losses refute it.", evidence=losses)
    if len(set(losses)) == 1:
        raise CheckFailed(
            "With equal losses every mean is the same, whatever the shards. The first list is the tokens, one number "
            "per rank, and the second the losses.",
            evidence=tokens,
        )
    is_enough = off >= 0.15 - 1e-9  # 15 % exactly may come out a little less
    if not is_enough:
        raise CheckFailed(
            f"here the mean of means is {means:.4g} and the whole mean {whole:.4g}: {off:.1%} apart, asked for are "
            "15 %.",
            evidence=[means, whole],
        )
    return [
        row("loss of the whole batch", None, whole),
        row("mean of the ranks' means", None, means),
        row("at least 15 % apart", True, is_enough),
    ]
