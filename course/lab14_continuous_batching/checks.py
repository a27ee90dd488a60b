"""Lab 14, continuous batching: which sequences are in the next forward pass, and with how many tokens.

    checks.py              sequences that join and leave at every step; a step under a token budget
    checks_order.py        which sequence to preempt; a queue without starvation
    checks_preemption.py   blocks given up and won back
    checks_flight.py       TTFT, TPOT and gaps from a flight recorder; what is wrong with a scheduler

A plan is judged by what must hold of it and by what follows when a whole trace is played with it; another plan that
keeps the rules passes.
"""

import random
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab14_continuous_batching import formulas as predict
from course.shared.diagnose import expect, expect_list
from minillm.serve import Sequence as Seq

ANSWERS = answers_of("14_continuous_batching")


@exercise(
    "join-and-leave",
    minutes=15,
    difficulty=1,
    hints=(
        "A batch has max_num_seqs places. What happens to a place at the end of the step in which its request got its "
        "last token, and what decides that: the request or the batch?",
        "Keep how many tokens each request still lacks. Each step: fill free places from the front of the queue, note "
        "the batch, subtract one from each, and keep those that lack more.",
    ),
)
def check_join(learner: Callable) -> Receipt:
    rows = []
    skewed = [1 + min(60, int(random.expovariate(1 / 12))) for _ in range(40)]
    for name, lengths, max_num_seqs in (
        ("40 skewed answers, at most 8 at once", skewed, 8),
        ("one at a time", [random.randint(1, 6) for _ in range(5)], 1),
        ("fewer requests than places", [random.randint(1, 9) for _ in range(4)], 6),
        ("32 alike, at most 8 at once", [12] * 32, 8),
    ):
        steps = _read_steps(learner(list(lengths), max_num_seqs), name)
        _hold_steps(steps, lengths, max_num_seqs, name)
        rows.append(row(f"{name}: decode steps", predict.continuous_steps(lengths, max_num_seqs), len(steps)))
        rows.append(row("    of static batches", None, predict.static_steps(lengths, max_num_seqs)))
        rows.append(row("    of any schedule, at least", None, predict.least_steps(lengths, max_num_seqs)))
    return receipt("decode steps, counted", rows)


def _read_steps(found: Any, where: str) -> list[list[int]]:
    return [*map(list, expect_list(found, "one list of requests per step", f"{where}: you", of=list | tuple | set))]


def _hold_steps(steps: list[list[int]], lengths: Sequence[int], max_num_seqs: int, where: str) -> None:
    inside: dict[int, list[int]] = {request: [] for request in range(len(lengths))}
    for number, step in enumerate(steps):
        if len(step) > max_num_seqs:
            raise CheckFailed(f"{where}: step {number} has {len(step)} requests, and max_num_seqs is {max_num_seqs}")
        if len(set(step)) < len(step) or not set(step) <= set(inside):
            raise CheckFailed(f"{where}: step {number} is {step}: each request once, numbers 0 to {len(lengths) - 1}")
        for request in step:
            inside[request].append(number)
    for request, when in inside.items():
        if len(when) != lengths[request]:
            raise CheckFailed(
                f"{where}: request {request} is in {len(when)} batches and needs {lengths[request]} tokens"
            )
        if when[-1] - when[0] + 1 != len(when):
            raise CheckFailed(f"{where}: request {request} leaves the batch and comes back; nothing preempted it here")
    starts = [when[0] for when in inside.values()]
    for request, start in enumerate(starts):
        if start and len(steps[start - 1]) < max_num_seqs:
            raise CheckFailed(
                f"{where}: a place is free in step {start - 1} while request {request} waits: it joins in step {start} "
                "only. A free place is taken at once, not when the batch is done"
            )
        if any(later < start for later in starts[request + 1 :]):
            raise CheckFailed(f"{where}: a later request joins before request {request}: first come, first served")


@exercise(
    "token-budget-step",
    minutes=20,
    difficulty=2,
    hints=(
        "Whether a sequence prefills or decodes is not stored anywhere: it lacks num_tokens - num_computed tokens. A "
        "decoding one lacks 1.",
        "Three passes over one budget: running ones that lack 1; running ones that lack more; waiting ones from the "
        "front, until max_num_seqs run. Each gets min(what it lacks, chunk, budget left).",
    ),
)
def check_plan(learner: Callable) -> Receipt:
    for _ in range(400):
        running, waiting, settings = _draw_state()
        _hold_plan(_ask(learner, running, waiting, *settings), running, waiting, *settings)
    rows = []
    for chunk in (8, 64):
        lengths = [(random.randint(1, 40), random.randint(1, 12)) for _ in range(16)]
        numbers = _play(learner, lengths, budget=64, chunk=chunk, max_num_seqs=6)
        due = _play(ANSWERS.plan_step, lengths, budget=64, chunk=chunk, max_num_seqs=6)
        rows.append(row(f"16 requests, chunk {chunk}: steps", due["steps"], numbers["steps"]))
        rows.append(row("    tokens computed", sum(p + n - 1 for p, n in lengths), numbers["tokens"]))
        rows.append(row("    steps in which a decoding sequence stood still", 0, numbers["stalled"]))
        rows.append(row("    steps with prompt and decode tokens mixed", None, numbers["mixed"]))
    return receipt("steps under a budget of 64 tokens, at most 6 sequences", rows)


def _draw_state() -> tuple[list[Seq], list[Seq], tuple[int, int, int]]:
    """(running, waiting, (budget, chunk, max_num_seqs)) as a scheduler may meet them."""
    max_num_seqs = random.randint(2, 8)
    budget, chunk = random.randint(max_num_seqs, 48), random.choice((3, 8, 64))
    running = [_sequence(f"r{i}", random.random() < 0.6) for i in range(random.randint(0, max_num_seqs))]
    waiting = [_sequence(f"w{i}", False) for i in range(random.randint(0, 5))]
    if waiting and random.random() < 0.3:  # one that comes back from the host, or hit the prefix cache
        back = random.choice(waiting)
        back.num_computed = random.choice((back.num_tokens - 1, random.randrange(back.num_tokens)))
    return running, waiting, (budget, chunk, max_num_seqs)


def _sequence(name: str, decoding: bool) -> Seq:
    tokens = random.randint(2, 40)
    return Seq([0] * tokens, 80, name=name, num_computed=tokens - 1 if decoding else random.randint(0, tokens - 2))


def _ask(learner: Callable, running: list[Seq], waiting: list[Seq], *settings: int) -> list[tuple[Seq, int]]:
    before = [_facts(s) for s in (*running, *waiting)]
    lists = list(running), list(waiting)
    found = learner(*lists, *settings)
    asked = "a list of (sequence, tokens)"
    plan = [tuple(expect_list(each, asked, count=2)) for each in expect_list(found, asked)]
    fits = all(isinstance(s, Seq) and isinstance(tokens, Integral) for s, tokens in plan)
    expect(fits, plan, "a list of (sequence, tokens), in this order")
    for s, facts in zip((*running, *waiting), before, strict=True):
        if changed := [name for name, value in _facts(s).items() if value != facts[name]]:
            raise CheckFailed(
                f"your plan changes {changed[0]} of {s.name}; a plan only says what the step will compute"
            )
    if lists != (running, waiting):
        raise CheckFailed("your plan changes the list running or waiting; a plan only says what the step will compute")
    return plan


def _facts(s: Seq) -> dict[str, Any]:
    names = ("num_tokens", "num_computed", "state", "rank", "last_step", "priority", "preemptions")
    return {name: getattr(s, name) for name in names} | {"blocks": list(s.blocks)}


def _hold_plan(plan: list, running: list[Seq], waiting: list[Seq], budget: int, chunk: int, max_num_seqs: int) -> None:
    lacks = {s.name: s.num_tokens - s.num_computed for s in (*running, *waiting)}
    state = "lacking " + ", ".join(f"{name} {n}" for name, n in lacks.items())
    where = f"budget {budget}, chunk {chunk}, at most {max_num_seqs} sequences; {state}"
    given = {s.name: n for s, n in plan}
    if len(given) < len(plan):
        raise CheckFailed(f"{where}: a sequence is in the plan twice")
    for name, tokens in given.items():
        if not 1 <= tokens <= lacks[name]:
            raise CheckFailed(f"{where}: {name} gets {tokens} tokens and lacks {lacks[name]}")
        if tokens > chunk:
            raise CheckFailed(f"{where}: {name} gets {tokens} tokens, more than a chunk")
    for s in running:
        if lacks[s.name] == 1 and s.name not in given:
            raise CheckFailed(f"{where}: {s.name} lacks one token and gets none: a prompt stalls it for a step")
    if sum(given.values()) > budget:
        raise CheckFailed(f"{where}: the plan has {sum(given.values())} tokens, more than the budget")
    taken = [s.name in given for s in waiting]
    if len(running) + sum(taken) > max_num_seqs:
        raise CheckFailed(f"{where}: {sum(taken)} are let in beside {len(running)} running")
    if taken != sorted(taken, reverse=True):
        skipped = waiting[taken.index(False)].name
        raise CheckFailed(f"{where}: {skipped} waits while a later one is let in; a long request would wait for ever")
    left = budget - sum(given.values())
    short = [s for s in running if given.get(s.name, 0) < min(lacks[s.name], chunk)]
    if short and (left or any(taken)):
        raise CheckFailed(
            f"{where}: {short[0].name} has begun its prompt and gets {given.get(short[0].name, 0)}, while "
            + (f"{left} tokens are left over" if left else "one that waited is let in")
        )
    halves = [s for s in waiting if 0 < given.get(s.name, 0) < min(lacks[s.name], chunk)]
    if left and (halves or (not all(taken) and len(running) + sum(taken) < max_num_seqs)):
        raise CheckFailed(f"{where}: {left} tokens of the budget are left over while a prompt could use them")
    queue = [s for s in (*running, *waiting) if lacks[s.name] > 1 or s in waiting]
    held_up = next((s for s in queue if given.get(s.name, 0) < min(lacks[s.name], chunk)), None)
    if held_up and (later := [s.name for s in queue[queue.index(held_up) + 1 :] if s.name in given]):
        raise CheckFailed(
            f"{where}: {held_up.name} gets {given.get(held_up.name, 0)} tokens while {later[0]}, which comes after it, "
            f"gets {given[later[0]]}. In order: the next one's turn comes when this one has all it lacks, or a chunk"
        )


def _play(
    plan: Callable, lengths: Sequence[tuple[int, int]], budget: int, chunk: int, max_num_seqs: int
) -> dict[str, int]:
    """Plays (prompt, answer) requests to the end; counts. Blocks are not short here."""
    waiting = [Seq([0] * prompt, prompt + answer, name=f"q{i}") for i, (prompt, answer) in enumerate(lengths)]
    running: list[Seq] = []
    counts = {"steps": 0, "tokens": 0, "stalled": 0, "mixed": 0}
    while waiting or running:
        step = _ask(plan, running, waiting, budget, chunk, max_num_seqs)
        if not step or counts["steps"] > 2000:
            raise CheckFailed(f"{len(waiting)} wait and {len(running)} run, and your plan is empty: they wait for ever")
        chosen = {s.name for s, _ in step}
        decoding = {s.name for s in running if s.num_uncomputed == 1}
        counts["steps"] += 1
        counts["tokens"] += sum(tokens for _, tokens in step)
        counts["stalled"] += bool(decoding - chosen)
        counts["mixed"] += bool(decoding & chosen) and any(tokens > 1 for _, tokens in step)
        running, waiting = (
            running + [s for s in waiting if s.name in chosen],
            [s for s in waiting if s.name not in chosen],
        )
        for sequence, tokens in step:
            sequence.num_computed += tokens
            if not sequence.num_uncomputed:
                sequence.tokens.append(0)
        running = [s for s in running if s.num_tokens < s.limit]
    return counts
