"""Spoilers of lab 08, on one rank: wrong drops and losses, and right ones that look different."""

import torch
import torch.nn.functional as F

from course.kit.exercises import KnownAnswers

# Capacity.

capacity_drops = KnownAnswers("capacity-drops")

capacity_drops.mistake(
    "one place too few",
    {"place <= capacity": "place < capacity"},
    says="Each expert has one place less than its capacity: a running sum that includes the pair itself counts from 1.",
)
capacity_drops.mistake(
    "one place too many",
    {"place <= capacity": "place - 1 <= capacity"},
    says="Each expert has one place more than its capacity: counted from 0, the place must be below it.",
)
capacity_drops.mistake(
    "first choices first",
    {"experts.flatten()": "experts.T.flatten()", ".view_as(experts)": ".view_as(experts.T).T"},
    says="All first choices got a place before any second choice (GShard's order). Asked for is the order of the "
    "tokens, in which no token loses its place to a later one.",
)
capacity_drops.mistake(
    "a queue per choice",
    {"F.one_hot(flat, num_experts).cumsum(0)": "F.one_hot(experts, num_experts).cumsum(0).flatten(0, 1)"},
    says="First and second choices were counted apart, so an expert may get k times its capacity.",
)
capacity_drops.mistake(
    "the last tokens win",
    {"experts.flatten()": "experts.flatten().flip(0)", ".view_as(experts)": ".flip(0).view_as(experts)"},
    says="The earliest tokens were dropped, and later ones kept. A token must not lose its place to a later one.",
)
capacity_drops.mistake(
    "the whole token goes",
    {"place <= capacity, flat": "(place <= capacity).view_as(experts).all(1, keepdim=True), experts"},
    says="A token that one expert has no place for lost its other experts, too. Only the pair is dropped.",
)
capacity_drops.mistake(
    "changes what it was given",
    {
        "return torch.where(place <= capacity, flat, -1)": (
            "experts[(place > capacity).view_as(experts)] = -1\n    return experts"
        )
    },
    expect="changed its input",
)
capacity_drops.mistake(
    "a mask",
    {"torch.where(place <= capacity, flat, -1)": "(place <= capacity)"},
    expect="the exercise asks for numbers",
)
capacity_drops.mistake(
    "drops nothing",
    {"place <= capacity": "place > 0"},
    says="Nothing is dropped: no pair was compared with the capacity.",
)


capacity_drops.mistake(
    "a queue of bytes",
    {"F.one_hot(flat, num_experts).cumsum(0)": "F.one_hot(flat, num_experts).cumsum(0, dtype=torch.uint8)"},
    expect="4200 tokens",
)
capacity_drops.mistake(
    "a queue of half floats",
    {"F.one_hot(flat, num_experts).cumsum(0)": "F.one_hot(flat, num_experts).half().cumsum(0)"},
    expect="4200 tokens",
)


capacity_drops.mistake(
    "for contiguous experts only", {"experts.flatten()": "experts.view(-1)"}, expect="view size is not compatible"
)
capacity_drops.mistake("as bytes", {".view_as(experts)": ".view_as(experts).to(torch.int8)"}, expect="keep their dtype")
capacity_drops.mistake("0 for no limit", {"<= capacity": "<= (capacity or len(flat))"}, expect="0 places each")


@capacity_drops.alternative("rooms in a loop")
def rooms(experts, num_experts, capacity):
    room, kept = [capacity] * num_experts, []
    for expert in experts.flatten().tolist():
        kept.append(expert if room[expert] else -1)
        room[expert] = max(0, room[expert] - 1)
    return torch.tensor(kept).view_as(experts)


@capacity_drops.alternative("cut off behind each expert's first places")
def by_sorting(experts, num_experts, capacity):
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(flat)) - starts[flat[order]]
    kept = torch.empty_like(flat)
    kept[order] = torch.where(place < capacity, flat[order], -1)
    return kept.view_as(experts)


# The balance loss.


def _shares(p, experts):
    return torch.bincount(experts.flatten(), minlength=p.shape[1]).to(p) / experts.numel()


balance_loss = KnownAnswers("balance-loss")

balance_loss.mistake(
    "without the number of experts",
    {"num_experts * (share": "(share", "num_experts * share": "share"},
    says="The factor E is missing: with it the loss is 1 for an even load, whatever the number of experts.",
)
balance_loss.mistake(
    "shares that sum to k",
    {"experts.numel()": "len(experts)"},
    says="The shares f sum to k instead of 1: divide the counts by the number of pairs, not of tokens.",
)
balance_loss.mistake(
    "first choices only",
    {"experts.flatten()": "experts[:, 0]", "experts.numel()": "len(experts)"},
    says="f counts first choices alone. All k choices of a token are load.",
)
balance_loss.mistake(
    "mean probabilities squared",
    {
        "share * probabilities.mean(0)": "probabilities.mean(0) ** 2",
        "num_experts * share": "2 * num_experts * probabilities.mean(0)",
    },
    says="This is E · Σ P²: the probabilities in place of the counts. The loss must see where tokens really went.",
)
balance_loss.mistake(
    "the gradient of the probabilities",
    {"probabilities * (upstream - inner)": "upstream.expand_as(probabilities)"},
    says="This is the gradient with respect to the probabilities. Asked for is that of the logits: one more step, "
    "through the softmax.",
)
balance_loss.mistake(
    "half of the softmax",
    {"upstream - inner": "upstream"},
    says="p · g is the diagonal of the softmax's derivative. Raising one logit lowers all other probabilities: "
    "subtract Σ p · g inside the brackets.",
)
balance_loss.mistake(
    "a sum over tokens",
    {"share / tokens": "share"},
    says="The gradient is as many times too large as there are tokens: P is a mean, so a token has 1 / tokens of it.",
)
balance_loss.mistake(
    "a gradient that goes up",
    {"upstream - inner": "inner - upstream"},
    says="The sign is wrong: this is the way in which the loss falls, the gradient's opposite.",
)


@balance_loss.alternative("by autograd, through log-probabilities")
def by_autograd(probabilities, experts):
    with torch.enable_grad():
        logits = probabilities.log().requires_grad_()  # softmax of log p is p
        share = _shares(probabilities, experts)
        loss = logits.shape[1] * (share * logits.softmax(1).mean(0)).sum()
        return loss.detach(), torch.autograd.grad(loss, logits)[0]


@balance_loss.alternative("one-hot counts, the Jacobian written out")
def with_jacobian(probabilities, experts):
    tokens, num_experts = probabilities.shape
    share = F.one_hot(experts, num_experts).sum((0, 1)).to(probabilities) / experts.numel()
    jacobian = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]
    loss = num_experts * float(share @ probabilities.sum(0)) / tokens
    return loss, (jacobian @ (num_experts * share / tokens))
