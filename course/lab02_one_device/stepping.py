"""How lab 02's checks judge single pieces of a step: loss scaling, recomputed blocks, clipping."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course.kit.exercises import CheckFailed
from course.lab02_one_device.experiments import count_flops, one_thread
from course.lab02_one_device.watching import CountingModel
from minillm.measure import memory

# Loss scaling.


def half_loss(weight: Tensor, factors: Tensor) -> Tensor:
    """A loss whose gradient `factors` passes through float16 on its way to the weight."""
    return (weight.half().float() * factors).sum()


def gradient_of(weights: Sequence[nn.Parameter]) -> Tensor:
    """The gradients in one row, 0 where there is none."""
    return torch.cat([torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights])


def judge_scaling(step: int, mine: Tensor, before: Tensor, theirs: Tensor, scale: float, overflow: bool) -> None:
    """CheckFailed unless right. The update: none after an overflow, else that of the unscaled gradient."""
    if overflow and not torch.equal(mine, before):
        state = "" if mine.isfinite().all() else ", and weights are no longer finite"
        raise CheckFailed(f"step {step}: a gradient was inf or nan, yet the optimizer stepped{state}")
    if torch.allclose(mine, theirs, rtol=1e-5, atol=0):
        return
    moved, due = mine - before, theirs - before
    if torch.allclose(moved, due * scale, rtol=1e-3):
        raise CheckFailed(f"step {step}: the update is {scale:g} times too large: divide the gradients by the scale")
    if torch.equal(mine, before) and not overflow:
        raise CheckFailed(
            f"step {step}: all gradients were finite (the largest was {due.abs().max():.2g}, at a scale of {scale:g}), "
            "yet nothing was updated"
        )
    lost = ((moved == 0) & (due != 0)).float().mean().item()
    if lost > 0.1:
        raise CheckFailed(f"step {step}: {lost:.0%} of the gradients became zero in float16: multiply the loss first")
    raise CheckFailed(f"step {step}: the update is not that of the unscaled gradient")


def judge_scale(
    step: int, found: tuple[float, float], due: tuple[float, float], scale: float, good: int, interval: int, over: bool
) -> None:
    """CheckFailed unless right. (scale, good steps) as torch has them."""
    if found == due:
        return
    wanted = f"({due[0]:g}, {due[1]:g})"
    said = f"step {step} {'overflowed' if over else f'was good, number {good + 1} in a row'}: you returned "
    said += f"({found[0]:g}, {found[1]:g}), it should be {wanted}"
    if over and found[0] < due[0]:
        raise CheckFailed(f"{said}: after an overflow the scale is halved, no more")
    if over and found[0] >= scale:
        raise CheckFailed(f"{said}: after an overflow the scale is halved, or every later step overflows as well")
    if not over and found[0] > due[0]:
        raise CheckFailed(f"{said}: it doubles after {interval} good steps in a row, not before")
    if not over and found[0] < due[0]:
        raise CheckFailed(f"{said}: after {interval} good steps in a row it doubles, to stay as high as it can")
    raise CheckFailed(f"{said}: the count of good steps starts again at 0 whenever the scale changes")


def judge_groups(learner: Callable) -> None:
    """CheckFailed unless every parameter of every group is unscaled, an overflow in any of them counts, and the scale
    has no limits."""
    weights = [nn.Parameter(torch.ones(numel)) for numel in (3, 2, 4)]
    optimizer = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=1.0)
    for overflow in (False, True):
        optimizer.zero_grad()
        loss = sum(
            (weight * (2.0**-4 if weight is not weights[-1] or not overflow else math.inf)).sum() for weight in weights
        )
        before = [weight.detach().clone() for weight in weights]
        interval, scale = random.randint(6, 40), 1.0 if overflow else 2.0**17
        found = tuple(map(float, learner(loss, optimizer, scale, interval - 1, interval)))
        next_scale = scale / 2 if overflow else scale * 2
        due = [weight - (0.0 if overflow else 2.0**-4) for weight in before]
        if all(map(torch.equal, weights, due)):
            if found == (next_scale, 0):
                continue
            what = "an overflow" if overflow else f"good step number {interval} in a row, interval {interval}"
            raise CheckFailed(
                f"{what}, at a scale of {scale:.7g}: you returned ({found[0]:.7g}, {found[1]:g}), it should be "
                f"({next_scale:.7g}, 0)"
            )
        if overflow:
            raise CheckFailed(
                "two parameter groups, and a gradient of the last one is inf: skip the step, whichever group overflows"
            )
        raise CheckFailed(
            "two parameter groups of three parameters: not all were updated with their own gradient. Unscale every "
            "parameter of every group"
        )


# Recomputation.


@one_thread()
def run_blocks(function: Any, hidden: int, tokens: int, layers: int, seed: int) -> dict[str, Any]:
    """Values, gradients, calls, FLOPs, bytes kept of a chain of blocks, through `function.apply` or (None) plainly."""
    torch.manual_seed(seed)
    blocks = nn.ModuleList(
        CountingModel(nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden)))
        for _ in range(layers)
    ).double()
    x = torch.randn(tokens, hidden, dtype=torch.float64, requires_grad=True)
    found: dict[str, Any] = {}

    def step() -> None:
        y = x
        with memory(blocks) as census:
            for block in blocks:
                y = -(block(y) if function is None else function.apply(block, y, *block.parameters()))
            live = census.live
            found["kept"] = live.total - live.parameter - 2 * y.nbytes  # the caller holds the first x and the last y
        found["y"] = y.detach()
        loss = (y * torch.linspace(0.5, 2.0, hidden, dtype=torch.float64)).sum()
        found["gradients"] = torch.autograd.grad(loss, (x, *blocks.parameters()), allow_unused=True)

    found["flops"] = count_flops(step)
    found["calls"] = sum(block.calls for block in blocks)
    found["x"], found["parameters"] = found["gradients"][:1], found["gradients"][1:]
    found["written"] = any(parameter.grad is not None for parameter in blocks.parameters())
    return found


def judge_odd_blocks(function: Any) -> None:
    """CheckFailed unless right for blocks with different numbers of parameters, one of which is used twice."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Sequential(nn.Linear(5, 5), nn.Tanh())])
    start = torch.randn(3, 5).requires_grad_()
    found = []
    for apply in (lambda block, y: block(y), lambda block, y: function.apply(block, y, *block.parameters())):
        y = start
        for place in (0, 1, 0, 2):
            y = apply(blocks[place], y).tanh()
        found.append(torch.autograd.grad(y.sum(), (start, *blocks.parameters()), allow_unused=True))
    if not all(b is not None and torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True)):
        raise CheckFailed(
            "right for blocks that run once each, but wrong where one runs twice before backward: keep in ctx what "
            "belongs to one run, and take as many parameters as come"
        )


def judge_two_runs(function: Any) -> None:
    """CheckFailed unless right where runs of a block overlap, and where .grad holds what an earlier microbatch left."""
    block = nn.Linear(5, 3).double()
    inputs = [torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = list(block.parameters())
    due = _gradients_in_turn(inputs, [block(x) for x in inputs], weights)
    for earlier in (False, True):
        for weight in weights:
            weight.grad = torch.ones_like(weight) if earlier else None
        outputs = [function.apply(block, x, *weights) for x in inputs]
        with torch.no_grad():
            function.apply(block, -inputs[0], *weights)
        mine = _gradients_in_turn(inputs, outputs, weights)
        right = all(torch.allclose(a, b) for a, b in zip(mine, due, strict=True))
        stayed = all(weight.grad is not None and weight.grad.eq(1).all() for weight in weights)
        if not right and not earlier:
            raise CheckFailed(
                "a block ran on two inputs, then once without gradients, and the first run goes backward first: the "
                "gradients are wrong. Keep in ctx what belongs to one run, not in a list that all runs share"
            )
        if earlier and not (right and stayed):
            raise CheckFailed(
                "an earlier microbatch has left its gradient in .grad of the parameters: your backward "
                f"{'returns it again' if stayed else 'changes or clears it'}. Use torch.autograd.grad inside"
            )


def _gradients_in_turn(inputs: list[Tensor], outputs: list[Tensor], weights: list[nn.Parameter]) -> list[Tensor]:
    """The gradients of each input and of the weights, from the first output's and then from the second's."""
    pairs = zip(inputs, outputs, strict=True)
    return [each for x, y in pairs for each in torch.autograd.grad(y.square().sum(), (x, *weights))]


def judge_recomputed(name: str, mine: Sequence[Tensor | None], right: Sequence[Tensor]) -> None:
    """CheckFailed unless right. The gradients of `name`, x or parameters."""
    what = "x" if name == "x" else "the parameters"
    if any(gradient is None for gradient in mine):
        raise CheckFailed(
            f"torch.autograd.grad finds no gradient of {what}: backward must return one for each argument of forward, "
            "and what it only writes into .grad is not returned"
        )
    if all(torch.allclose(a, b) for a, b in zip(mine, right, strict=True)):
        return
    raise CheckFailed(f"the gradient of {what} is wrong: does the gradient from above go into the recomputed block?")


def judge_first_block(function: Any) -> None:
    """CheckFailed unless a first block, whose input needs no gradient, has those of its parameters."""
    block, x = nn.Linear(6, 3).double(), torch.randn(5, 6, dtype=torch.float64)
    due = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    try:
        function.apply(block, x, *block.parameters()).square().sum().backward()
    except RuntimeError as error:
        raise CheckFailed(
            f"a block whose input is data, without a gradient: backward stopped ({str(error).splitlines()[0]}). Detach "
            "what you saved and let the copy require a gradient"
        ) from None
    if not all(torch.allclose(parameter.grad, right) for parameter, right in zip(block.parameters(), due, strict=True)):
        raise CheckFailed("a block whose input is data, without a gradient: the gradients of its parameters are wrong")
    if x.requires_grad:
        raise CheckFailed("backward made the block's input require a gradient: detach it first, it is the caller's")


# Clipping.


def draw_shard(count: int) -> list[Tensor]:
    """That many gradients: a matrix, a vector, a matrix, ..."""
    shapes = [[random.randint(2, 9) for _ in range(2 - index % 2)] for index in range(count)]
    return [torch.randn(shape) * random.uniform(0.5, 3) for shape in shapes]


def judge_clip(
    name: str, mine: list[list[Tensor]], given: list[list[Tensor]], twins: Sequence[Tensor], factor: float
) -> None:
    """CheckFailed unless right. One factor for all, and the right one. factor: limit / norm."""
    flat = [gradient for shard in mine for gradient in shard]
    if all(torch.allclose(a, b.grad, rtol=1e-4) for a, b in zip(flat, twins, strict=True)):
        return
    before = [gradient for shard in given for gradient in shard]
    if all(torch.equal(a, b) for a, b in zip(flat, before, strict=True)):
        raise CheckFailed(f"{name}: the gradients are as they were: scale them in place (gradient *= ...)")
    norms = [[torch.stack([each.norm() for each in shard]).norm() for shard in part] for part in (mine, given)]
    ratios = [a / b for a, b in zip(*norms, strict=True)]
    straight = all(
        torch.allclose(a, b * ratio, rtol=1e-3)
        for shard, old, ratio in zip(mine, given, ratios, strict=True)
        for a, b in zip(shard, old, strict=True)
    )
    if not straight:
        raise CheckFailed(f"{name}: the direction changed: multiply all gradients by one factor, clip no single value")
    if max(ratios) / min(ratios) > 1.001:
        raise CheckFailed(
            f"{name}: each shard was scaled by a factor of its own, which turns the gradient: clip by the norm of all "
            "shards together"
        )
    if factor > 1:
        raise CheckFailed(f"{name}: the norm was below the limit, yet the gradients were scaled by {ratios[0]:.3f}")
    said = "sum the squares of all shards first, then take one root" if len(given) > 1 else "see hint 2"
    raise CheckFailed(f"{name}: scaled by {ratios[0]:.4f}, but it should be {factor:.4f}: {said}")
