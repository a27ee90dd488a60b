"""Spoilers of lab 03: wrong ways to weigh and to compress gradients, and right ones that look different."""

import torch

from course.kit.exercises import alternative, mistake

# Tokens


@mistake("token-weighted-loss", "mean-of-means", expect="mean of the ranks' means.*no rank asked how many tokens")
def own_mean(nll, counts, group):
    return (nll * counts).sum() / counts.sum().clamp(min=1)


@mistake("token-weighted-loss", "nothing-by-nothing", expect="which has no token that counts, returned nan")
def zero_by_zero(nll, counts, group):
    return (nll * counts).sum() / counts.sum()


@mistake("token-weighted-loss", "no-world-size", expect="1/3 of the right one.*multiply by 3")
def forgets_that_gradients_are_averaged(nll, counts, group):
    return (nll * counts).sum() / group.all_reduce(counts.sum())


@mistake("token-weighted-loss", "counts-padding", expect="does a token that does not count")
def every_token(nll, counts, group):
    return nll.sum() * group.world_size / group.all_reduce(counts.sum())


@mistake("token-weighted-loss", "mean-of-means-and-a-sum", expect="mean of the ranks' means")
def asks_and_ignores(nll, counts, group):
    group.all_reduce(counts.sum())
    return (nll * counts).sum() / counts.sum().clamp(min=1)


@alternative("token-weighted-loss", "mean-count")
def average_count(nll, counts, group):
    mine = counts.sum().reshape(1).clone()
    return nll[counts > 0].sum() / group.all_reduce(mine, op="avg").squeeze()


@alternative("token-weighted-loss", "gathered-counts")
def own_mean_times_share(nll, counts, group):
    everyone = group.all_gather(counts.sum().reshape(1))
    return (nll * counts / everyone.mean()).sum()


@mistake("token-weighted-loss", "no-graph-without-tokens", expect="backward does not reach the model")
def returns_a_constant(nll, counts, group):
    total = group.all_reduce(counts.sum())
    if counts.sum() == 0:
        return torch.zeros((), requires_grad=True)
    return (nll * counts).sum() * group.world_size / total


@mistake("token-weighted-loss", "counts-reduced-in-place", expect="changed its counts")
def reduces_the_mask(nll, counts, group):
    total = group.all_reduce(counts).sum()
    return (nll * counts).sum() * group.world_size / total


# Compression


def _send(gradient, owed, indices, group, index_type=torch.int32, add=True, divide=True):
    values, places = group.all_gather(owed[indices]), group.all_gather(indices.to(index_type)).long()
    gradient.zero_()
    if add:
        gradient.index_add_(0, places, values)
    else:
        gradient[places] = values
    if divide:
        gradient /= group.world_size


@mistake("top-k-error-feedback", "no-feedback", expect="the residual is zero: what was not sent is lost")
def forgets_the_rest(gradient, residual, k, group):
    _send(gradient, gradient.clone(), gradient.abs().topk(k).indices, group)


@mistake("top-k-error-feedback", "rest-not-added", expect="the residual is not added before choosing")
def keeps_but_never_sends(gradient, residual, k, group):
    own = gradient.clone()
    indices = own.abs().topk(k).indices
    residual += own
    residual[indices] = 0
    _send(gradient, own, indices, group)


@mistake("top-k-error-feedback", "residual-of-this-step", expect="this step's rest only|nothing to do with the mean")
def loses_older_debts(gradient, residual, k, group):
    owed = gradient + residual
    indices = owed.abs().topk(k).indices
    residual.copy_(gradient)
    residual[indices] = 0
    _send(gradient, owed, indices, group)


@mistake("top-k-error-feedback", "residual-of-the-mean", expect="it has nothing to do with the mean")
def owes_what_the_mean_lacks(gradient, residual, k, group):
    owed = gradient + residual
    _send(gradient, owed, owed.abs().topk(k).indices, group)
    residual.copy_(owed - gradient)


@mistake("top-k-error-feedback", "sent-twice", expect="still holds what was sent")
def never_clears(gradient, residual, k, group):
    residual += gradient
    _send(gradient, residual, residual.abs().topk(k).indices, group)


@mistake("top-k-error-feedback", "by-value", expect="choose by abs")
def positive_ones_only(gradient, residual, k, group):
    owed = gradient + residual
    indices = owed.topk(k).indices
    residual.copy_(owed)
    residual[indices] = 0
    _send(gradient, owed, indices, group)


@mistake("top-k-error-feedback", "one-replaces-the-other", expect="chosen by several ranks and one value replaced")
def assigns(gradient, residual, k, group):
    owed = gradient + residual
    indices = owed.abs().topk(k).indices
    residual.copy_(owed)
    residual[indices] = 0
    _send(gradient, owed, indices, group, add=False)


@mistake("top-k-error-feedback", "no-division", expect="3 times the mean: divide by world_size")
def adds_only(gradient, residual, k, group):
    owed = gradient + residual
    indices = owed.abs().topk(k).indices
    residual.copy_(owed)
    residual[indices] = 0
    _send(gradient, owed, indices, group, divide=False)


@mistake("top-k-error-feedback", "wide-indices", expect="k indices of 4 bytes")
def int64_indices(gradient, residual, k, group):
    owed = gradient + residual
    indices = owed.abs().topk(k).indices
    residual.copy_(owed)
    residual[indices] = 0
    _send(gradient, owed, indices, group, index_type=torch.int64)


@alternative("top-k-error-feedback", "one-message")
def values_and_places_together(gradient, residual, k, group):
    residual += gradient
    indices = residual.abs().topk(k).indices
    packed = torch.cat([residual[indices].view(torch.int32), indices.int()])
    residual[indices] = 0
    gradient.zero_()
    for message in group.all_gather(packed).chunk(group.world_size):
        values, places = message.chunk(2)
        gradient[places.long()] += values.clone().view(torch.float32) / group.world_size


@alternative("top-k-error-feedback", "sorted")
def by_sorting(gradient, residual, k, group):
    owed = gradient + residual
    indices = owed.abs().argsort(descending=True)[:k]
    sent = torch.zeros_like(owed)
    sent[indices] = owed[indices]
    residual.copy_(owed - sent)
    _send(gradient, owed, indices, group)


def _sends(gradient, residual, group, choose):
    owed = gradient + residual
    indices = choose(owed)
    residual.copy_(owed)
    residual[indices] = 0
    _send(gradient, owed, indices, group)


@mistake("top-k-error-feedback", "smallest", says="These are the k smallest entries; the largest carry the gradient.")
def sends_the_smallest(gradient, residual, k, group):
    _sends(gradient, residual, group, lambda owed: owed.abs().topk(k, largest=False).indices)


@mistake("top-k-error-feedback", "first-k", says="The first k entries travel, whatever they hold: choose with topk.")
def sends_the_first(gradient, residual, k, group):
    _sends(gradient, residual, group, lambda owed: torch.arange(k))
