"""Lab 14, the order: which sequence to preempt when blocks are short, and a queue without starvation."""

import random
from collections.abc import Callable, Sequence
from itertools import count

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab14_continuous_batching import formulas as predict
from course.shared.diagnose import expect
from minillm.serve import POLICIES
from minillm.serve import Sequence as Seq

ANSWERS = answers_of("14_continuous_batching")


@exercise(
    "preemption-victim",
    minutes=15,
    difficulty=2,
    hints=(
        "Before any policy: may the sequence that needs a block take it from one that was there before it? What would "
        "that one do in the next step?",
        "Keep only running sequences whose rank is greater than needy's. Then take the maximum of the policy's number; "
        "among equals the greatest rank.",
    ),
)
def check_victim(learner: Callable) -> Receipt:
    cases = {policy: [_draw_running() for _ in range(60)] for policy in POLICIES}
    needy = {policy: [random.choice(running) for running in drawn] for policy, drawn in cases.items()}
    found = {
        policy: [learner(list(running), each, policy) for running, each in zip(drawn, needy[policy], strict=True)]
        for policy, drawn in cases.items()
    }
    evidence = {policy: [getattr(each, "name", repr(each)) for each in chosen] for policy, chosen in found.items()}
    rows = []
    for policy, drawn in cases.items():
        for running, each, mine in zip(drawn, needy[policy], found[policy], strict=True):
            if (due := ANSWERS.victim(running, each, policy)) is not mine:
                raise CheckFailed(_wrong_victim(running, each, policy, mine, due), rows, evidence=evidence)
        rows.append(row(f"{policy}: the right one of those behind, of 60 draws", 60, len(drawn)))
    return receipt("which sequence to preempt", rows)


def _draw_running() -> list[Seq]:
    running = []
    for arrival in random.sample(range(12), random.randint(1, 6)):
        priority = random.randint(-1, 2)
        sequence = Seq([0] * random.randint(5, 9), 20, priority=priority, name=f"s{arrival}")
        sequence.rank, sequence.last_step = (arrival + 4 * priority, arrival, 0), random.randint(90, 93)
        running.append(sequence)
    return running


def _wrong_victim(running: Sequence[Seq], needy: Seq, policy: str, found: object, due: Seq | None) -> str:
    facts = "; ".join(
        f"{s.name} rank {s.rank[:2]}, {s.num_tokens} tokens, priority {s.priority}, last step {s.last_step}"
        for s in running
    )
    if found is not None and not isinstance(found, Seq):
        return f"you returned {found!r:.40}; the exercise asks for one of the sequences in running, or None"
    mine, right = ("no sequence" if each is None else each.name for each in (found, due))
    return f"{policy}, {needy.name} needs a block, running: {facts}: you preempt {mine}; it should be {right}."


@exercise(
    "patient-queue",
    minutes=15,
    difficulty=2,
    hints=(
        "With strict priorities an endless stream of important requests starves an unimportant one. Let priority be "
        "worth a bounded head start instead.",
        "Give each request one number when it comes, and never change it: its arrival plus patience for each level of "
        "priority. The smallest number goes first.",
    ),
)
def check_queue(learner: type) -> Receipt:
    rows = []
    for patience in (0, 4, 16):
        passed, gap = _overtakers(learner, patience), 2
        most = predict.overtakers(patience, gap)
        if passed is None:
            raise CheckFailed(
                f"patience {patience}: a request of priority 2 still waits after {most + 200} of priority 0 came after "
                "it and went: it starves"
            )
        if passed != most:
            raise CheckFailed(
                f"patience {patience}: {passed} later requests of priority 0 overtake one of priority 2; patience x 2 "
                f"levels - 1 = {most} may (of equal numbers the earlier goes)"
            )
        rows.append(row(f"patience {patience}: overtaken by, 2 levels of priority apart", most, passed))
    pops = _in_order(learner, 8)
    rows.append(row("300 pushes and pops, mixed: pops in order", pops, pops))
    return receipt("a queue that starves no request", rows)


def _overtakers(learner: type, patience: int) -> int | None:
    """How many of an endless stream of priority 0 go before one of priority 2 that came first; None: all."""
    queue, late = learner(patience), predict.overtakers(patience, 2)
    queue.push("patient", 2)
    for number in range(late + 200):
        queue.push(f"urgent {number}", 0)
        if _name(queue.pop()) == "patient":
            return number  # those pushed before this one and gone
    return None


def _in_order(learner: type, patience: int) -> int:
    """Pushes and pops at random; how many pops, all of them right."""
    queue, waiting, pops, arrivals = learner(patience), {}, 0, count()
    for _ in range(300):
        if random.random() < 0.55 or not waiting:
            arrival, priority = next(arrivals), random.randint(-1, 2)
            waiting[f"q{arrival}"] = (arrival + patience * priority, arrival)
            queue.push(f"q{arrival}", priority)
            continue
        name = _name(queue.pop())
        if name not in waiting:
            raise CheckFailed(f"pop returns {name}, which is not waiting (never came, or went already)")
        mine, pops = waiting.pop(name), pops + 1
        if ahead := [other for other, key in waiting.items() if key < mine]:
            first = min(ahead, key=waiting.get)
            raise CheckFailed(
                f"patience {patience}: pop returns {name} (arrival + patience x priority = {mine[0]}) before {first} "
                f"({waiting[first][0]}, lower priority numbers are sooner; equal: first come)"
            )
    return pops


def _name(found: object) -> str:
    expect(isinstance(found, str), found, "the name that was pushed", "pop")
    return found
