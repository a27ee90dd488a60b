"""Spoilers of lab 08, on one rank: wrong drops and losses, and right ones that look different."""

import torch
import torch.nn.functional as F

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("08_expert_parallel")

# Capacity.


def _queue(flat, num_experts):
    """Each pair's place in its expert's queue, counted from 1."""
    return F.one_hot(flat, num_experts).cumsum(0).gather(1, flat[:, None])[:, 0]


@mistake(
    "capacity-drops",
    "one place too few",
    says="Each expert has one place less than its capacity: a running sum that includes the pair itself counts from 1.",
)
def one_too_few(experts, num_experts, capacity):
    flat = experts.flatten()
    return torch.where(_queue(flat, num_experts) < capacity, flat, -1).view_as(experts)


@mistake(
    "capacity-drops",
    "one place too many",
    says="Each expert has one place more than its capacity: counted from 0, the place must be below it.",
)
def one_too_many(experts, num_experts, capacity):
    flat = experts.flatten()
    return torch.where(_queue(flat, num_experts) - 1 <= capacity, flat, -1).view_as(experts)


@mistake(
    "capacity-drops",
    "first choices first",
    says="All first choices got a place before any second choice (GShard's order). Asked for is the order of the "
    "tokens, in which no token loses its place to a later one.",
)
def first_choices_first(experts, num_experts, capacity):
    flat = experts.T.flatten()
    return torch.where(_queue(flat, num_experts) <= capacity, flat, -1).view_as(experts.T).T


@mistake(
    "capacity-drops",
    "a queue per choice",
    says="First and second choices were counted apart, so an expert may get k times its capacity.",
)
def queue_per_choice(experts, num_experts, capacity):
    columns = [torch.where(_queue(c, num_experts) <= capacity, c, -1) for c in experts.unbind(1)]
    return torch.stack(columns, 1)


@mistake(
    "capacity-drops",
    "the last tokens win",
    says="The earliest tokens were dropped, and later ones kept. A token must not lose its place to a later one.",
)
def last_win(experts, num_experts, capacity):
    flat = experts.flatten().flip(0)
    return torch.where(_queue(flat, num_experts) <= capacity, flat, -1).flip(0).view_as(experts)


@mistake(
    "capacity-drops",
    "the whole token goes",
    says="A token that one expert has no place for lost its other experts, too. Only the pair is dropped.",
)
def whole_tokens(experts, num_experts, capacity):
    kept = right.drop_beyond(experts, num_experts, capacity)
    return torch.where((kept < 0).any(1, keepdim=True), -1, kept)


@mistake("capacity-drops", "changes what it was given", expect="changed the tensor")
def in_place(experts, num_experts, capacity):
    experts[right.drop_beyond(experts, num_experts, capacity) < 0] = -1
    return experts


@mistake("capacity-drops", "a mask", expect="the exercise asks for numbers")
def mask(experts, num_experts, capacity):
    return right.drop_beyond(experts, num_experts, capacity) >= 0


@mistake("capacity-drops", "drops nothing", says="Nothing is dropped: no pair was compared with the capacity.")
def nothing(experts, num_experts, capacity):
    return experts.clone()


@alternative("capacity-drops", "rooms in a loop")
def rooms(experts, num_experts, capacity):
    room, kept = [capacity] * num_experts, []
    for expert in experts.flatten().tolist():
        kept.append(expert if room[expert] else -1)
        room[expert] = max(0, room[expert] - 1)
    return torch.tensor(kept).view_as(experts)


@alternative("capacity-drops", "cut off behind each expert's first places")
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


def _through_softmax(p, upstream):
    return p * (upstream - (p * upstream).sum(1, keepdim=True))


def _gradient(p, experts):
    return _through_softmax(p, p.shape[1] * _shares(p, experts).expand_as(p) / len(p))


@mistake(
    "balance-loss",
    "without the number of experts",
    says="The factor E is missing: with it the loss is 1 for an even load, whatever the number of experts.",
)
def without_e(probabilities, experts):
    loss = (_shares(probabilities, experts) * probabilities.mean(0)).sum()
    return loss, _gradient(probabilities, experts) / probabilities.shape[1]


@mistake(
    "balance-loss",
    "shares that sum to k",
    says="The shares f sum to k instead of 1: divide the counts by the number of pairs, not of tokens.",
)
def divided_by_tokens(probabilities, experts):
    k = experts.shape[1]
    loss, gradient = right.balance(probabilities, experts)
    return k * loss, k * gradient


@mistake(
    "balance-loss",
    "first choices only",
    says="f counts first choices alone. All k choices of a token are load.",
)
def first_choices(probabilities, experts):
    return right.balance(probabilities, experts[:, :1])


@mistake(
    "balance-loss",
    "mean probabilities squared",
    says="This is E · Σ P²: the probabilities in place of the counts. The loss must see where tokens really went.",
)
def probabilities_twice(probabilities, experts):
    mean = probabilities.mean(0)
    upstream = 2 * probabilities.shape[1] * mean.expand_as(probabilities) / len(probabilities)
    return probabilities.shape[1] * (mean * mean).sum(), _through_softmax(probabilities, upstream)


@mistake(
    "balance-loss",
    "the gradient of the probabilities",
    says="This is the gradient with respect to the probabilities. Asked for is that of the logits: one more step, "
    "through the softmax.",
)
def of_probabilities(probabilities, experts):
    loss = right.balance(probabilities, experts)[0]
    return loss, (probabilities.shape[1] * _shares(probabilities, experts) / len(probabilities)).expand_as(
        probabilities
    ).clone()


@mistake(
    "balance-loss",
    "half of the softmax",
    says="p · g is the diagonal of the softmax's derivative. Raising one logit lowers all other probabilities: "
    "subtract Σ p · g inside the brackets.",
)
def diagonal(probabilities, experts):
    loss = right.balance(probabilities, experts)[0]
    return loss, probabilities * probabilities.shape[1] * _shares(probabilities, experts) / len(probabilities)


@mistake(
    "balance-loss",
    "a sum over tokens",
    says="The gradient is as many times too large as there are tokens: P is a mean, so a token has 1 / tokens of it.",
)
def summed(probabilities, experts):
    loss, gradient = right.balance(probabilities, experts)
    return loss, gradient * len(probabilities)


@mistake(
    "balance-loss",
    "a gradient that goes up",
    says="The sign is wrong: this is the way in which the loss falls, the gradient's opposite.",
)
def opposite(probabilities, experts):
    loss, gradient = right.balance(probabilities, experts)
    return loss, -gradient


@alternative("balance-loss", "by autograd, through log-probabilities")
def by_autograd(probabilities, experts):
    with torch.enable_grad():
        logits = probabilities.log().requires_grad_()  # softmax of log p is p
        share = _shares(probabilities, experts)
        loss = logits.shape[1] * (share * logits.softmax(1).mean(0)).sum()
        return loss.detach(), torch.autograd.grad(loss, logits)[0]


@alternative("balance-loss", "one-hot counts, the Jacobian written out")
def with_jacobian(probabilities, experts):
    tokens, num_experts = probabilities.shape
    share = F.one_hot(experts, num_experts).sum((0, 1)).to(probabilities) / experts.numel()
    jacobian = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]
    loss = num_experts * float(share @ probabilities.sum(0)) / tokens
    return loss, (jacobian @ (num_experts * share / tokens))
