"""Spoilers of lab 05: rows that are not masked, losses of a part of the vocabulary, logits that travel."""

import torch
import torch.nn.functional as F

from course.kit import answers_of
from course.kit.exercises import KnownAnswers

ANSWERS = answers_of("05_tensor_parallel")
Leave = ANSWERS.Leave

# The embedding

vocabulary_embedding = KnownAnswers("vocabulary-embedding")

vocabulary_embedding.mistake(
    "rows-not-masked",
    {".masked_fill(outside[:, None], 0.0)": ""},
    expect="those that do not hold the token must add zeros",
)
vocabulary_embedding.mistake(
    "ids-dealt-out-in-turn",
    {
        "tokens - group.rank * len(rows)": "tokens // group.world_size",
        "(local < 0) | (local >= len(rows))": "tokens % group.world_size != group.rank",
    },
    expect="where do this rank's rows begin",
)
vocabulary_embedding.mistake(
    "last-row-lost", {"local >= len(rows)": "local >= len(rows) - 1"}, expect="it is zero: nobody's row was added"
)
vocabulary_embedding.mistake(
    "averages", {"0.0), group)": "0.0), group) / group.world_size"}, expect="it is divided by the ranks"
)


@vocabulary_embedding.mistake("gathers-the-table", expect="one all-reduce of the")
def gathers_the_table(tokens, rows, group):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return group.all_gather(rows)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.chunk(group.world_size)[group.rank].clone()

    return F.embedding(tokens, Gather.apply(rows))


@vocabulary_embedding.mistake("gathers-the-table-and-sums-gradients", expect="1 all_gather and backward 1 reduce_sc")
def gathers_and_scatters(tokens, rows, group):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return group.all_gather(rows)

        @staticmethod
        def backward(ctx, gradient):
            return group.reduce_scatter(gradient.contiguous())

    return F.embedding(tokens, Gather.apply(rows))


@vocabulary_embedding.mistake("gathers-the-table-outside-autograd", expect="1 all_gather.*no weight has to travel")
def looks_up_in_a_gathered_copy(tokens, rows, group):
    return F.embedding(tokens, group.all_gather(rows.detach()))


vocabulary_embedding.mistake(
    "mask-as-a-number",
    {
        "return Leave.apply(found.masked_fill(outside[:, None], 0.0), group)": (
            "found.data[outside] = 0.0  # autograd does not see it\n    return Leave.apply(found, group)"
        )
    },
    expect="gradient of its rows is wrong",
)
vocabulary_embedding.mistake(
    "changes-the-tokens",
    {"tokens - group.rank * len(rows)": "tokens.sub_(group.rank * len(rows))"},
    expect="changed its input",
)


@vocabulary_embedding.alternative("one-hot-product")
def by_one_hot(tokens, rows, group):
    mine = torch.arange(len(rows)) + group.rank * len(rows)
    return Leave.apply((tokens[:, None] == mine).to(rows.dtype) @ rows, group)


# The loss

vocabulary_cross_entropy = KnownAnswers("vocabulary-cross-entropy")

vocabulary_cross_entropy.mistake(
    "own-maximum",
    {'group.all_reduce(logits.detach().amax(dim=1), op="max")': "logits.detach().amax(dim=1)"},
    expect="is the same number subtracted on every rank",
)
vocabulary_cross_entropy.mistake(
    "target-not-masked", {"picked = picked.masked_fill(outside, 0.0)": ""}, expect="from the one rank that has it"
)


@vocabulary_cross_entropy.mistake("own-vocabulary-only", expect="this rank's part of the vocabulary alone")
def own_vocabulary(logits, targets, group):
    local = (targets - group.rank * logits.shape[1]).clamp(0, logits.shape[1] - 1)
    return F.cross_entropy(logits, local, reduction="none")


@vocabulary_cross_entropy.mistake("gathers-the-logits", expect="the logits stay where they are")
def gathers_the_logits(logits, targets, group):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return torch.cat(group.all_gather(logits).chunk(group.world_size), dim=1)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.chunk(group.world_size, dim=1)[group.rank].clone()

    return F.cross_entropy(Gather.apply(logits), targets, reduction="none")


vocabulary_cross_entropy.mistake(
    "sums-gradients-again",
    {
        "Leave.apply(torch.stack([logits.exp().sum(dim=1), picked]), group)": (
            "Leave.apply(Enter.apply(torch.stack([logits.exp().sum(dim=1), picked]), group), group)"
        )
    },
    expect="4 times too large",
)
vocabulary_cross_entropy.mistake(
    "mean-of-the-maxima", {'op="max"': 'op="avg"'}, expect="Subtract the largest logit of all ranks first"
)
vocabulary_cross_entropy.mistake(
    "changes-the-logits",
    {"logits = logits - highest[:, None]": "with torch.no_grad():\n        logits -= highest[:, None]"},
    expect="changed its input",
)
vocabulary_cross_entropy.mistake(
    "in-float32",
    {
        "logits = logits - highest[:, None]": "logits = (logits - highest[:, None]).float()",
        "total.log() - target": "(total.log() - target).to(highest.dtype)",
    },
    expect="of token 0 is wrong: it is right to float32's digits only",
)
vocabulary_cross_entropy.alternative(
    "three-all-reduces",
    {
        "Leave.apply(torch.stack([logits.exp().sum(dim=1), picked]), group)": (
            "(Leave.apply(x, group) for x in (logits.exp().sum(dim=1), picked))"
        )
    },
)


@vocabulary_cross_entropy.alternative("gathers-log-sums")
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
