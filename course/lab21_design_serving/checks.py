"""Lab 21: what fits beside the weights, and how long requests wait."""

import random
from typing import Any

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from minillm.predict.serving import queueing

ANSWERS = answers_of("21_design_serving")


@exercise(
    "sequences-that-fit",
    minutes=10,
    difficulty=2,
    hints=(
        "What is left on one GPU beside its part of the weights? And how many bytes does one sequence take there?",
        "Weights: 2 · parameters / tp. A token: keys and values of every layer, 2 bytes each, kv heads divided over "
        "the tp "
        "ranks; a rank holds at least one kv head.",
        "room = memory - 2 * parameters / tp; token = 2 * layers * max(kv_heads / tp, 1) * head_dim * 2; return max(0, "
        "int(room // (token * context)))",
    ),
)
def check_sequences(learner: Any) -> list[Row]:
    rows = []
    for tp in (1, 4, 16):
        kv_heads, layers, head_dim = 8, random.choice((32, 80)), 128
        memory, context = random.randint(60, 130) * 10**9, random.choice((2048, 8192))
        parameters = random.randint(7, 29) * 10**9
        used, expected = 2 * parameters / tp, 0
        each = sum(2 * 2 * head_dim * max(1, kv_heads // tp) for _ in range(layers)) * context
        while used + each <= memory:  # one by one, as a scheduler admits them
            used, expected = used + each, expected + 1
        found = learner(memory, parameters, tp, layers, kv_heads, head_dim, context)
        name = (
            f"{parameters / 1e9:.0f} billion, {memory / 1e9:.0f} GB per GPU, tp {tp}, {layers} layers, {context} tokens"
        )
        if found != expected:
            raise CheckFailed(
                f"{name}: you returned {found!r}; admitting one after the other, {expected} fit.", rows, evidence=found
            )
        rows.append(row(name, expected, found))
    if learner(10**9, 7 * 10**9, 1, 32, 8, 128, 2048) != 0:
        raise CheckFailed("Weights that do not fit leave room for 0 sequences, not for a negative number.", rows)
    return rows


@exercise(
    "queue-waits",
    minutes=15,
    difficulty=2,
    hints=(
        "When does the server become free for request i? And when does request i arrive?",
        "Its predecessor arrived earlier by gaps[i], waited, and was served. What of that is left when i arrives?",
        "wait[i] = max(0, wait[i - 1] + services[i - 1] - gaps[i]); the first waits 0.",
    ),
)
def check_waits(learner: Any) -> list[Row]:
    rows = []
    for count, load in ((1, 0.5), (200, 0.5), (4000, 0.85)):
        gaps = [random.expovariate(load) for _ in range(count)]
        services = [random.expovariate(1.0) for _ in range(count)]
        arrived, free, expected = 0.0, 0.0, []
        for gap, service in zip(gaps, services, strict=True):
            arrived += gap
            begins = max(arrived, free)
            expected.append(begins - arrived)
            free = begins + service
        found = learner(list(gaps), list(services))
        name = f"{count} requests at {load:.0%} load"
        if not isinstance(found, list) or len(found) != count:
            raise CheckFailed(
                f"{name}: the exercise asks for a list of {count} waits; you returned {_short(found)}.", rows
            )
        off = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if abs(a - b) > 1e-6), None)
        if off is not None:
            raise CheckFailed(
                f"{name}: request {off} waits {expected[off]:.4f} s; you say {found[off]:.4f} s.", rows, evidence=found
            )
        rows.append(row(f"{name}: mean wait", sum(expected) / count, sum(found) / count, "s", 1e-6))
        if count > 1000:
            rows.append(row("    long run, by formula", None, queueing.mean_wait(load, 1.0), "s"))
    return rows


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
