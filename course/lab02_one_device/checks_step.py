"""Lab 02, the step: the same gradients and updates with less memory, in fewer bits, from shards.

Accumulation is compared with the mean over all tokens, loss scaling with torch's GradScaler, recomputation with plain
autograd, clipping with clip_grad_norm_. `watching.py` and `stepping.py` say what was held, computed, repeated.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, Row, receipt, row
from course.lab02_one_device import stepping, watching
from course.shared.diagnose import expect_number

ANSWERS = answers_of("02_one_device")

# Accumulation.


@exercise(
    "accumulate",
    minutes=10,
    difficulty=2,
    hints=(
        "backward() adds to .grad. What must each microbatch's sum be divided by, so that the sums add up to one mean?",
        "Count the targets that are not -100 over all microbatches first. Then forward, divide, backward, one "
        "microbatch after the other, so that the activations of one are gone before the next.",
    ),
)
def check_accumulate(learner: Callable) -> Receipt:
    counts = random.sample(range(2, 7), 2)
    first, second = (_judge_accumulate(learner, *case) for case in zip(counts, (False, True), strict=True))
    return receipt(first.title, [*first.rows, *second.rows])


def _judge_accumulate(learner: Callable, count: int, has_empty: bool) -> Receipt:
    batches = watching.draw_microbatches(count, has_empty)
    right, mine = (watching.accumulated(function, batches) for function in (ANSWERS.accumulate, learner))
    single = watching.accumulated(ANSWERS.accumulate, batches[:1]).activation
    least = count - has_empty  # forward passes: a microbatch that counts no token may be left out
    if any(gradient is None for gradient in mine.gradients):
        raise CheckFailed("some parameters have no gradient: every microbatch needs a backward()")
    if has_empty and not all(gradient.isfinite().all() for gradient in mine.gradients):
        raise CheckFailed("one microbatch counts no token, and the gradient became NaN: the mean of none is 0 / 0")
    if not all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(mine.gradients, right.gradients, strict=True)):
        found, due = (torch.cat([each.flatten() for each in part]) for part in (mine.gradients, right.gradients))
        off = ((found - due).norm() / due.norm()).item()
        raise CheckFailed(f"The gradient is not that of one big batch: it is off by {off:.0%}.", evidence=found)
    loss = expect_number(mine.loss, "the mean loss, a float")
    if not math.isclose(loss, right.loss, rel_tol=1e-6):
        raise CheckFailed(f"right gradients, but you returned {mine.loss!r}: the mean loss is {right.loss:.6f}")
    if mine.has_graph:
        raise CheckFailed(
            "right gradients, but the loss you return carries the graph of every microbatch, which keeps it all alive: "
            "add up numbers (nll.item()), the exercise asks for a float"
        )
    rows = [
        row("loss", right.loss, loss, "nats", 1e-6),
        row("forward passes", min(max(least, mine.calls), count), mine.calls),
        row("activations at the peak: those of one microbatch", single, mine.activation, "B", 0.05),
    ]
    if mine.calls > count:
        raise CheckFailed(
            f"right gradients, but {mine.calls} forward passes for {count} microbatches: one each is enough", rows
        )
    if mine.calls < least:
        raise CheckFailed(
            f"right gradients, but {mine.calls} of {count} forward passes: that is the big batch itself, with the "
            "activations of several microbatches",
            rows,
        )
    if rows[-1].verdict == "off":
        raise CheckFailed(
            f"right gradients, but {mine.activation / single:.1f} times the activations of one microbatch: call "
            "backward() inside the loop, so that each one's are freed before the next",
            rows,
        )
    return receipt(f"{count} microbatches with {_counts(batches)} tokens", rows)


def _counts(batches: Sequence[watching.Microbatch]) -> str:
    return ", ".join(str(int((targets != -100).sum())) for _, targets in batches)


# Loss scaling.


@exercise(
    "loss-scaling",
    minutes=15,
    difficulty=3,
    hints=(
        "Scale the loss, and every gradient is scaled. The optimizer must see them as they were.",
        "Backward on loss * scale, divide each .grad by scale. If any is inf or nan: no step, halve the scale, "
        "start counting again. Else step; after `interval` good steps in a row double it and start counting again.",
    ),
)
def check_loss_scaling(learner: Callable) -> Receipt:
    interval, steps = random.randint(3, 4), 16
    weights, theirs = [nn.Parameter(torch.zeros(size)) for size in (150, 50, 200)], nn.Parameter(torch.zeros(400))
    ours = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=1.0)
    peers = torch.optim.SGD([theirs], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=interval)
    scale, good, skipped = 2.0**14, 0, 0
    seen: list[Tensor] = []
    ours.register_step_pre_hook(lambda *_: seen.append(stepping.gradient_of(weights)))
    for step in range(steps):
        factors = 10 ** (torch.rand(400) * 4 - 8.5)  # gradients of 3e-9 to 3e-5: half of them too small for fp16
        if step % 6 == 1:  # just within float16
            factors[random.randrange(400)] = 64_000 / scale
        if step % 6 == 4:  # 60 times the scale overflows
            factors[random.randrange(400)] = 60.0 if step < 6 else math.nan
        peers.zero_grad()
        scaler.scale(stepping.half_loss(theirs, factors)).backward()
        ours.zero_grad()
        before, stepped = torch.cat(weights).detach(), len(seen)
        scaler.step(peers)
        scaler.update()
        result = learner(stepping.half_loss(torch.cat(weights), factors), ours, scale, good, interval)
        mine = torch.cat(weights).detach()
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise CheckFailed(f"you returned {result!r}; the exercise asks for a tuple (scale, good_steps)")
        overflow = scaler.get_scale() < scale
        skipped += overflow
        stepping.judge_scaling(step, mine, before, theirs, scale, overflow)
        if overflow and len(seen) > stepped:
            raise CheckFailed(
                f"step {step}: a gradient was inf or nan, and optimizer.step() was called all the same. The weights "
                "are as before, but Adam's moments would not be: do not call it"
            )
        if not overflow and not torch.allclose(seen[-1], theirs.grad, rtol=1e-3, atol=0):
            raise CheckFailed(
                f"step {step}: the update is right, but the optimizer saw gradients still scaled, which Adam's "
                "moments and clipping would take as they are: divide .grad by the scale before the step"
            )
        due = (scaler.get_scale(), scaler._growth_tracker.item())
        stepping.judge_scale(step, tuple(map(float, result)), due, scale, good, interval, overflow)
        scale, good = due
    stepping.judge_groups(learner)
    lost = (factors.half() == 0).float().mean().item()
    kept = ((factors * scale).half() == 0).float().mean().item()
    return receipt(
        f"{steps} steps beside torch.amp.GradScaler",
        [
            row("scale at the end", scaler.get_scale(), scale),
            row("steps skipped", sum(step % 6 == 4 for step in range(steps)), skipped),
            row("largest difference of the weights", 0.0, (mine - theirs).abs().max()),
            row("share of the gradients lost with your scale", 0.0, kept),
            row("    without", None, f"{lost:.0%}"),
        ],
    )


# Recomputation.


@exercise(
    "recompute-block",
    minutes=20,
    difficulty=3,
    hints=(
        "Forward of an autograd Function runs without autograd: nothing is kept unless you keep it.",
        "Keep x and the block. In backward: x.detach().requires_grad_(), run the block under torch.enable_grad(), and "
        "ask torch.autograd.grad for the gradients of x and of each parameter, given the gradient from above.",
    ),
)
def check_recompute(learner: Any) -> Receipt:
    if not (isinstance(learner, type) and issubclass(learner, torch.autograd.Function)):
        raise CheckFailed(f"{learner!r} is not a class derived from torch.autograd.Function")
    hidden, tokens, layers = 8 * random.randint(2, 4), random.randint(12, 30), 3
    seed = random.getrandbits(32)
    right, mine = (stepping.run_blocks(function, hidden, tokens, layers, seed) for function in (None, learner))
    if not torch.allclose(mine["y"], right["y"]):
        raise CheckFailed("forward does not return block(x)")
    for name in ("x", "parameters"):
        stepping.judge_recomputed(name, mine[name], right[name])
    if mine["written"]:
        raise CheckFailed(
            "the gradients you return are right, but your backward also wrote into .grad of the parameters: where the "
            "step adds up gradients, they would count twice. Use torch.autograd.grad inside"
        )
    stepping.judge_odd_blocks(learner)
    stepping.judge_two_runs(learner)
    stepping.judge_first_block(learner)
    inputs = layers * tokens * hidden * 8
    flops = mine["flops"] / right["flops"]  # fewer than 4/3 is fine: the block's last product need not run again
    rows = [
        row("forward passes of each block", 2, mine["calls"] / layers),
        row("kept between forward and backward: at most the block inputs", True, mine["kept"] <= inputs),
        row("    without recomputation", None, right["kept"], "B"),
        row("FLOPs, as a multiple", 4 / 3 if flops > 1.3 else None, flops, "", 1e-9),
    ]
    if mine["kept"] > inputs:
        raise CheckFailed(
            f"right gradients, but {mine['kept']:,} B are kept where the block inputs take {inputs:,} B: "
            "keep x only, and run the block again in backward",
            rows,
        )
    if mine["calls"] != 2 * layers:
        raise CheckFailed(f"each block ran forward {mine['calls'] / layers:g} times; 2 are enough", rows)
    return receipt(f"{layers} blocks of two matmuls", rows)


# Clipping.


@exercise(
    "clip-global-norm",
    changes=("shards",),
    minutes=8,
    difficulty=2,
    hints=(
        "The norm is that of all gradients in one long row. Which number can each shard work out alone?",
        "Each shard adds up its squares. The sum of these sums, and then one root, is the global norm; every gradient "
        "is multiplied by the same factor, max_norm / norm, if that is below 1.",
    ),
)
def check_clip(learner: Callable) -> Receipt:
    rows: list[Row] = []
    for shards, factor in ((4, 0.02), (3, 2.0), (1, 0.5)):  # 0.02: single values are above the limit
        given = [stepping.draw_shard(1 + index) for index in range(shards)]
        flat = [gradient for shard in given for gradient in shard]
        twins = [nn.Parameter(torch.zeros_like(gradient)) for gradient in flat]
        for twin, gradient in zip(twins, flat, strict=True):
            twin.grad = gradient.clone()
        norm = torch.cat([gradient.flatten() for gradient in flat]).norm().item()
        torch.nn.utils.clip_grad_norm_(twins, norm * factor)
        mine = [[gradient.clone() for gradient in shard] for shard in given]
        found = learner([list(shard) for shard in mine], norm * factor)  # lists of its own: the tensors have to change
        name = f"{shards} shards, limit {factor:g} of the norm"
        stepping.judge_clip(name, mine, given, twins, factor)
        if not isinstance(found, float):
            raise CheckFailed(f"{name}: you returned {found!r}; the exercise asks for the norm before, a float")
        if not abs(found / norm - 1) <= 1e-4:
            raise CheckFailed(f"{name}: you returned {found!r}: the norm before clipping is {norm:.4f}")
        rows.append(row(f"{name}: norm before", norm, found, "", 1e-5))
        after = torch.cat([gradient.flatten() for shard in mine for gradient in shard]).norm().item()
        rows.append(row("    after", norm * min(factor, 1.0), after, "", 1e-4))
    return receipt("beside torch's clip_grad_norm_", rows)
