"""Wrong answers of lab 24's own tasks with the sentence each draws, and other right ones."""

import torch

from course.kit.exercises import KnownAnswers

token_bucket = KnownAnswers("token-bucket")

token_bucket.mistake(
    "no ceiling",
    {"min(capacity, level + (time - last) * rate)": "level + (time - last) * rate"},
    says="A bucket overflows: it never holds more than its capacity.",
)
token_bucket.mistake("starts empty", {"float(capacity)": "0.0"}, says="The bucket is full at the first request.")
token_bucket.mistake(
    "rejected ones are charged",
    {"cost if admitted[-1] else 0": "cost"},
    says="A request that is refused takes nothing out.",
)
token_bucket.mistake("strictly less", {"cost <= level": "cost < level"}, says="A cost equal to the level fits.")
token_bucket.mistake(
    "refill only when admitted",
    {
        "level, last = min(": "before, level, last = level, min(",
        "level -= cost if admitted[-1] else 0": "level = level - cost if admitted[-1] else before",
    },
    says="Time passes for a refused request too: its refill is kept.",
)
token_bucket.mistake(
    "whole tokens",
    {"(time - last) * rate": "int((time - last) * rate)"},
    says="A refill may be part of a token: two halves make one.",
)
token_bucket.mistake(
    "a cost cut to the capacity",
    {"level, last = min(": "cost = min(cost, capacity)\n        level, last = min("},
    says="A request that costs more than the bucket holds is never admitted.",
)
token_bucket.mistake(
    "the costs", {"append(cost <=": "append(cost * (cost <=", "<= level)": "<= level))"}, expect="True or False"
)
token_bucket.mistake("a count", {"return admitted": "return sum(admitted)"}, expect="exercise asks for a list")


@token_bucket.alternative("by debt")
def by_debt(requests, rate, capacity):
    debt, last, admitted = 0.0, requests[0][0], []
    for time, cost in requests:
        debt, last = max(0.0, debt - (time - last) * rate), time
        admitted.append(debt + cost <= capacity)
        debt += cost if admitted[-1] else 0
    return admitted


@token_bucket.alternative("by the time at which the bucket is full again")
def by_arrival(requests, rate, capacity):
    full, admitted = requests[0][0], []
    for time, cost in requests:
        after = max(full, time) + cost / rate
        admitted.append(after - time <= capacity / rate)
        full = after if admitted[-1] else full
    return admitted


merge_softmax = KnownAnswers("merge-softmax")

merge_softmax.mistake(
    "mean of both",
    {"(lse_a - lse).exp()[..., None]": "0.5", "(lse_b - lse).exp()[..., None]": "0.5"},
    says="The parts do not count alike: weigh them by their sums of exponentials.",
)
merge_softmax.mistake(
    "overflows",
    {
        "torch.logaddexp(lse_a, lse_b)": "(lse_a.exp() + lse_b.exp()).log()",
        "(lse_a - lse).exp()": "(lse_a.exp() / lse.exp())",
        "(lse_b - lse).exp()": "(lse_b.exp() / lse.exp())",
    },
    says="exp of a large score is infinite: subtract the larger logarithm first.",
)
merge_softmax.mistake(
    "the first one subtracted",
    {"torch.logaddexp(lse_a, lse_b)": "lse_a + (lse_b - lse_a).exp().log1p()"},
    says="Subtract the larger logarithm: which part has it differs from query to query.",
)
merge_softmax.mistake(
    "one maximum for a head",
    {
        "lse = torch.logaddexp(lse_a, lse_b)": (
            "most = torch.maximum(lse_a, lse_b).amax(-1, keepdim=True)\n"
            "    lse = most + ((lse_a - most).exp() + (lse_b - most).exp()).log()"
        )
    },
    says="The maximum is one of each query: far below another query's, both exponentials are 0.",
)
merge_softmax.mistake(
    "weights swapped",
    {"out_a * (lse_a": "out_a * (lse_b", "out_b * (lse_b": "out_b * (lse_a"},
    says="Each output belongs to its own sum; here they are exchanged.",
)
merge_softmax.mistake(
    "larger one kept",
    {"None], lse": "None], torch.maximum(lse_a, lse_b)"},
    says="The log of a sum is not the larger of the logs.",
)
merge_softmax.mistake("output alone", {"None], lse": "None]"}, expect="exercise asks for two tensors")


@merge_softmax.alternative("by a sigmoid")
def by_sigmoid(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(lse_a - lse_b)[..., None]
    return share * out_a + (1 - share) * out_b, torch.stack([lse_a, lse_b]).logsumexp(0)


dispatch_order = KnownAnswers("dispatch-order")

dispatch_order.mistake(
    "unstable order",
    {"flat.argsort(stable=True)": "len(flat) - 1 - flat.flip(0).argsort(stable=True)"},
    says="Copies for one expert must keep the order of their tokens.",
)
dispatch_order.mistake(
    "counts per expert",
    {"flat // experts_per_rank, minlength=ranks": "flat, minlength=ranks * experts_per_rank"},
    says="An all-to-all needs rows per rank, not per expert.",
)
dispatch_order.mistake(
    "ranks without rows left out",
    {"counts.tolist()": "counts[counts > 0].tolist()"},
    says="A rank that gets nothing still has a part, of 0 rows.",
)
dispatch_order.mistake(
    "experts dealt round",
    {"flat // experts_per_rank": "flat % ranks"},
    says="Rank r holds experts r · n to r · n + n - 1, not every n-th one.",
)
dispatch_order.mistake(
    "inverse order",
    {"argsort(stable=True)": "argsort(stable=True).argsort()"},
    says="That is where each copy goes; the exercise asks for which copy stands where.",
)
dispatch_order.mistake(
    "keys that run into each other",
    {"flat.argsort(stable=True)": "(flat * 1000 + torch.arange(len(flat))).argsort()"},
    says="Keys of expert and place mix the experts as soon as there are more pairs than the factor: sort stably.",
)
dispatch_order.mistake(
    "experts in 8 bits",
    {"flat.argsort": "flat.to(torch.uint8).argsort"},
    says="8 bits number 256 experts; a model may have more.",
)
dispatch_order.mistake("a tensor of counts", {"counts.tolist()": "counts"}, expect="counts as a list of numbers")


@dispatch_order.alternative("expert by expert")
def expert_by_expert(experts, ranks, each):
    flat = experts.reshape(-1)
    places = [(flat == expert).nonzero()[:, 0] for expert in range(ranks * each)]
    return torch.cat(places), [sum(len(p) for p in places[r * each : (r + 1) * each]) for r in range(ranks)]
