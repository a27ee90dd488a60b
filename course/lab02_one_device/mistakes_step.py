"""Spoilers of lab 02, the step: wrong ways to accumulate, scale and clip that people write, and right ones that look
different."""

import torch
import torch.nn.functional as F

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("02_one_device")

# Accumulation.


def count(targets):
    return int((targets != -100).sum())


accumulate = KnownAnswers("accumulate")

accumulate.mistake(
    "mean of means",
    {
        "nll, _ =": "nll, counted =",
        "(nll / tokens)": "(nll / counted / len(microbatches))",
        "nll.item() / tokens": "nll.item() / counted.item() / len(microbatches)",
    },
    says="It is the mean of the microbatches' means, in which a token of a short one weighs more. Divide each sum by "
    "the tokens of all microbatches.",
)
accumulate.mistake(
    "divides by nothing",
    {"(nll / tokens)": "nll"},
    says="It is the gradient of the sum over tokens: divide by how many of them count.",
)
accumulate.mistake(
    "zeroes inside the loop",
    {"nll, _ =": "model.zero_grad()\n        nll, _ ="},
    says="It is that of the last microbatch alone: gradients add up in .grad as long as nothing clears them.",
)
accumulate.mistake(
    "counts padding as tokens",
    {"int((targets != -100).sum())": "targets.numel()"},
    says="Targets of -100 do not count: the denominator is larger than the number of tokens in the sum.",
)
accumulate.mistake(
    "divides by the number of microbatches, too",
    {"(nll / tokens)": "(nll / tokens / len(microbatches))"},
    says="It was divided twice: by the tokens of all microbatches and by their number.",
)
accumulate.mistake("returns the sum", {"nll.item() / tokens": "nll.item()"}, expect="the mean loss is")
accumulate.mistake(
    "one backward at the end",
    {
        "(nll / tokens).backward()\n": "\n",
        "nll.item() / tokens": "nll / tokens",
        "return loss": "loss.backward()\n    return loss.item()",
    },
    expect="call backward\\(\\) inside the loop",
)


COUNTED = {}


@accumulate.mistake("the first call's tokens for ever", expect="is off by")
def counts_once(model, microbatches):
    tokens, loss = COUNTED.setdefault("tokens", sum(count(targets) for _, targets in microbatches)), 0.0
    for inputs, targets in microbatches:
        nll, _ = model(inputs, targets=targets)
        (nll / tokens).backward()
        loss += nll.item() / tokens
    return loss


@accumulate.mistake("one big batch", expect="that is the big batch itself")
def big_batch(model, microbatches):
    inputs, targets = (torch.cat(part) for part in zip(*microbatches, strict=True))
    nll, tokens = model(inputs, targets=targets)
    (nll / tokens).backward()
    return (nll / tokens).item()


@accumulate.alternative("adds up a float32 tensor")
def in_float32(model, microbatches):
    return torch.tensor(right.accumulate(model, microbatches), dtype=torch.float32)


accumulate.mistake(
    "weighs each mean by its share of the tokens",
    {"nll, _ =": "nll, own =", "(nll / tokens)": "(nll / own * (own / tokens))"},
    expect="the mean of none is 0 / 0",
)
accumulate.mistake(
    "a first pass to count tokens",
    {"int((targets != -100).sum()) for _, targets": "int(model(inputs, targets=targets)[1]) for inputs, targets"},
    expect="one each is enough",
)
accumulate.alternative(
    "passes over a microbatch that counts no token",
    {"        nll, _ =": "        if (targets == -100).all():\n            continue\n        nll, _ ="},
)


@accumulate.alternative("adds sums and divides the gradients at the end")
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

loss_scaling = KnownAnswers("loss-scaling")

loss_scaling.mistake("forgets to unscale", {"weight.grad /= scale": "pass"}, expect="divide the gradients by the scale")
loss_scaling.mistake(
    "scales nothing", {"loss * scale": "loss", "weight.grad /= scale": "pass"}, expect="became zero in float16"
)
loss_scaling.mistake(
    "keeps the scale that overflowed", {"return scale / 2, 0": "return scale, 0"}, expect="the scale is halved"
)
loss_scaling.mistake("a quarter after an overflow", {"scale / 2": "scale / 4"}, expect="is halved, no more")
loss_scaling.mistake(
    "looks for NaN only",
    {"not all(weight.grad.isfinite().all()": "any(weight.grad.isnan().any()"},
    expect="inf or nan, yet the optimizer stepped",
)
loss_scaling.mistake(
    "looks for inf only",
    {"not all(weight.grad.isfinite().all()": "any(weight.grad.isinf().any()"},
    expect="inf or nan, yet the optimizer stepped",
)
loss_scaling.mistake(
    "an overflow does not end the row of good steps",
    {"scale / 2, 0": "scale / 2, good_steps"},
    expect="starts again at 0",
)
loss_scaling.mistake(
    "scales the learning rate down instead",
    {
        "    for weight in weights:\n        weight.grad /= scale\n": "",
        "    optimizer.step()\n": (
            "    for group in optimizer.param_groups:\n"
            '        group["lr"] /= scale\n'
            "    optimizer.step()\n"
            "    for group in optimizer.param_groups:\n"
            '        group["lr"] *= scale\n'
        ),
    },
    expect="the optimizer saw gradients still scaled",
)
loss_scaling.mistake(
    "steps with gradients of zero",
    {
        "return scale / 2, 0": (
            "optimizer.zero_grad(set_to_none=False)\n        optimizer.step()\n        return scale / 2, 0"
        )
    },
    expect="called all the same",
)
loss_scaling.mistake(
    "takes a large gradient for an overflow",
    {"weight.grad.isfinite().all()": "(weight.grad.abs() < 1).all()"},
    expect="all gradients were finite",
)
loss_scaling.mistake("counts one step too many", {"good_steps + 1 ==": "good_steps =="}, expect="it doubles, to stay")


loss_scaling.mistake(
    "the first weight of each group only",
    {'for weight in group["params"]]': 'for weight in group["params"][:1]]'},
    expect="is not that of the unscaled gradient|the optimizer stepped",
)


@loss_scaling.alternative("a list")
def returns_a_list(loss, optimizer, scale, good_steps, interval):
    return list(right.scaled_step(loss, optimizer, scale, good_steps, interval))


@loss_scaling.alternative("clears the gradients itself when it is done")
def clears_after(loss, optimizer, scale, good_steps, interval):
    found = right.scaled_step(loss, optimizer, scale, good_steps, interval)
    optimizer.zero_grad()
    return found


loss_scaling.mistake(
    "the first parameter group only",
    {"for group in optimizer.param_groups for": "for group in optimizer.param_groups[:1] for"},
    expect="is not that of the unscaled gradient|two parameter groups",
)


@loss_scaling.alternative("looks before it unscales, takes gradients from autograd.grad")
def looks_first(loss, optimizer, scale, good_steps, interval):
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = torch.autograd.grad(loss * scale, weights)
    if any(not torch.isfinite(gradient.sum()) for gradient in gradients):
        return scale * 0.5, 0
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient * (1.0 / scale)
    optimizer.step()
    good_steps = (good_steps + 1) % interval
    return scale if good_steps else scale * 2, good_steps


# Clipping.

clip_global_norm = KnownAnswers("clip-global-norm")

clip_global_norm.mistake(
    "each shard by its own norm",
    {
        "for shard in shards:\n": "for shard, own in zip(shards, squares, strict=True):\n",
        "(max_norm / norm)": "(max_norm / own.sqrt())",
    },
    expect="factor of its own",
)
clip_global_norm.mistake(
    "norms of the shards added up",
    {"torch.stack(squares).sum().sqrt()": "torch.stack(squares).sqrt().sum()"},
    expect="sum the squares of all shards first",
)
clip_global_norm.mistake("scales up what was small", {".clamp(max=1.0)": ""}, expect="below the limit, yet")
clip_global_norm.mistake(
    "clips values",
    {"gradient *= (max_norm / norm).clamp(max=1.0)": "gradient.clamp_(-max_norm / 10, max_norm / 10)"},
    expect="the direction changed",
)
clip_global_norm.mistake(
    "clips values to the limit before it scales",
    {"gradient *= (": "gradient.clamp_(-max_norm, max_norm)\n            gradient *= ("},
    expect="the direction changed",
)
clip_global_norm.mistake(
    "vectors only", {"gradient.square().sum()": "gradient @ gradient"}, expect="stopped with RuntimeError"
)
clip_global_norm.mistake(
    "makes new tensors", {"gradient *= (": "gradient = gradient * ("}, expect="scale them in place"
)


clip_global_norm.mistake("a tensor", {"return norm.item()": "return norm"}, expect="a float")


@clip_global_norm.alternative("normalises the long row")
def long_row(shards, max_norm):
    row = torch.cat([gradient.flatten() for shard in shards for gradient in shard])
    clipped = F.normalize(row, dim=0) * max_norm if row.norm() > max_norm else row
    parts = clipped.split([gradient.numel() for shard in shards for gradient in shard])
    for gradient, part in zip((gradient for shard in shards for gradient in shard), parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return float(row.norm())


clip_global_norm.mistake(
    "other tensors in the lists",
    {
        "for gradient in shard:\n            gradient *= (max_norm / norm).clamp(max=1.0)": (
            "for index, gradient in enumerate(shard):\n"
            "            shard[index] = gradient * (max_norm / norm).clamp(max=1.0)"
        )
    },
    expect="scale them in place",
)
