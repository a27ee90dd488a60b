"""Lab 03, when to communicate: while backward still runs, and once for several microbatches."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from course.kit import answers_of
from course.kit.blame import summary
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab03_data_parallel import rank_programs
from course.lab03_data_parallel.rank_programs import Net, Trained, TrainingCase
from course.shared.trials import run
from minillm import measure
from minillm.comm import Group, RankError

ANSWERS = answers_of("03_data_parallel")

MICROBATCHES = 3


# Overlap.


@exercise(
    "overlap-hooks",
    minutes=25,
    difficulty=4,
    hints=(
        "parameter.register_post_accumulate_grad_hook(f) calls f(parameter) as soon as its gradient is complete, in "
        "the middle of backward. What does a bucket have to know to see that it is full?",
        "Count down the gradients each bucket still misses. When the next bucket *in the order of the list* misses "
        "none, start group.all_reduce(flat, op='avg', async_op=True) and keep the handle. finish() waits for all "
        "handles and sets the counts back for the next step.",
        "def arrived(index): missing[index] -= 1; while len(handles) < len(buckets) and missing[len(handles)] == 0: "
        "handles.append(group.all_reduce(buckets[len(handles)].flat, op='avg', async_op=True)). In the loop over "
        "parameters bind index: lambda _, index=index: arrived(index).",
    ),
)
def check_overlap(learner: Callable) -> Receipt:
    case = TrainingCase(unused=False, steps=4)
    matrix = case.size * case.size * 8
    try:
        ranks = run(_overlapped, case.world_size, learner, case, matrix)
    except (CheckFailed, RankError) as stopped:  # does it work where gradients become ready in one order everywhere?
        _judge_logs(run(_overlapped, case.world_size, learner, case, matrix, False))
        raise CheckFailed(
            f"{summary(stopped).removeprefix('CheckFailed: ')}\nOdd ranks computed two branches in the other order: "
            "all ranks must start the same buckets in the same order, the list's, whatever becomes ready first"
        ) from None
    _judge_logs(ranks)
    buckets = ranks[0].note.split("|")
    orders = [[entry[1] for entry in trained.log[0] if entry[0] == "start"] for trained in ranks]
    for rank, order in enumerate(orders):
        if order != orders[0]:
            raise CheckFailed(
                f"rank 0 starts its buckets in the order {orders[0]}, rank {rank} in the order {order}: an all-reduce "
                "pairs whatever comes next on every rank. Start bucket i only after bucket i-1, in the list's order"
            )
    rows = rank_programs.right_gradients(case, ranks)
    before = [[entry[0] for entry in trained.log[-1]] for trained in ranks]
    early = min(log[: log.index("end")].count("start") for log in before)
    rows.append(row("all-reduces per step: one per bucket", len(buckets), ranks[0].calls["all_reduce"] / case.steps))
    rows.append(row("of these, started before backward ended", len(buckets), early))
    rows.append(rank_programs.byte_row(case, ranks, "start every bucket once per step"))
    # Both branches in one bucket: the parameter that becomes ready last is not the same on all ranks.
    # And a gradient that is zero.
    _judge_logs(run(_overlapped, 2, learner, TrainingCase(2, unused=False, steps=1, idle=(0, 1)), 3 * matrix))
    _judge_two_models(learner, matrix)
    return receipt("all-reduces during backward, on 3 ranks", rows)


def _judge_two_models(learner: Callable, matrix: int) -> None:
    """CheckFailed if a call of the learner's function shares what it counts with another call."""
    case = TrainingCase(random.choice((2, 4, 5, 6)), unused=False, steps=1)
    pairs = run(_two_models, case.world_size, learner, case, (3 * matrix, matrix))
    for trained in zip(*pairs, strict=True):
        try:
            rank_programs.right_gradients(case, trained)
        except CheckFailed as failure:
            raise CheckFailed(
                f"right for one model, but with two of them at once {failure}. What a call counts and waits for "
                "belongs to that call"
            ) from None


def _two_models(group: Group, learner: Callable, case: TrainingCase, caps: Sequence[int]) -> list[Trained]:
    """A step of two models whose all-reduces are under way at the same time."""
    models = [case.model() for _ in caps]
    packed = [ANSWERS.make_buckets(model.parameters(), cap) for model, cap in zip(models, caps, strict=True)]
    finishes = [learner(buckets, group) for buckets in packed]
    for model in models:
        rank_programs.loss_of(model, *case.data(0, group.rank)).backward()
    for finish in finishes:
        finish()
    return [Trained([rank_programs.gradients(m)], rank_programs.weights(m), Counter(), 0) for m in models]


def _judge_logs(ranks: list[Trained]) -> None:
    for step in range(len(ranks[0].log)):
        for rank, trained in enumerate(ranks):
            try:
                _judge_log(trained.log[step], rank, trained.note.split("|"))
            except CheckFailed as failure:
                if not step:
                    raise
                raise CheckFailed(
                    f"the order of events is right in step 1, but in step {step + 1} {failure}. What does finish leave "
                    "for the next step?"
                ) from None


def _judge_log(log: list[tuple], rank: int, buckets: list[str]) -> None:
    """CheckFailed if a step's events are not those of an overlapped reduction."""
    words, who = [entry[0] for entry in log], f"on rank {rank}"
    inside = log[: words.index("end")]
    starts = [entry for entry in log if entry[0] == "start"]
    if not starts:
        raise CheckFailed(f"{who} no all-reduce of a bucket's flat tensor was started at all")
    if "start" not in words[: words.index("end")]:
        raise CheckFailed(
            f"{who} the first all-reduce starts after backward has ended: nothing overlaps. Start it in the hook"
        )
    for _, index, waits in starts:
        if waits:
            raise CheckFailed(f"{who} bucket {index} blocks backward until it is reduced: use async_op=True")
    if any(entry[0] == "wait" for entry in inside):
        raise CheckFailed(f"{who} you wait for a handle while backward still runs: keep it, and wait in finish")
    ready: list[str] = []
    started: set[int] = set()
    members = [bucket.split() for bucket in buckets]
    for entry in [*inside, ("end", "")]:
        if entry[0] == "start":
            if missing := set(members[entry[1]]) - set(ready):
                raise CheckFailed(f"{who} bucket {entry[1]} starts before the gradient of {min(missing)} is there")
            started.add(entry[1])
            continue
        complete = itertools.takewhile(lambda index: set(members[index]) <= set(ready), range(len(members)))
        if late := [index for index in complete if index not in started]:
            raise CheckFailed(
                f"{who} bucket {late[0]} and all before it are complete when the gradient of {ready[-1]} arrives, but "
                "it is not started then: start it in that hook, and do not tell by values whether a gradient has "
                "arrived (they may be zero)"
            )
        ready.append(entry[1])
    waited = sum(word == "wait" for word in words)
    if waited < len(starts):
        raise CheckFailed(f"{who} finish returns after {waited} of {len(starts)} handles were waited for")


def _overlapped(group: Group, learner: Callable, case: TrainingCase, cap: int, flip: bool = True) -> Trained:
    """cap: bytes that fill a bucket.

    flip: odd ranks compute two branches in the other order, so their gradients become ready in another order."""
    state: dict[str, Any] = {"log": []}

    def prepare(model: Net) -> None:
        buckets = ANSWERS.make_buckets(model.parameters(), cap)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: state["log"].append(("gradient", name))
                )
        names = {parameter: name for name, parameter in model.named_parameters()}
        state.update(buckets=buckets, names=[" ".join(names[p] for p in bucket.parameters) for bucket in buckets])
        _note_starts(group, [bucket.flat for bucket in buckets], state)
        state["finish"] = learner(buckets, group)
        if not callable(state["finish"]):
            raise CheckFailed("return a function finish() that waits for the all-reduces")

    logs = []

    def step_of(model: Net, step: int) -> None:
        if "finish" not in state:
            prepare(model)
        state["log"] = []
        for bucket in state["buckets"]:
            bucket.flat.zero_()
        rank_programs.loss_of(model, *case.data(step, group.rank)).backward()
        state["log"].append(("end",))
        state["finish"]()
        logs.append(state["log"])

    trained = rank_programs.train(group, case, step_of, flip=flip and group.rank % 2 == 1)
    trained.log, trained.note = logs, "|".join(state["names"])
    return trained


def _note_starts(group: Group, flats: list[Tensor], state: dict[str, Any]) -> None:
    """From now on `group.all_reduce` logs which bucket it starts, whether it blocks, and when it is waited for."""
    post = group.all_reduce

    def all_reduce(x: Tensor, op: str = "sum", async_op: bool = False) -> Any:
        at = [index for index, flat in enumerate(flats) if flat.data_ptr() == x.data_ptr()]
        state["log"] += [("start", index, not async_op) for index in at]
        result = post(x, op, async_op)
        if async_op:
            wait = result.wait

            def noted() -> Any:
                state["log"].append(("wait",))
                return wait()

            result.wait = noted
        return result

    group.all_reduce = all_reduce


# Accumulation.


@exercise(
    "accumulate-no-sync",
    minutes=10,
    difficulty=2,
    hints=(
        "backward adds to .grad. When is the first moment at which averaging over ranks is worth anything?",
        "All microbatches but the last run, forward and backward, under `with ddp.no_sync():`. Each microbatch's loss "
        "is a mean over it, and you want the mean over all of them.",
    ),
)
def check_accumulate(learner: Callable) -> Receipt:
    case = TrainingCase(world_size=2, unused=False, batch=MICROBATCHES * random.randint(1, 12))
    ranks = run(_accumulated, case.world_size, learner, case, MICROBATCHES)
    k, per_step = MICROBATCHES, ranks[0].calls["all_reduce"] / case.steps
    buckets = int(ranks[0].note)
    if not per_step:
        raise CheckFailed("nothing was reduced at all: the last microbatch's backward must be outside no_sync")
    also = {
        float(k): f"the mean times {k}: each microbatch's loss is a mean, so divide it by the number of microbatches",
        1 / k: f"the mean divided by {k} once more",
    }
    rows = rank_programs.right_gradients(case, ranks, also)
    if per_step > buckets:
        raise CheckFailed(
            f"right gradients, but {per_step:g} all-reduces per step of {k} microbatches where {buckets} are enough: "
            "all but the last microbatch belong under ddp.no_sync()",
            rows,
        )
    for trained in ranks:
        _one_at_a_time(trained, rows)
    for count in (random.choice((2, 4, 5, 6, 7)), 1):
        other = TrainingCase(world_size=2, unused=False, steps=1, batch=count * random.randint(2, 12))
        try:
            rank_programs.right_gradients(
                other, run(_accumulated, 2, learner, other, count), {count / k: f"right for {k} only"}
            )
        except CheckFailed as failure:
            raise CheckFailed(f"right for {k} microbatches, but for {count} {failure}") from None
    rows.append(row(f"all-reduces per step of {k} microbatches", buckets, per_step))
    rows.append(row("    microbatches whose activations are held at once", 1, 1))
    rows.append(rank_programs.byte_row(case, ranks, "reduce in the last microbatch only"))
    rows.append(row(f"    without no_sync: all-reduces, {k} times as many", None, k * buckets))
    return receipt("one reduction for several microbatches, 2 ranks", rows)


def _one_at_a_time(trained: Trained, rows: list) -> None:
    """CheckFailed if a rank holds more than one microbatch's activations, or reduces by luck."""
    for step in trained.log:
        samples, held = (max(forward[i] for forward in step) for i in (0, 1))
        synced = sum(forward[2] for forward in step)
        if samples > (microbatch := step[0][3]):
            raise CheckFailed(
                f"right gradients, but one forward took {samples} samples where a microbatch has {microbatch}: joined "
                "microbatches need the activations of the whole batch at once",
                rows,
            )
        if held > 1:
            raise CheckFailed(
                f"right gradients, but the activations of {held} microbatches are held at once: run backward for each "
                "microbatch before the forward of the next",
                rows,
            )
        if synced > 1:
            raise CheckFailed(
                f"right gradients, but {synced} forwards ran outside ddp.no_sync(): torch's DDP decides in forward "
                "whether the backward reduces, so the forward of all microbatches but the last belongs inside, too",
                rows,
            )


def _accumulated(group: Group, learner: Callable, case: TrainingCase, microbatches: int) -> Trained:
    from minillm.parallel import BucketedDDP  # ranks that check something else start without it

    state: dict[str, BucketedDDP] = {}
    log: list[list[tuple]] = []  # per step and forward: samples, graphs alive, outside no_sync, samples of a microbatch

    def step_of(model: Net, step: int) -> None:
        model.zero_grad()
        x, y = case.data(step, group.rank)
        alive: set[int] = set()
        log.append([])

        def loss_of(ddp: nn.Module, x_: Tensor, y_: Tensor) -> Tensor:
            loss = rank_programs.loss_of(ddp, x_, y_)
            if loss.requires_grad and ddp in (state["ddp"], state["ddp"].module):
                this = len(log[-1])
                alive.add(this)
                loss.register_hook(lambda gradient: alive.discard(this))
                log[-1].append((len(x_), len(alive), state["ddp"].reducer.sync, len(x) // microbatches))
            return loss

        learner(state["ddp"], list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)), loss_of)

    # The first reduction finds out in which order gradients become ready; what follows is the steady state.
    model = case.model()
    state["ddp"] = BucketedDDP(model, group, bucket_cap_mb=case.size**2 * 16 / 2**20, first_bucket_mb=1e-9)
    rank_programs.loss_of(state["ddp"], *case.data(0, group.rank)).backward()
    with measure.ledger() as led:
        model.zero_grad()
        rank_programs.loss_of(state["ddp"], *case.data(0, group.rank)).backward()
    trained = rank_programs.train(group, case, step_of, model=model)
    trained.calls = type(trained.calls)({"all_reduce": trained.calls["all_reduce"]})
    trained.note, trained.log = str(led.calls["all_reduce"]), log
    return trained
