"""Spoilers of lab 05: rows that are not masked, losses of a part of the vocabulary, logits that travel."""

import torch
import torch.nn.functional as F

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("05_tensor_parallel")
Leave = ANSWERS.Leave

# The embedding

mistake(
    "vocabulary-embedding",
    "rows-not-masked",
    {".masked_fill(outside[:, None], 0.0)": ""},
    expect="those that do not hold the token must add zeros",
)
mistake(
    "vocabulary-embedding",
    "ids-dealt-out-in-turn",
    {
        "tokens - group.rank * len(rows)": "tokens // group.world_size",
        "(local < 0) | (local >= len(rows))": "tokens % group.world_size != group.rank",
    },
    expect="where do this rank's rows begin",
)
mistake(
    "vocabulary-embedding",
    "last-row-lost",
    {"local >= len(rows)": "local >= len(rows) - 1"},
    expect="it is zero: nobody's row was added",
)
mistake(
    "vocabulary-embedding",
    "averages",
    {"0.0), group)": "0.0), group) / group.world_size"},
    expect="it is divided by the ranks",
)


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


@mistake("vocabulary-embedding", "gathers-the-table-and-sums-gradients", expect="1 all_gather and backward 1 reduce_sc")
def gathers_and_scatters(tokens, rows, group):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return group.all_gather(rows)

        @staticmethod
        def backward(ctx, gradient):
            return group.reduce_scatter(gradient.contiguous())

    return F.embedding(tokens, Gather.apply(rows))


@mistake("vocabulary-embedding", "gathers-the-table-outside-autograd", expect="1 all_gather.*no weight has to travel")
def looks_up_in_a_gathered_copy(tokens, rows, group):
    return F.embedding(tokens, group.all_gather(rows.detach()))


mistake(
    "vocabulary-embedding",
    "mask-as-a-number",
    {
        "return Leave.apply(found.masked_fill(outside[:, None], 0.0), group)": (
            "found.data[outside] = 0.0  # autograd does not see it\n    return Leave.apply(found, group)"
        )
    },
    expect="gradient of its rows is wrong",
)
mistake(
    "vocabulary-embedding",
    "changes-the-tokens",
    {"tokens - group.rank * len(rows)": "tokens.sub_(group.rank * len(rows))"},
    expect="changed its input",
)


@alternative("vocabulary-embedding", "one-hot-product")
def by_one_hot(tokens, rows, group):
    mine = torch.arange(len(rows)) + group.rank * len(rows)
    return Leave.apply((tokens[:, None] == mine).to(rows.dtype) @ rows, group)


# The loss


mistake(
    "vocabulary-cross-entropy",
    "own-maximum",
    {'group.all_reduce(logits.detach().amax(dim=1), op="max")': "logits.detach().amax(dim=1)"},
    expect="is the same number subtracted on every rank",
)
mistake(
    "vocabulary-cross-entropy",
    "target-not-masked",
    {"picked = picked.masked_fill(outside, 0.0)": ""},
    expect="from the one rank that has it",
)


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


mistake(
    "vocabulary-cross-entropy",
    "sums-gradients-again",
    {
        "Leave.apply(torch.stack([logits.exp().sum(dim=1), picked]), group)": (
            "Leave.apply(Enter.apply(torch.stack([logits.exp().sum(dim=1), picked]), group), group)"
        )
    },
    expect="4 times too large",
)
mistake(
    "vocabulary-cross-entropy",
    "mean-of-the-maxima",
    {'op="max"': 'op="avg"'},
    expect="Subtract the largest logit of all ranks first",
)
mistake(
    "vocabulary-cross-entropy",
    "changes-the-logits",
    {"logits = logits - highest[:, None]": "with torch.no_grad():\n        logits -= highest[:, None]"},
    expect="changed its input",
)
mistake(
    "vocabulary-cross-entropy",
    "in-float32",
    {
        "logits = logits - highest[:, None]": "logits = (logits - highest[:, None]).float()",
        "total.log() - target": "(total.log() - target).to(highest.dtype)",
    },
    expect="of token 0 is wrong: it is right to float32's digits only",
)
alternative(
    "vocabulary-cross-entropy",
    "three-all-reduces",
    {
        "Leave.apply(torch.stack([logits.exp().sum(dim=1), picked]), group)": (
            "(Leave.apply(x, group) for x in (logits.exp().sum(dim=1), picked))"
        )
    },
)


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
