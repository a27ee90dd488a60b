"""Lab 25, compiler and graphs: one graph compiled once, a recorded decode step, which test finds which bug."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab25_kernels import experiments_breaks as breaks
from course.lab25_kernels.experiments import breaks_graph, graphs_by_call
from course.lab25_kernels.experiments_recorded import Recorded, Toy
from course.lab25_kernels.tried import only_with_triton
from course.shared.diagnose import expect, expect_like

CALLS = 6


@exercise(
    "one-graph",
    minutes=20,
    difficulty=3,
    hints=(
        "Which of its lines needs a number on the host before it can go on? And which attribute, read while "
        "compiling, is another one at the next call?",
        "torch.where chooses between two results without the host. A counter that is a tensor (register_buffer) is an "
        "input of the graph instead of a constant of it.",
    ),
)
def check_one_graph(learner: Any) -> Receipt:
    if not (isinstance(learner, type) and issubclass(learner, nn.Module)):
        raise CheckFailed("the exercise asks for a class, an nn.Module")
    width, limit = random.randint(3, 9), random.randint(32, 96) / 64  # exact in float32, since a tie is tried
    # Never as many rows as columns: the compiler would take the two sizes for one, and the graph for squares alone.
    heights = [each for each in range(2, 8) if each != width]
    inputs = [torch.randn(random.choice(heights), width) for _ in range(CALLS)]
    linear = nn.Linear(width, width)
    with torch.no_grad():  # no weight below 0: what a negative x, the first, gives is over the limit below 0 alone
        inputs[0] = -inputs[0].abs()
        linear.weight.abs_()[0] *= 0.02  # one column stays below the limit, and so does one row
        linear.bias.clamp_(-limit / 4, limit / 4)
        for place, x in enumerate(inputs):
            x[0] *= 0.02
            x *= 0.05 if place % 2 else 3 * limit / (x @ linear.weight.T).abs().max()
    module, other = learner(width, limit), learner(width, limit)
    names = sorted(name for name, _ in module.named_parameters())
    expect(names == ["linear.bias", "linear.weight"], names, "the parameters linear.weight and linear.bias", "Steady")
    with torch.no_grad():
        module.linear.weight.copy_(linear.weight)
        module.linear.bias.copy_(linear.bias)
    for number, x in enumerate(inputs, start=1):
        y = linear(x)
        over = bool(y.abs().max() > limit)
        y = y / 2 if over else y
        found = module(x)
        expect_like("Steady", found, y, f"a tensor {list(y.shape)}")
        if not torch.allclose(found, y, atol=1e-6):
            side = "above" if over else "below"
            raise CheckFailed(f"call {number}, largest |number| {side} the limit: the result is not that of Slow",
                              evidence=found.tolist())  # fmt: skip
        ours, theirs = (
            torch.autograd.grad(each.sum(), p)[0] for each, p in ((y, linear.weight), (found, module.linear.weight))
        )
        if not torch.allclose(ours, theirs, atol=1e-5):
            raise CheckFailed(
                f"call {number}: the gradient of the weights is not that of Slow", evidence=theirs.tolist()
            )
        if int(module.calls) != number:
            raise CheckFailed(f"after {number} calls module.calls is {int(module.calls)}", evidence=int(module.calls))
    _check_other_block(other, width, limit)
    counts = graphs_by_call(module, inputs)
    if counts[0] != 1:
        raise CheckFailed(f"the first call makes {counts[0]} graphs: {'something' if counts[0] else 'all'} in forward "
                          "still needs the host", evidence=counts)  # fmt: skip
    if counts[-1] != 1:
        raise CheckFailed(f"after {CALLS} calls there are {counts[-1]} graphs: a guard fails at later calls, so they "
                          "are compiled again", evidence=counts)  # fmt: skip
    if broken := breaks_graph(other, inputs[0]):
        raise CheckFailed("one graph is compiled, and it breaks: what comes after still needs the host at each call, "
                          f"as fullgraph=True says: {broken}", evidence=broken)  # fmt: skip
    if int(module.calls) != 2 * CALLS:
        raise CheckFailed(f"compiled, {CALLS} calls count as {int(module.calls) - CALLS}", evidence=int(module.calls))
    rows = [
        row("graphs after the first call", 1, counts[0]),
        row(f"    after {CALLS} calls of several sizes", 1, counts[-1]),
        row("    calls counted, compiled ones included", 2 * CALLS, int(module.calls)),
    ]
    return receipt("one graph, compiled once", rows)


def _check_other_block(block: nn.Module, width: int, limit: float) -> None:
    """A second block, which returns its input: the limit itself is not above the limit."""
    x = limit * (torch.rand(2, width) - 0.5)
    x[0, 0] = -limit
    with torch.no_grad():
        block.linear.weight.copy_(torch.eye(width))
        block.linear.bias.zero_()
        if not torch.equal(block(x), x):
            raise CheckFailed("the largest |number| is the limit itself: that is not above it, so nothing is halved")
    if int(block.calls) != 1:
        raise CheckFailed(f"a second block, called once, counts {int(block.calls)} calls: blocks share a counter")


@exercise(
    "replay-step",
    minutes=20,
    difficulty=2,
    hints=(
        "What does graph.tokens = tokens do to the array that the recording reads? And what is behind the first n "
        "places, from the step before?",
        "copy_ into the first n places, fill the rest with a sequence of this very step (its token and its slot), "
        "replay, and return a clone of the first n rows.",
    ),
)
def check_replay(learner: Callable) -> Receipt:
    model = Toy.drawn()
    sizes = (8, 2, 12, 1, 4)
    graphs = {size: Recorded(size, model) for size in sizes}
    kept, replayed = [], []
    for n in (3, 1, 12, 2, random.choice((5, 6, 7)), random.choice((9, 10, 11)), 3):
        tokens = torch.randint(len(model.rows), (n,))
        slots = torch.tensor(random.sample(range(len(model.cache)), n))
        right_cache = model.cache.clone()
        right_cache[slots] = model.keys[tokens]
        right = model.rows[tokens] + right_cache[slots, None]
        asked = f"logits, [{n}, {model.rows.shape[1]}]"
        before = {size: graph.replays for size, graph in graphs.items()}
        found = learner(graphs, tokens, slots)
        expect_like("you", found, right, asked)
        expect(found.shape == right.shape, list(found.shape), asked)
        used = [size for size, graph in graphs.items() for _ in range(graph.replays - before[size])]
        best = min(size for size in sizes if size >= n)
        if used != [best]:
            raise CheckFailed(f"a step of {n} replays the graphs of sizes {used}; it takes one replay of size {best}",
                              evidence=used)  # fmt: skip
        others = torch.nonzero(model.cache != right_cache).flatten().tolist()
        if others:
            where = f"slot {others[0]} of the cache"
            what = (
                "does not hold its token's key"
                if others[0] in slots.tolist()
                else "was another sequence's, and is overwritten"
            )
            raise CheckFailed(f"a step of {n} in a graph of {best}: {where} {what}", evidence=others)
        if not torch.equal(found, right):
            raise CheckFailed(f"a step of {n} in a graph of {best}: the logits are not those of its tokens and slots",
                              evidence=found.tolist())  # fmt: skip
        kept.append((found, right))
        replayed.append((n, best))
    late = [place for place, (found, right) in enumerate(kept) if not torch.equal(found, right)]
    if late:
        raise CheckFailed(f"the logits of step {late[0] + 1} were right, and a later replay has overwritten them",
                          evidence=late)  # fmt: skip
    rows = [row(f"a step of {n}: replayed size", best, best, kind="computed") for n, best in replayed[:1]]
    rows += [
        row("    replays in all", len(replayed), sum(graph.replays for graph in graphs.values())),
        row("    steps whose logits are still right at the end", len(kept), len(kept) - len(late)),
    ]
    return receipt("steps of 1 to 12 sequences, replayed", rows)


def check_verdict(learner: Callable) -> Receipt:
    rows = []
    for name in random.sample(sorted(breaks.BUGS), len(breaks.BUGS)):
        found = learner(breaks.program(name))
        right = breaks.BUGS[name]
        if found not in breaks.BUGS.values():
            raise CheckFailed(
                f"you returned {found!r}; the exercise asks for one of {sorted(set(breaks.BUGS.values()))}"
            )
        if found != right:
            raise CheckFailed(f"a program with the verdict '{found}' is: {right}", rows, evidence=(name, found))
        rows.append(row(f"program {name}", right, found))
    return receipt("which test finds which bug", sorted(rows, key=lambda each: each.name))


only_with_triton(
    exercise(
        "which-kernel-bug",
        minutes=20,
        difficulty=3,
        hints=(
            "For each bug: an input on which it shows. Which width has a tail, which needs two programs to a row, and "
            "how long is a row of ones that float16 cannot count?",
            "A width above 64 that 64 does not divide, then trace.outside and trace.races; the same shape twice with "
            "other numbers; a row of 4,099 ones.",
        ),
    ),
    check_verdict,
)
