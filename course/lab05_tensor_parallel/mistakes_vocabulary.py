"""Spoilers of lab 05: rows that are not masked, losses of a part of the vocabulary, logits that travel."""

import torch
import torch.nn.functional as F

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("05_tensor_parallel")
Leave = ANSWERS.Leave

# The embedding


@mistake("vocabulary-embedding", "rows-not-masked", expect="those that do not hold the token must add zeros")
def unmasked(tokens, rows, group):
    local = (tokens - group.rank * len(rows)).clamp(0, len(rows) - 1)
    return Leave.apply(F.embedding(local, rows), group)


@mistake("vocabulary-embedding", "ids-dealt-out-in-turn", expect="where do this rank's rows begin")
def in_turn(tokens, rows, group):
    found = F.embedding(tokens // group.world_size, rows)
    return Leave.apply(found.masked_fill((tokens % group.world_size != group.rank)[:, None], 0.0), group)


@mistake("vocabulary-embedding", "last-row-lost", expect="it is zero: nobody's row was added")
def last_row_lost(tokens, rows, group):
    local = tokens - group.rank * len(rows)
    outside = (local < 0) | (local >= len(rows) - 1)
    found = F.embedding(local.masked_fill(outside, 0), rows)
    return Leave.apply(found.masked_fill(outside[:, None], 0.0), group)


@mistake("vocabulary-embedding", "averages", expect="it is divided by the ranks")
def averages(tokens, rows, group):
    return ANSWERS.embed(tokens, rows, group) / group.world_size


@mistake("vocabulary-embedding", "gathers-the-table", expect="one all-reduce of the")
def gathers_the_table(tokens, rows, group):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return group.all_gather(rows)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.chunk(group.world_size)[group.rank].clone()

    return F.embedding(tokens, Gather.apply(rows))


@mistake("vocabulary-embedding", "gathers-the-table-outside-autograd", expect="a collective has no backward of its own")
def looks_up_in_a_gathered_copy(tokens, rows, group):
    return F.embedding(tokens, group.all_gather(rows.detach()))


@mistake("vocabulary-embedding", "mask-as-a-number", expect="gradient of its rows is wrong")
def masks_the_value_only(tokens, rows, group):
    """The zeros are written into .data, which autograd does not see."""
    local = tokens - group.rank * len(rows)
    outside = (local < 0) | (local >= len(rows))
    found = F.embedding(local.masked_fill(outside, 0), rows)
    found.data[outside] = 0.0
    return Leave.apply(found, group)


@mistake("vocabulary-embedding", "changes-the-tokens", expect="changed the ids that it was given")
def changes_tokens(tokens, rows, group):
    tokens -= group.rank * len(rows)
    outside = (tokens < 0) | (tokens >= len(rows))
    tokens[outside] = 0
    return ANSWERS.Leave.apply(F.embedding(tokens, rows).masked_fill(outside[:, None], 0.0), group)


@alternative("vocabulary-embedding", "one-hot-product")
def by_one_hot(tokens, rows, group):
    mine = torch.arange(len(rows)) + group.rank * len(rows)
    return Leave.apply((tokens[:, None] == mine).to(rows.dtype) @ rows, group)


# The loss


def _loss(logits, targets, group, shift, total=None):
    """The reference with its parts exchangeable. shift: [n], what is subtracted."""
    logits = logits - shift[:, None]
    local = targets - group.rank * logits.shape[1]
    outside = (local < 0) | (local >= logits.shape[1])
    picked = logits.gather(1, local.masked_fill(outside, 0)[:, None])[:, 0].masked_fill(outside, 0.0)
    sums = (total or Leave.apply)(torch.stack([logits.exp().sum(dim=1), picked]), group)
    return sums[0].log() - sums[1]


def _highest(logits, group):
    return group.all_reduce(logits.detach().amax(dim=1), op="max")


@mistake("vocabulary-cross-entropy", "own-maximum", expect="is the same number subtracted on every rank")
def own_maximum(logits, targets, group):
    return _loss(logits, targets, group, logits.detach().amax(dim=1))


@mistake("vocabulary-cross-entropy", "target-not-masked", expect="from the one rank that has it")
def target_not_masked(logits, targets, group):
    logits = logits - _highest(logits, group)[:, None]
    local = (targets - group.rank * logits.shape[1]).clamp(0, logits.shape[1] - 1)
    total, target = Leave.apply(torch.stack([logits.exp().sum(1), logits.gather(1, local[:, None])[:, 0]]), group)
    return total.log() - target


@mistake("vocabulary-cross-entropy", "own-vocabulary-only", expect="this rank's part of the vocabulary alone")
def own_vocabulary(logits, targets, group):
    local = (targets - group.rank * logits.shape[1]).clamp(0, logits.shape[1] - 1)
    return F.cross_entropy(logits, local, reduction="none")


@mistake("vocabulary-cross-entropy", "gathers-the-logits", expect="the logits stay where they are")
def gathers_the_logits(logits, targets, group):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return torch.cat(group.all_gather(logits).chunk(group.world_size), dim=1)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.chunk(group.world_size, dim=1)[group.rank].clone()

    return F.cross_entropy(Gather.apply(logits), targets, reduction="none")


class _SumsBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return group.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_reduce(gradient.clone()), None


@mistake("vocabulary-cross-entropy", "sums-gradients-again", expect="4 times too large")
def sums_gradients_again(logits, targets, group):
    return _loss(logits, targets, group, _highest(logits, group), _SumsBothWays.apply)


@mistake("vocabulary-cross-entropy", "mean-of-the-maxima", expect="Subtract the largest logit of all ranks first")
def averages_the_maxima(logits, targets, group):
    return _loss(logits, targets, group, group.all_reduce(logits.detach().amax(dim=1), op="avg"))


@mistake("vocabulary-cross-entropy", "changes-the-logits", expect="changed the weights or logits that it was given")
def changes_logits(logits, targets, group):
    with torch.no_grad():
        logits -= group.all_reduce(logits.amax(dim=1), op="max")[:, None]
    return _loss(logits, targets, group, torch.zeros(len(logits)))


@alternative("vocabulary-cross-entropy", "three-all-reduces")
def three_all_reduces(logits, targets, group):
    def each(sums, group):
        return [Leave.apply(x, group) for x in sums]

    return _loss(logits, targets, group, _highest(logits, group), each)


@alternative("vocabulary-cross-entropy", "gathers-log-sums")
def gathers_log_sums(logits, targets, group):
    """Each rank's log-sum-exp and target logit, two numbers per token, gathered and combined."""
    n, share = group.world_size, logits.shape[1]
    local = targets - group.rank * share
    outside = (local < 0) | (local >= share)
    mine = logits.logsumexp(dim=1)
    target = Leave.apply(
        logits.gather(1, local.masked_fill(outside, 0)[:, None])[:, 0].masked_fill(outside, 0.0), group
    )
    others = group.all_gather(mine.detach()).view(n, -1)
    whole = torch.cat([others[: group.rank], mine[None], others[group.rank + 1 :]]).logsumexp(dim=0)
    return whole - target
