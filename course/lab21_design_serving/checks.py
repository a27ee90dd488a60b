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
    depths, contexts = random.sample((32, 40, 60, 80), 4), random.sample(range(1000, 9000), 4)
    shapes = ((1, 8), (4, 8), (4, 2), (2, random.choice((4, 16, 32))))
    for (tp, kv_heads), layers, context in zip(shapes, depths, contexts, strict=True):
        head_dim, memory = 128 if tp != 2 else 96, random.randint(60, 130) * 10**9
        billions = random.randint(7, 29) if kv_heads != 2 else random.randint(66, 99)  # more than one GPU holds
        parameters = billions * 10**9
        used, expected = 2 * parameters / tp, 0
        each = sum(2 * 2 * head_dim * max(1, kv_heads // tp) for _ in range(layers)) * context
        while used + each <= memory:  # one by one, as a scheduler admits them
            used, expected = used + each, expected + 1
        answered = learner(memory, parameters, tp, layers, kv_heads, head_dim, context)
        sizes = f"{billions} billion, {memory / 1e9:.0f} GB per GPU, tp {tp}"
        name = f"{sizes}, {layers} layers, {kv_heads} kv heads of {head_dim}, {context} tokens"
        rows.append(row(name, expected, expect_number(answered, "one number, of sequences")))
        if rows[-1].verdict == "off":
            said = f"{name}: you returned {answered!r}; admitting one after the other, {expected} fit."
            raise CheckFailed(said, rows, evidence=(name, answered))
    exact, none = "What fits to the last byte fits.", "Without room for a whole sequence the answer is 0."
    each = 4 * 32 * 8 * 128 * 2041
    corners = ((1, 3 * each, 3, exact), (1, 3 * each - 1, 2, exact), (4, each // 4 - 1, 0, none), (4, -1, 0, none))
    for tp, room, expected, why in (*corners, (1, -40 * 10**9, 0, none)):
        memory = 2 * 28 * 10**9 // tp + room
        answered = learner(memory, 28 * 10**9, tp, 32, 8, 128, 2041)
        if expect_number(answered, "one number, of sequences") != expected:
            said = f"28 billion parameters, tp {tp}, {memory:,} bytes per GPU, 2,041 tokens: {expected} sequences fit"
            raise CheckFailed(f"{said}; you returned {answered!r}. {why}", rows, evidence=(memory, answered))
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
    rows, returned = [], []
    for count, load in ((1, 0.5), (200, 0.5), (4000, 0.85), (0, 0.5)):
        gaps = [random.expovariate(load) for _ in range(count)]
        services = [random.expovariate(1.0) for _ in range(count)]
        arrived, free, expected = 0.0, 0.0, []
        for gap, service in zip(gaps, services, strict=True):
            arrived += gap
            begins = max(arrived, free)
            expected.append(begins - arrived)
            free = begins + service
        returned.append(learner(list(gaps), list(services)))
        answered = expect_list(returned[-1], f"a list of {count} waits", count=count)
        if any(returned[-1] is earlier for earlier in returned[:-1]):
            raise CheckFailed(
                "Two calls returned the same list: the second one overwrote what the first returned.", rows
            )
        name = f"{count} requests at {100 * load:.0f} % load"
        off = next((i for i, (a, b) in enumerate(zip(answered, expected, strict=True)) if abs(a - b) > 1e-9), None)
        if off is not None:
            said = f"{name}: request {off} waits {expected[off]:.10g} s; you say {answered[off]:.10g} s."
            rounded = all(abs(a - b) < 0.01 for a, b in zip(answered, expected, strict=True))
            why = " All are this close: is something rounded, or computed in float32?" if rounded else ""
            raise CheckFailed(said + why, rows, evidence=answered)
        if count:
            rows.append(row(f"{name}: mean wait", sum(expected) / count, sum(answered) / count, "s", 1e-6))
        if count > 1000:
            rows.append(row("    long run, by formula", None, queueing.mean_wait(load, 1.0), "s"))
    return rows
