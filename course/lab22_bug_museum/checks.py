"""Lab 22: a repair is one if the trace that gave the bug away is gone, in a run and a layout that nobody has seen."""

from typing import Any

from course.kit.exercises import exercise
from course.kit.receipts import Row
from course.lab22_bug_museum import checks_alone, judge, museum


@exercise(
    "slow-with-clipping",
    minutes=12,
    difficulty=3,
    hints=(
        "Which number is the loss of a microbatch divided by, and how many of these losses are added up?",
        "`loss` already divides by what the whole batch counts. Whatever multiplies a microbatch's loss, and whatever "
        "divides the sum for the log, has to go.",
    ),
)
def check_slow_with_clipping(learner: Any) -> list[Row]:
    rows = judge.verify(museum.exhibit("slow-with-clipping"), learner)
    checks_alone.judge_pieces(judge.bare(learner))
    return rows


@exercise(
    "two-gpus-one-run",
    minutes=15,
    difficulty=3,
    hints=(
        "Two functions: one says which windows a rank reads, the other when a backward communicates.",
        "Rank r starts r windows later and takes every world_size-th one. The last microbatch is the one that "
        "communicates; all before it only accumulate.",
    ),
)
def check_two_gpus_one_run(learner: Any) -> list[Row]:
    indices, accumulating = map(judge.bare, learner)
    checks_alone.judge_kind(indices)
    rows = judge.verify(museum.exhibit("two-gpus-one-run"), learner)
    checks_alone.judge_windows(indices)
    checks_alone.judge_contexts(accumulating)
    return rows


@exercise(
    "utilisation",
    minutes=8,
    difficulty=2,
    hints=(
        "At how many positions does a token look on average, if it looks at those before it and at itself?",
        "`causal_context(seq_len, window)` gives that average; training_flops and Adapters.training_flops take it.",
    ),
)
def check_utilisation(learner: Any) -> list[Row]:
    rows = judge.verify(museum.exhibit("utilisation"), learner)
    checks_alone.judge_utilisation(judge.bare(learner))
    return rows


@exercise(
    "never-ends",
    minutes=5,
    difficulty=2,
    hints=(
        "Which token's logits does the next token come from, and who computes them if the whole prompt was found?",
        "All full blocks of the tokens but the last one may be taken over; without a prefix cache, none.",
    ),
)
def check_nothing_left(learner: Any) -> list[Row]:
    rows = judge.verify(museum.exhibit("never-ends"), learner)
    checks_alone.judge_prefixes(judge.bare(learner))
    return rows
