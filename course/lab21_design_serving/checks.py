"""Lab 21: what fits beside the weights, and how long requests wait."""

import random
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Row, row
from course.shared.diagnose import expect_list, expect_number
from minillm.predict.serving import queueing


@exercise(
    "sequences-that-fit",
    minutes=10,
    difficulty=2,
    hints=(
        "What is left on one GPU beside its part of the weights? And how many bytes does one sequence take there?",
        "Weights: 2 · parameters / tp. A token: keys and values of every layer, 2 bytes each, kv heads divided over "
        "the tp ranks; a rank holds at least one kv head.",
    ),
)
def check_sequences(learner: Any) -> list[Row]:
    rows = []
    depths, contexts = random.sample((32, 40, 60, 80), 4), random.sample((1024, 2048, 4096, 8192), 4)
    shapes = ((1, 8), (4, 8), (16, 8), (2, random.choice((4, 16, 32))))
    for (tp, kv_heads), layers, context in zip(shapes, depths, contexts, strict=True):
        head_dim, memory = 128 if tp != 2 else 96, random.randint(60, 130) * 10**9
        parameters = random.randint(7, 29) * 10**9
        used, expected = 2 * parameters / tp, 0
        each = sum(2 * 2 * head_dim * max(1, kv_heads // tp) for _ in range(layers)) * context
        while used + each <= memory:  # one by one, as a scheduler admits them
            used, expected = used + each, expected + 1
        answered = learner(memory, parameters, tp, layers, kv_heads, head_dim, context)
        sizes = f"{parameters / 1e9:.0f} billion, {memory / 1e9:.0f} GB per GPU"
        name = f"{sizes}, tp {tp}, {layers} layers, {context} tokens"
        rows.append(row(name, expected, expect_number(answered, "one number, of sequences")))
        if rows[-1].verdict == "off":
            said = f"{name}: you returned {answered!r}; admitting one after the other, {expected} fit."
            raise CheckFailed(said, rows, evidence=answered)
    memory = 2 * 10**9 + 3 * 4 * 32 * 8 * 128 * 2048  # the weights of a billion parameters, and three caches
    for spare, fit in ((0, 3), (-1, 2)):
        answered = learner(memory + spare, 10**9, 1, 32, 8, 128, 2048)
        if expect_number(answered, "one number, of sequences") != fit:
            said = f"{memory + spare:,} bytes hold 1 billion parameters and {fit} sequences; you returned {answered!r}."
            raise CheckFailed(f"{said} What fits to the last byte fits.", rows, evidence=answered)
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
        answered = expect_list(learner(list(gaps), list(services)), f"a list of {count} waits", count=count)
        name = f"{count} requests at {100 * load:.0f} % load"
        off = next((i for i, (a, b) in enumerate(zip(answered, expected, strict=True)) if abs(a - b) > 1e-6), None)
        if off is not None:
            said = f"{name}: request {off} waits {expected[off]:.4f} s; you say {answered[off]:.4f} s."
            raise CheckFailed(said, rows, evidence=answered)
        rows.append(row(f"{name}: mean wait", sum(expected) / count, sum(answered) / count, "s", 1e-6))
        if count > 1000:
            rows.append(row("    long run, by formula", None, queueing.mean_wait(load, 1.0), "s"))
    return rows
