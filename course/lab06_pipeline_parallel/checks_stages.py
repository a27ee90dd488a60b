"""Lab 06, pipeline parallelism: a stage at work (receive, compute, send), and the embedding that two stages share."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from course.kit import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, row
from course.lab06_pipeline_parallel import rank_programs
from course.lab06_pipeline_parallel.rank_programs import StageCase, Staged, Tied
from course.shared import sharding
from course.shared.diagnose import expect_like
from course.shared.trials import run
from minillm.comm import RankError
from minillm.predict.training import pipeline as predict

ANSWERS = answers_of("06_pipeline_parallel")


# What they are held to.


@exercise(
    "stage-step",
    minutes=25,
    difficulty=4,
    hints=(
        "Between two stages the graph is cut: autograd knows nothing of what came from another rank. What has to be "
        "done by hand at the cut, on the way forward and on the way back?",
        "forward: receive into an empty tensor (not on the first stage) and let it require a gradient; "
        "compute; keep x and y under m; send y without waiting. On the last stage y is the loss, divided by "
        "microbatches. backward: take x and y out; receive the gradient of y (not on the last stage), y.backward(it), "
        "send x.grad without waiting.",
    ),
)
def check_stage(learner: Callable) -> Receipt:
    filled = [
        (4, 4, _in_turn, "one at a time"),
        (3, 5, ANSWERS.gpipe_order, "GPipe in float32", torch.float32),
        (1, 3, ANSWERS.gpipe_order, "GPipe"),
    ]
    turns = (4, 6, ANSWERS.one_f_one_b_order, "1F1B")
    cases = [_draw_case(*case) for case in (*filled, turns)]
    try:
        trials = run(rank_programs.run_stage, 4, learner, cases)
    except CheckFailed as hang:
        first = cases[:-1]  # where sends that wait do no harm
        for case, ranks in zip(
            first, sharding.by_case(run(rank_programs.run_stage, 4, learner, first), first), strict=True
        ):
            _judge_gradients(case, ranks)
            _judge_stage(case, ranks)
        raise CheckFailed(f"right under GPipe, but under 1F1B {hang}") from None
    rows, each = [], list(zip(cases, sharding.by_case(trials, cases), strict=True))
    for case, ranks in each:
        _judge_gradients(case, ranks)
    for case, ranks in each:
        _judge_stage(case, ranks)
        rows += _rows(case, ranks)
    return Receipt("stages on real ranks", tuple(rows))


def _in_turn(stage: int, stages: int, microbatches: int) -> list[str]:
    return [f"{kind}{m}" for m in range(microbatches) for kind in "FB"]


def _draw_case(
    stages: int, microbatches: int, order: Callable, name: str, dtype: torch.dtype = torch.float64
) -> StageCase:
    rows, width = random.randint(2, 5), random.randint(5, 9)
    return StageCase(
        list(torch.randn(stages, width + 1, width, dtype=dtype)),
        list(torch.randint(2, (microbatches, rows, width))),  # require no gradient, as token ids cannot
        list(torch.randn(microbatches, rows, width, dtype=dtype)),
        [order(stage, stages, microbatches) for stage in range(stages)],
        f"{name}, {stages} stage{'s' * (stages > 1)}, {microbatches} microbatches",
    )


def _judge_gradients(case: StageCase, ranks: Sequence[Staged]) -> None:
    """CheckFailed unless every stage has the gradient of one process, by messages between neighbours."""
    wanted, microbatches, close = rank_programs.in_one_process(case), len(case.inputs), 100 * _rounding(case)
    slips = {
        f"{microbatches} times too large: the mean over all microbatches is asked for, so divide each loss": (
            rank_programs.in_one_process(case, lambda loss, m: loss * microbatches)
        ),
        f"{microbatches} times too small: the loss was divided twice": (
            rank_programs.in_one_process(case, lambda loss, m: loss / microbatches)
        ),
        "that of the last microbatch alone: gradients of microbatches add up in .grad": (
            rank_programs.in_one_process(case, lambda loss, m: loss * (m == microbatches - 1))
        ),
    }
    for stage, did in enumerate(ranks):
        who = f"{case.name}: stage {stage}"
        if ready := sorted(set(did.calls) - rank_programs.GROUP_ONLY):
            raise CheckFailed(f"{who} calls {', '.join(ready)}: neighbours exchange messages, the others have no part")
        if did.gradient is None:
            raise CheckFailed(
                f"{who}: not every parameter has a gradient: does backward run on every stage, through the kept output?"
            )
        if torch.allclose(did.gradient, wanted[stage], rtol=close, atol=close / 100):
            continue
        said = [text for text, wrong in slips.items() if torch.allclose(did.gradient, wrong[stage], rtol=1e-4)]
        if not said and stage < len(ranks) - 1 and torch.allclose(ranks[-1].gradient, wanted[-1], close):
            said = ["the last stage's is right, so look at what travels back: is it the gradient that came in?"]
        guess = "did a later receive overwrite a saved activation, or does backward run through another microbatch's?"
        raise CheckFailed(f"{who}: the gradient is wrong: {said[0] if said else guess}")


def _judge_stage(case: StageCase, ranks: Sequence[Staged]) -> None:
    """CheckFailed for right gradients if more is kept, waited for or sent than they need."""
    stages, microbatches = case.world_size, len(case.inputs)
    for stage, did in enumerate(ranks):
        most = _most_in_flight(case, stage)
        if did.peak > most:
            raise CheckFailed(
                f"right gradients, but {case.name}: stage {stage} holds the outputs of {did.peak} microbatches at once "
                f"where {most} are enough: let go of what is kept when its backward comes"
            )
        if did.held > most:
            raise CheckFailed(
                f"right gradients, but {case.name}: stage {stage} holds the inputs of {did.held} microbatches at once "
                f"where {most} are enough: let go of x, too, once its backward has run"
            )
        if did.waits:
            raise CheckFailed(
                f"right gradients, but {case.name}: stage {stage} waits for {did.waits} of its sends before it goes "
                "on. Under 1F1B two neighbours that send to each other would both wait for ever: send with "
                "async_op=True and keep the handle in self.sent"
            )
    sent = sum(did.messages for did in ranks)
    if sent != (due := predict.sends(stages, microbatches)):
        raise CheckFailed(f"right gradients, but {case.name}: {sent} messages where {due} are enough")


def _rounding(case: StageCase) -> float:
    """A relative error that is rounding."""
    return 1e-12 if case.weights[0].dtype == torch.float64 else 1e-5


def _most_in_flight(case: StageCase, stage: int) -> int:
    held = most = 0
    for action in case.orders[stage]:
        held += 1 if action[0] == "F" else -1
        most = max(most, held)
    return most


def _rows(case: StageCase, ranks: Sequence[Staged]) -> list:
    wanted, stages = rank_programs.in_one_process(case), case.world_size
    worst = max(((did.gradient - right).norm() / right.norm()).item() for did, right in zip(ranks, wanted, strict=True))
    most = [_most_in_flight(case, stage) for stage in range(stages)]
    within = all(max(did.peak, did.held) <= limit for did, limit in zip(ranks, most, strict=True))
    (tokens, width), close = case.inputs[0].shape, _rounding(case)
    due = predict.sent_bytes(stages, len(case.inputs) * tokens, 1, width, case.weights[0].itemsize)
    return [
        row(f"{case.name}: gradients of one process (within {close:g})", True, worst < close),
        row("    messages of all stages", predict.sends(stages, len(case.inputs)), sum(did.messages for did in ranks)),
        row("    their bytes", due, sum(did.bytes for did in ranks), "B"),
        row(f"    inputs and outputs held by the stages, at most {most}", True, within),
    ]


@exercise(
    "tied-embedding",
    minutes=10,
    difficulty=2,
    hints=(
        "Each copy has seen a part of the gradient: the first stage's as an embedding, the last one's as the head. "
        "What would the one embedding of a single process have?",
        "Both ends need the sum of both gradients. Nobody else takes part. With one stage there is one copy.",
    ),
)
def check_tied(learner: Callable) -> Receipt:
    cases = [_draw_tied(4), _draw_tied(random.choice((2, 3)), torch.float64), _draw_tied(1)]
    try:
        trials = sharding.by_case(run(rank_programs.run_tied, 4, learner, cases), cases)
    except RankError as error:
        if "MismatchError" in str(error) and "barrier" in str(error):  # the check's own, after the learner's function
            raise CheckFailed(
                "the ends call a collective of the whole group, which the stages between never join: they have no "
                "copy. Exchange messages between the first and the last stage"
            ) from None
        raise
    rows = []
    for case, ranks in zip(cases, trials, strict=True):
        stages, size = case.world_size, case.gradients[0].nbytes
        first, last = case.gradients[0], case.gradients[-1]
        wanted = first if stages == 1 else first + last
        for stage in sorted({0, stages - 1}):
            _judge_tied(f"{stages} stages: stage {stage}", ranks[stage], wanted, case, stage)
        between = [did.bytes for did in ranks[1:-1]]
        calls = {name for did in ranks for name in did.calls}
        if "gather_objects" in calls:
            raise CheckFailed(
                "right, but gather_objects pickles, for a few small things; and everybody gets everything"
            )
        if any(between):
            raise CheckFailed(f"right, but the stages between the ends send {between} bytes; they have no copy")
        sent, due = [ranks[0].bytes, ranks[-1].bytes], (size if stages > 1 else 0)
        rows.append(row(f"{stages} stage{'s' * (stages > 1)}: gradient of the one embedding", True, True))
        rows.append(row("    bytes sent by an end", due, max(sent), "B"))
        rows.append(row("    by the stages between", 0, sum(between), "B"))
    return Receipt("one embedding, two copies", tuple(rows))


def _draw_tied(stages: int, dtype: torch.dtype = torch.float32) -> Tied:
    return Tied(list(torch.randn(stages, random.randint(5, 9), random.randint(2, 4), dtype=dtype)))


def _judge_tied(who: str, did: rank_programs.Summed, wanted: Tensor, case: Tied, stage: int) -> None:
    if did.weight_moved:
        raise CheckFailed(f"{who}: the weight itself changed; sum the gradients (.grad)")
    if did.gradient is not None:
        expect_like(f"{who}: .grad", did.gradient, wanted, "a sum of two gradients, of the weight's size and dtype")
        if did.has_graph:
            raise CheckFailed(f"{who}: .grad carries a graph, which keeps what it was made of alive")
        if torch.allclose(did.gradient, wanted):
            return
    first, last = case.gradients[0], case.gradients[-1]
    slips = {
        "has only its own gradient: the two copies will drift apart": case.gradients[stage],
        "has the other end's gradient, without its own": (last, first)[stage > 0],
        "has the mean; two uses of one weight add up": wanted / 2,
        "counts it twice: with one stage there is one copy": 2 * wanted,
    }
    said = [text for text, value in slips.items() if did.gradient is not None and torch.allclose(did.gradient, value)]
    raise CheckFailed(f"{who} " + (said[0] if said else "has no sum of the two gradients"))
