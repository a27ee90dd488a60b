"""Spoilers of lab 02, the step: wrong ways to accumulate, scale, recompute and clip that people write, and right ones
that look different."""

import torch
import torch.nn.functional as F

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("02_one_device")

# Accumulation.


def count(targets):
    return int((targets != -100).sum())


@mistake(
    "accumulate",
    "mean of means",
    says="It is the mean of the microbatches' means, in which a token of a short one weighs more. Divide each sum by "
    "the tokens of all microbatches.",
)
def of_means(model, microbatches):
    loss = 0.0
    for inputs, targets in microbatches:
        nll, tokens = model(inputs, targets=targets)
        (nll / tokens / len(microbatches)).backward()
        loss += nll.item() / tokens.item() / len(microbatches)
    return loss


@mistake(
    "accumulate",
    "divides by nothing",
    says="It is the gradient of the sum over tokens: divide by how many of them count.",
)
def undivided(model, microbatches):
    loss = 0.0
    for inputs, targets in microbatches:
        nll, _ = model(inputs, targets=targets)
        nll.backward()
        loss += nll.item()
    return loss / sum(count(targets) for _, targets in microbatches)


@mistake(
    "accumulate",
    "zeroes inside the loop",
    says="It is that of the last microbatch alone: gradients add up in .grad as long as nothing clears them.",
)
def zeroes_inside(model, microbatches):
    tokens, loss = sum(count(targets) for _, targets in microbatches), 0.0
    for inputs, targets in microbatches:
        model.zero_grad()
        nll, _ = model(inputs, targets=targets)
        (nll / tokens).backward()
        loss += nll.item() / tokens
    return loss


@mistake(
    "accumulate",
    "counts padding as tokens",
    says="Targets of -100 do not count: the denominator is larger than the number of tokens in the sum.",
)
def counts_all(model, microbatches):
    tokens, loss = sum(targets.numel() for _, targets in microbatches), 0.0
    for inputs, targets in microbatches:
        nll, _ = model(inputs, targets=targets)
        (nll / tokens).backward()
        loss += nll.item() / tokens
    return loss


@mistake(
    "accumulate",
    "divides by the number of microbatches, too",
    says="It was divided twice: by the tokens of all microbatches and by their number.",
)
def divides_twice(model, microbatches):
    tokens, loss = sum(count(targets) for _, targets in microbatches), 0.0
    for inputs, targets in microbatches:
        nll, _ = model(inputs, targets=targets)
        (nll / tokens / len(microbatches)).backward()
        loss += nll.item() / tokens
    return loss


@mistake("accumulate", "returns the sum", expect="the mean loss is")
def returns_the_sum(model, microbatches):
    right.accumulate(model, microbatches)
    return sum(model(inputs, targets=targets)[0].item() for inputs, targets in microbatches)


@mistake("accumulate", "one backward at the end", expect="call backward\\(\\) inside the loop")
def one_backward(model, microbatches):
    tokens = sum(count(targets) for _, targets in microbatches)
    loss = sum(model(inputs, targets=targets)[0] for inputs, targets in microbatches) / tokens
    loss.backward()
    return loss.item()


@mistake("accumulate", "one big batch", expect="that is the big batch itself")
def big_batch(model, microbatches):
    inputs, targets = (torch.cat(part) for part in zip(*microbatches, strict=True))
    nll, tokens = model(inputs, targets=targets)
    (nll / tokens).backward()
    return (nll / tokens).item()


@alternative("accumulate", "weighs each mean by its share of the tokens")
def weighted_means(model, microbatches):
    tokens, loss = sum(count(targets) for _, targets in microbatches), 0.0
    for inputs, targets in microbatches:
        nll, own = model(inputs, targets=targets)
        share = (nll / own) * (count(targets) / tokens)
        share.backward()
        loss += share.item()
    return loss


@alternative("accumulate", "adds sums and divides the gradients at the end")
def divides_at_the_end(model, microbatches):
    total = 0.0
    for inputs, targets in microbatches:
        nll, _ = model(inputs, targets=targets)
        nll.backward()
        total += nll.item()
    tokens = sum(count(targets) for _, targets in microbatches)
    for parameter in model.parameters():
        parameter.grad /= tokens
    return total / tokens


# Loss scaling.


def scaled(loss, optimizer, scale, unscale=True):
    """Backward on the scaled loss; whether all gradients are finite."""
    optimizer.zero_grad()
    (loss * scale).backward()
    (weight,) = optimizer.param_groups[0]["params"]
    if unscale:
        weight.grad /= scale
    return bool(weight.grad.isfinite().all())


@mistake("loss-scaling", "forgets to unscale", expect="divide the gradients by the scale")
def never_unscales(loss, optimizer, scale, good_steps, interval):
    if not scaled(loss, optimizer, scale, unscale=False):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)


@mistake("loss-scaling", "scales nothing", expect="became zero in float16")
def unscaled(loss, optimizer, scale, good_steps, interval):
    if not scaled(loss, optimizer, 1.0):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)


@mistake("loss-scaling", "keeps the scale that overflowed", expect="the scale is halved")
def never_halves(loss, optimizer, scale, good_steps, interval):
    if not scaled(loss, optimizer, scale):
        return scale, 0
    optimizer.step()
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)


@mistake("loss-scaling", "a quarter after an overflow", expect="is halved, no more")
def quarters(loss, optimizer, scale, good_steps, interval):
    found = right.scaled_step(loss, optimizer, scale, good_steps, interval)
    return (scale / 4, 0) if found[0] < scale else found


@mistake("loss-scaling", "looks for NaN only", expect="inf or nan, yet the optimizer stepped")
def nan_only(loss, optimizer, scale, good_steps, interval):
    scaled(loss, optimizer, scale)
    (weight,) = optimizer.param_groups[0]["params"]
    if weight.grad.isnan().any():
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)


@mistake("loss-scaling", "an overflow does not end the row of good steps", expect="starts again at 0")
def keeps_counting(loss, optimizer, scale, good_steps, interval):
    if not scaled(loss, optimizer, scale):
        return scale / 2, good_steps
    optimizer.step()
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)


@mistake("loss-scaling", "looks for inf only", expect="inf or nan, yet the optimizer stepped")
def inf_only(loss, optimizer, scale, good_steps, interval):
    scaled(loss, optimizer, scale)
    (weight,) = optimizer.param_groups[0]["params"]
    if weight.grad.isinf().any():
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)


@mistake("loss-scaling", "scales the learning rate down instead", expect="the optimizer saw gradients still scaled")
def by_learning_rate(loss, optimizer, scale, good_steps, interval):
    if not scaled(loss, optimizer, scale, unscale=False):
        return scale / 2, 0
    optimizer.param_groups[0]["lr"] /= scale
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= scale
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)


@mistake("loss-scaling", "counts one step too many", expect="it doubles, to stay")
def doubles_late(loss, optimizer, scale, good_steps, interval):
    if not scaled(loss, optimizer, scale):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good_steps == interval else (scale, good_steps + 1)


@alternative("loss-scaling", "a list")
def returns_a_list(loss, optimizer, scale, good_steps, interval):
    return list(right.scaled_step(loss, optimizer, scale, good_steps, interval))


@alternative("loss-scaling", "clears the gradients itself when it is done")
def clears_after(loss, optimizer, scale, good_steps, interval):
    found = right.scaled_step(loss, optimizer, scale, good_steps, interval)
    optimizer.zero_grad()
    return found


@alternative("loss-scaling", "looks before it unscales, takes gradients from autograd.grad")
def looks_first(loss, optimizer, scale, good_steps, interval):
    weights = optimizer.param_groups[0]["params"]
    gradients = torch.autograd.grad(loss * scale, weights)
    if any(not torch.isfinite(gradient.sum()) for gradient in gradients):
        return scale * 0.5, 0
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient * (1.0 / scale)
    optimizer.step()
    good_steps = (good_steps + 1) % interval
    return scale if good_steps else scale * 2, good_steps


# Recomputation.


@mistake("recompute-block", "keeps the graph of the forward pass", expect="keep x only")
class KeepsTheGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.x = block, x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.y = block(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        return None, *torch.autograd.grad(ctx.y, (ctx.x, *ctx.block.parameters()), gradient)


@mistake("recompute-block", "backward inside, and its gradients returned", expect="also wrote into .grad")
class Twice(torch.autograd.Function):
    forward = staticmethod(right.Recompute.forward)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(gradient)
        return None, x.grad, *[parameter.grad.clone() for parameter in ctx.block.parameters()]


@mistake("recompute-block", "forgets the gradient from above", expect="gradient from above")
class FromOnes(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        return right.Recompute.backward(ctx, torch.ones_like(gradient))


@mistake("recompute-block", "runs the block without autograd", expect="does not require grad")
class WithoutGrad(torch.autograd.Function):
    forward = staticmethod(right.Recompute.forward)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.block.parameters()), gradient)


@mistake("recompute-block", "parameters get theirs inside, none is returned", expect="no gradient of the parameters")
class Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.count = block, len(parameters)
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), gradient)
        return (None, x.grad) + (None,) * ctx.count


@alternative("recompute-block", "keeps x as an attribute")
class AsAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.x = block, x
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.block.parameters()), gradient)


@mistake("recompute-block", "runs the block twice in backward", expect="2 are enough")
class RunsTwice(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        right.Recompute.backward(ctx, gradient)
        return right.Recompute.backward(ctx, gradient)


@alternative("recompute-block", "backward into a copy of the leaves")
class OnLeaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.names = block, [name for name, _ in block.named_parameters()]
        ctx.save_for_backward(x, *parameters)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = torch.func.functional_call(ctx.block, dict(zip(ctx.names, leaves[1:], strict=True)), (leaves[0],))
        y.backward(gradient)
        return None, *[leaf.grad for leaf in leaves]


# Clipping.


@mistake("clip-global-norm", "each shard by its own norm", expect="factor of its own")
def by_own_norm(shards, max_norm):
    total = torch.stack([gradient.square().sum() for shard in shards for gradient in shard]).sum().sqrt()
    for shard in shards:
        torch._foreach_mul_(shard, min(1.0, (max_norm / torch.cat(shard).norm()).item()))
    return total.item()


@mistake("clip-global-norm", "norms of the shards added up", expect="sum the squares of all shards first")
def adds_norms(shards, max_norm):
    norm = sum(torch.cat(shard).norm() for shard in shards)
    for shard in shards:
        torch._foreach_mul_(shard, min(1.0, (max_norm / norm).item()))
    return norm.item()


@mistake("clip-global-norm", "scales up what was small", expect="below the limit, yet")
def always_scales(shards, max_norm):
    norm = torch.cat([gradient for shard in shards for gradient in shard]).norm()
    for shard in shards:
        torch._foreach_mul_(shard, (max_norm / norm).item())
    return norm.item()


@mistake("clip-global-norm", "clips values", expect="the direction changed")
def clips_values(shards, max_norm):
    norm = torch.cat([gradient for shard in shards for gradient in shard]).norm()
    for shard in shards:
        for gradient in shard:
            gradient.clamp_(-max_norm / 10, max_norm / 10)
    return norm.item()


@mistake("clip-global-norm", "makes new tensors", expect="scale them in place")
def new_tensors(shards, max_norm):
    norm = torch.cat([gradient for shard in shards for gradient in shard]).norm()
    shards = [[gradient * min(1.0, max_norm / norm) for gradient in shard] for shard in shards]
    return norm.item()


@alternative("clip-global-norm", "normalises the long row")
def long_row(shards, max_norm):
    row = torch.cat([gradient.flatten() for shard in shards for gradient in shard])
    clipped = F.normalize(row, dim=0) * max_norm if row.norm() > max_norm else row
    parts = clipped.split([gradient.numel() for shard in shards for gradient in shard])
    for gradient, part in zip((gradient for shard in shards for gradient in shard), parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return float(row.norm())
