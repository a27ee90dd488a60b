"""Spoilers of lab 03: wrong ways to weigh and to compress gradients, and right ones that look different."""

import torch

from course.kit.exercises import KnownAnswers

# Tokens

token_weighted_loss = KnownAnswers("token-weighted-loss")

token_weighted_loss.mistake(
    "mean-of-means",
    {"total = group.all_reduce(counts.sum())": "total = counts.sum().clamp(min=1)", " * group.world_size": ""},
    expect="mean of the ranks' means.*no rank asked how many tokens",
)
token_weighted_loss.mistake(
    "nothing-by-nothing",
    {"total = group.all_reduce(counts.sum())": "total = counts.sum()", " * group.world_size": ""},
    expect="which has no token that counts, returned nan",
)
token_weighted_loss.mistake("no-world-size", {" * group.world_size": ""}, expect="1/3 of the right one.*multiply by 3")
token_weighted_loss.mistake(
    "counts-padding", {"(nll * counts).sum()": "nll.sum()"}, expect="does a token that does not count"
)
token_weighted_loss.mistake(
    "mean-of-means-and-a-sum",
    {
        "total = group.all_reduce(counts.sum())": (
            "group.all_reduce(counts.sum())\n    total = counts.sum().clamp(min=1)"
        ),
        " * group.world_size": "",
    },
    expect="mean of the ranks' means",
)


token_weighted_loss.mistake(
    "always-3", {"* group.world_size /": "* 3 /"}, expect="right on 3 ranks, but on 4 the averaged"
)


@token_weighted_loss.alternative("mean-count")
def average_count(nll, counts, group):
    mine = counts.sum().reshape(1).clone()
    return nll[counts > 0].sum() / group.all_reduce(mine, op="avg").squeeze()


@token_weighted_loss.alternative("gathered-counts")
def own_mean_times_share(nll, counts, group):
    everyone = group.all_gather(counts.sum().reshape(1))
    return (nll * counts / everyone.mean()).sum()


token_weighted_loss.mistake(
    "no-graph-without-tokens",
    {
        "    return (nll": (
            "    if counts.sum() == 0:\n        return torch.zeros((), requires_grad=True)\n    return (nll"
        )
    },
    expect="backward does not reach the model",
)
token_weighted_loss.mistake(
    "counts-reduced-in-place",
    {"group.all_reduce(counts.sum())": "group.all_reduce(counts).sum()"},
    expect=r"all_reduce \[\d+\] float64 on rank . but all_reduce \[\d+\] float64 on rank",
)
token_weighted_loss.mistake(
    "divides-by-lengths",
    {
        "total = group.all_reduce(counts.sum())": 'share = group.all_reduce(counts.mean(), op="avg")',
        "(nll * counts).sum() * group.world_size / total": "(nll * counts).mean() / share",
    },
    expect="ranks have nll of different lengths",
)
for bits in ("bfloat16", "half", "uint8"):
    token_weighted_loss.mistake(
        f"total-in-{bits}",
        {"(counts.sum())": f"(counts.sum().to(torch.{bits}))"},
        expect="8 or 16 bits may not hold it",
    )
token_weighted_loss.mistake(
    "a-loss-of-0-does-not-count",
    {"(counts.sum())": "((nll.detach() * counts).count_nonzero())"},
    expect="a token whose loss is 0 counts, too",
)


# Compression

top_k_error_feedback = KnownAnswers("top-k-error-feedback")

top_k_error_feedback.mistake(
    "no-feedback",
    {"gradient + residual\n": "gradient.clone()\n", "residual.copy_(owed)": "", "residual[indices] = 0": ""},
    expect="the residual is zero: what was not sent is lost",
)
top_k_error_feedback.mistake(
    "rest-not-added",
    {"gradient + residual\n": "gradient.clone()\n", "residual.copy_(owed)": "residual += owed"},
    expect="the residual is not added before choosing",
)
top_k_error_feedback.mistake(
    "residual-of-this-step",
    {"residual.copy_(owed)": "residual.copy_(gradient)"},
    expect="this step's rest only|nothing to do with the mean",
)
top_k_error_feedback.mistake(
    "residual-of-the-mean",
    {
        "residual.copy_(owed)": "",
        "residual[indices] = 0": "",
        "everyones_values / group.world_size)": (
            "everyones_values / group.world_size)\n    residual.copy_(owed - gradient)"
        ),
    },
    expect="it has nothing to do with the mean",
)
top_k_error_feedback.mistake("sent-twice", {"residual[indices] = 0": ""}, expect="still holds what was sent")
top_k_error_feedback.mistake("by-value", {"owed.abs().topk": "owed.topk"}, expect="choose by abs")
top_k_error_feedback.mistake(
    "one-replaces-the-other",
    {
        "gradient.index_add_(0, everyones_indices.long(), everyones_values / group.world_size)": (
            "gradient[everyones_indices.long()] = everyones_values / group.world_size"
        )
    },
    expect="chosen by several ranks and one value replaced",
)
top_k_error_feedback.mistake(
    "no-division",
    {"everyones_values / group.world_size": "everyones_values"},
    expect="3 times the mean: divide by world_size",
)
top_k_error_feedback.mistake(
    "always-3", {"everyones_values / group.world_size": "everyones_values / 3"}, expect="gradient is wrong in"
)
top_k_error_feedback.mistake(
    "places-as-floats",
    {"indices.int()": "indices.float()"},
    expect="with 2\\*\\*24 entries and more values arrive in other places",
)
top_k_error_feedback.mistake(
    "always-as-many",
    {"    owed = gradient + residual": "    k = vars(group).setdefault('k', k)\n    owed = gradient + residual"},
    expect="wrong in|left out earlier|nothing to do with the mean",
)
top_k_error_feedback.mistake("wide-indices", {"indices.int()": "indices"}, expect="k indices of 4 bytes")


@top_k_error_feedback.alternative("one-message")
def values_and_places_together(gradient, residual, k, group):
    residual += gradient
    indices = residual.abs().topk(k).indices
    packed = torch.cat([residual[indices].view(torch.int32), indices.int()])
    residual[indices] = 0
    gradient.zero_()
    for message in group.all_gather(packed).chunk(group.world_size):
        values, places = message.chunk(2)
        gradient[places.long()] += values.clone().view(torch.float32) / group.world_size


top_k_error_feedback.mistake(
    "above-a-threshold",
    {"owed.abs().topk(k).indices": "(owed.abs() >= owed.abs().topk(k).values[-1]).nonzero().flatten()"},
    expect="not all entries above a threshold",
)
top_k_error_feedback.mistake(
    "equal-ones-leave-the-residual",
    {"residual[indices] = 0": "residual[torch.isin(owed, values)] = 0"},
    expect="of equal entries only those that were sent leave",
)
top_k_error_feedback.mistake(
    "residual-of-its-own",
    {
        "owed = gradient + residual": (
            "kept = vars(group).setdefault('kept', {})\n    owed = gradient + kept.get(len(residual), 0)"
        ),
        "residual[indices] = 0": "residual[indices] = 0\n    kept[len(residual)] = residual.clone()",
    },
    expect="with nothing kept from an earlier call",
)
top_k_error_feedback.alternative("sorted", {"topk(k).indices": "argsort(descending=True)[:k]"})
top_k_error_feedback.mistake(
    "smallest",
    {"topk(k)": "topk(k, largest=False)"},
    says="These are the k smallest entries; the largest carry the gradient.",
)
top_k_error_feedback.mistake(
    "first-k",
    {"owed.abs().topk(k).indices": "torch.arange(k)"},
    says="The first k entries travel, whatever they hold: choose with topk.",
)
