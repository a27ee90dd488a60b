"""Lab 06, pipeline parallelism: messages that cannot deadlock, and a backward in two halves."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course.kit import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, row
from course.lab06_pipeline_parallel import rank_programs
from course.lab06_pipeline_parallel.checks import as_action
from course.shared.measuring import count_flops
from course.shared.new_tensors import NewTensors
from course.shared.trials import run
from minillm.parallel.pipeline_parallel.schedule.actions import straight
from minillm.parallel.pipeline_parallel.schedule.schedules import Action, Edge, Schedule, ScheduleError, Task, check
from minillm.predict.training import pipeline as predict

ANSWERS = answers_of("06_pipeline_parallel")

Message = tuple[str, str]  # (send or recv, the action whose result travels)


# What they are held to.


@exercise(
    "rendezvous-messages",
    minutes=20,
    difficulty=4,
    hints=(
        "Write the naive version first: receive what an action needs, do it, send what it made. Then look at stages 0 "
        "and 1 of 1F1B: who sends when the other one sends, too?",
        "A send and the receive after it stand next to each other, with no action between: post them at once, as one "
        "list. Forwards come from stage - 1 and go to stage + 1, backwards the other way.",
    ),
)
def check_messages(learner: Callable) -> Receipt:
    programs, names = [], []
    for make, name, stages, microbatches in (
        (_from_the_last, "GPipe with backwards from the last", 3, 3),
        (ANSWERS.one_f_one_b_order, "1F1B", 4, 8),
        (ANSWERS.one_f_one_b_order, "1F1B", 2, random.randint(11, 13)),
        (ANSWERS.one_f_one_b_order, "1F1B", 1, 2),
    ):
        where = f"{name}, {stages} stage{'s' * (stages > 1)}, {microbatches} microbatches"
        orders = [make(stage, stages, microbatches) for stage in range(stages)]
        steps = [_read(learner(list(order), stage, stages), order, stage, where) for stage, order in enumerate(orders)]
        _judge_places(steps, stages, microbatches, where)
        _judge_rendezvous(steps, where)
        programs.append((stages, steps))
        names.append((where, predict.sends(stages, microbatches)))
    ranks = run(rank_programs.run_messages, 4, programs)
    rows = []
    for index, (where, due) in enumerate(names):
        found = [rank[index] for rank in ranks if rank[index] is not None]
        rows.append(row(f"{where}: messages of all stages", due, sum(sent for _, sent in found)))
        rows.append(row("    that brought something else", 0, sum(len(wrong) for wrong, _ in found)))
    return Receipt("on real ranks, each exchange waited for", tuple(rows))


def _from_the_last(stage: int, stages: int, microbatches: int) -> list[str]:
    return [f"F{m}" for m in range(microbatches)] + [f"B{m}" for m in reversed(range(microbatches))]


def _read(steps: Any, order: Sequence[str], stage: int, where: str) -> list[str | list[Message]]:
    """The learner's steps with messages taken apart; CheckFailed unless they hold the order's actions."""
    if not isinstance(steps, list | tuple):
        raise CheckFailed(
            f'stage {stage}: you returned {steps!r:.40}; the exercise asks for a list such as ["F0", ["send F0"]]'
        )
    found = [step if isinstance(step, str) else [_message(text, stage) for text in step] for step in steps]
    loose = next((step for step in found if isinstance(step, str) and " " in step), None)
    if loose:
        raise CheckFailed(f'stage {stage}: put messages into lists: ["{loose}"], or several that are posted at once')
    actions = [step for step in found if isinstance(step, str)]
    if actions != list(order):
        raise CheckFailed(f"{where}: stage {stage} does {' '.join(actions)}; keep the order: {' '.join(order)}")
    return found


def _message(text: Any, stage: int) -> Message:
    verb, _, name = str(text).partition(" ")
    if verb not in ("send", "recv"):
        raise CheckFailed(f'stage {stage}: {text!r} is no message; write "send F0" or "recv B0"')
    return verb, str(as_action(name, stage))


def _judge_places(steps: Sequence[list], stages: int, microbatches: int, where: str) -> None:
    """CheckFailed unless every message is sent after it is made and received before it is needed, once."""
    route = (straight(stages),) * microbatches
    bare = tuple(tuple(Action.parse(step) for step in own if isinstance(step, str)) for own in steps)
    known = {(edge.source, edge.ranks): edge for edge in Schedule("bare", bare, route).messages}
    orders = []
    for stage, own in enumerate(steps):
        order: list[Action | Edge] = []
        for step in own:
            order += [Action.parse(step)] if isinstance(step, str) else []
            for verb, name in step if isinstance(step, list) else ():
                onward = 1 if name[0] == "F" else -1
                ends = (stage, stage + onward) if verb == "send" else (stage - onward, stage)
                edge = known.get((Task(ends[0], Action.parse(name)), ends))
                if edge is None:
                    there = (
                        "nobody is there" if not all(0 <= end < stages for end in ends) else "there is no such message"
                    )
                    raise CheckFailed(f"{where}: stage {stage} has '{verb} {name}', but {there}")
                order.append(edge)
        orders.append(tuple(order))
    try:
        check(Schedule("yours", tuple(orders), route))
    except ScheduleError as error:
        if not str(error).startswith("deadlock"):
            raise CheckFailed(f"{where}: {error}") from None


def _judge_rendezvous(steps: Sequence[list], where: str) -> None:
    """CheckFailed for a deadlock: stages wait for each other in a circle.

    A list of messages ends when all of them have arrived.
    """
    at, met = [0] * len(steps), [set() for _ in steps]  # met[stage]: what it has posted so far
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(steps):
            while at[stage] < len(own):
                step = own[at[stage]]
                if isinstance(step, list):
                    moved |= not met[stage].issuperset(step)
                    met[stage].update(step)
                    if _waiting(step, stage, met):
                        break
                at[stage] += 1
                moved = True
    stuck = {stage: _waiting(own[at[stage]], stage, met) for stage, own in enumerate(steps) if at[stage] < len(own)}
    if stuck:
        text = ", ".join(f"stage {stage} in '{verb} {name}'" for stage, [(verb, name), *_] in stuck.items())
        sends = {(stage, name[0]) for stage, waiting in stuck.items() for verb, name in waiting if verb == "send"}
        advice = "A receive stands too early: post it right before the action that needs it"
        if any(kind == "F" and (stage + 1, "B") in sends for stage, kind in sends):
            advice = (
                "Where two neighbours send to each other, post the send together with the receive that follows it, in "
                "one list"
            )
        raise CheckFailed(f"{where}: deadlock, if sends wait for their receives: {text}. {advice}")


def _waiting(batch: Sequence[Message], stage: int, met: Sequence[set[Message]]) -> list[Message]:
    """Messages of the batch whose other end has not been posted."""
    found = []
    for verb, name in batch:
        onward = (1 if name[0] == "F" else -1) * (1 if verb == "send" else -1)
        other = "recv" if verb == "send" else "send"
        if (other, name) not in met[stage + onward]:
            found.append((verb, name))
    return found


@exercise(
    "split-backward",
    minutes=15,
    difficulty=3,
    hints=(
        "Two matrix products make up the backward of a linear layer. For which of them does the stage before wait?",
        "backward returns gradient @ weight for x, None for the rest, and appends a function to `later` which, when "
        "called, adds gradient.T @ x to weight.grad (which is None at first).",
    ),
)
def check_split(learner: Any) -> Receipt:
    layers, microbatches, tokens = random.randint(2, 4), 3, 2
    widths = random.sample(range(24, 40), layers + 1)
    weights = [
        nn.Parameter(torch.randn(outputs, inputs, dtype=torch.float64) / inputs**0.5)
        for inputs, outputs in itertools.pairwise(widths)
    ]
    alone = [nn.Parameter(weight.detach().clone()) for weight in weights]
    product = 2 * tokens * sum(weight.numel() for weight in weights)
    flops = {"forward": 0, "backward": 0, "later": 0}
    most_alive, later, passes = 0, [[] for _ in range(microbatches)], []
    for queue in later:  # all forwards come first, as in a pipeline
        given = torch.randn(tokens, widths[0], dtype=torch.float64)
        x, twin = given.clone().requires_grad_(), given.clone().requires_grad_()
        y, right = [x], twin
        flops["forward"] += count_flops(lambda y=y, queue=queue: _through(learner, y, weights, queue))
        for weight in alone:
            right = torch.tanh(right @ weight.T)
        right.square().sum().backward()
        passes.append((x, twin, y))
    for m, ((x, twin, y), queue) in enumerate(zip(passes, later, strict=True)):
        with NewTensors(*weights) as made:
            flops["backward"] += count_flops(lambda y=y: y[-1].square().sum().backward())
        most_alive = max(most_alive, made.most_alive)
        _judge_input(x, twin, weights, queue)
        if len(queue) != layers:
            others = sum(map(len, later[m + 1 :]))
            raise CheckFailed(
                f"{len(queue)} functions in later after a backward through {layers} layers; one each"
                + f". Lists of other microbatches hold {others}: which list did this one's forward get?" * (others > 0)
            )
    for m in reversed(range(microbatches)):  # any order will do
        flops["later"] += count_flops(lambda queue=later[m]: [work() for work in queue])
    _judge_weights(weights, alone, microbatches)
    due = microbatches * product
    rows = [  # of products that are no matmuls torch counts none
        row(f"FLOPs of I, {layers} layers, {microbatches} microbatches", due, flops["backward"]),
        row("    of W", due if flops["later"] else None, flops["later"]),
        row("    of F", due, flops["forward"]),
        row("weight gradients of one whole backward", True, True),
    ]
    if flops["backward"] > due or (flops["later"] < due and most_alive >= sum(weight.numel() for weight in weights)):
        raise CheckFailed(
            "right gradients, but backward computes the product for the weight, too: it is not put off, only its "
            "addition",
            rows,
        )
    if flops["later"] > due:
        raise CheckFailed(
            f"right gradients, but what is put off takes {flops['later'] / due:g} products per layer: one is enough, "
            "gradient.T @ x",
            rows,
        )
    if any(weight.grad.requires_grad for weight in weights):
        raise CheckFailed(
            "right gradients, but weight.grad carries a graph, which keeps the activations alive: what is called later "
            "is recorded by autograd. Use x.detach(), or torch.no_grad()",
            rows,
        )
    return Receipt("B = I + W", tuple(rows))


def _through(learner: Any, y: list[Tensor], weights: Sequence[Tensor], later: list) -> None:
    for weight in weights:
        y.append(torch.tanh(learner.apply(y[-1], weight, later)))


def _judge_input(x: Tensor, twin: Tensor, weights: Sequence[Tensor], later: list) -> None:
    if x.grad is None or not torch.allclose(x.grad, twin.grad, rtol=1e-10, atol=1e-12):
        raise CheckFailed("the input's gradient is not right after backward: gradient @ weight, at once")
    if any(weight.grad is not None for weight in weights):
        raise CheckFailed(
            "after backward the weights have gradients already: nothing was put off" + " but the list" * bool(later)
        )


def _judge_weights(weights: Sequence[nn.Parameter], alone: Sequence[nn.Parameter], microbatches: int) -> None:
    for layer, (weight, right) in enumerate(zip(weights, alone, strict=True)):
        if weight.grad is None:
            raise CheckFailed(f"layer {layer}: no gradient after everything in later was called: add it to weight.grad")
        if not torch.allclose(weight.grad, right.grad):
            raise CheckFailed(
                f"layer {layer}: weight.grad is not the sum over {microbatches} microbatches: "
                "is each one's own x and gradient used, and added to what is there?"
            )
