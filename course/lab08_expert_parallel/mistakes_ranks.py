"""Spoilers of lab 08, on several ranks: rows in wrong places or too many of them, gradients over the wrong group."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("08_expert_parallel")

# To the experts and back.

tokens_to_experts = KnownAnswers("tokens-to-experts")

tokens_to_experts.mistake(
    "by source, not by expert",
    {"arrived[order]": "arrived", "torch.empty_like(rows).index_copy(0, order, rows)": "rows"},
    expect="right rows in a wrong order",
)
tokens_to_experts.mistake(
    "home without sorting back",
    {"torch.empty_like(rows).index_copy(0, order, rows)": "rows"},
    says="The answers went home in the order of the experts. Their ranks expect them by source, as they came: undo the "
    "sort before the second all-to-all.",
)
tokens_to_experts.mistake(
    "sorted twice",
    {"torch.empty_like(rows).index_copy(0, order, rows)": "rows[order]"},
    says="rows[order] sorts a second time instead of undoing it: row i came from place order[i].",
)
tokens_to_experts.mistake(
    "the same splits on the way back",
    {"input_splits=come, output_splits=sent": "input_splits=sent, output_splits=come"},
    expect="split",
)
tokens_to_experts.mistake(
    "never asks how many come", {"group.all_to_all(counts)": "counts"}, expect="rows|split|belong|wait|was expected"
)


def _padded(rows, counts, group):
    """Every pair of ranks exchanges as many rows as the fullest one needs."""
    n, each = group.world_size, len(counts) // group.world_size
    received = group.all_to_all(counts).view(n, each)
    sent = counts.view(n, each).sum(1)
    most = int(group.all_reduce(sent.max().clone(), "max"))
    buffer = rows.new_zeros(n, most, rows.shape[1])
    for rank, part in enumerate(rows.split(sent.tolist())):
        buffer[rank, : len(part)] = part
    arrived = group.all_to_all(buffer.flatten(0, 1)).view(n, most, -1)
    come = received.sum(1).tolist()
    kept = torch.cat([part[:count] for part, count in zip(arrived, come, strict=True)])
    order = torch.arange(each).repeat(n).repeat_interleave(received.flatten()).argsort(stable=True)
    return kept[order], received.sum(0), (order, sent.tolist(), come)


tokens_to_experts.mistake("padded to the fullest rank", expect="without padding")((_padded, right.from_experts))


tokens_to_experts.mistake(
    "returns the rows alone", {", received.sum(0), (order, sent, come)": ""}, expect="gave a Tensor"
)
tokens_to_experts.mistake(
    "rows by source as counts",
    {"received.sum(0), (order": "torch.tensor(come), (order"},
    expect="your counts say otherwise|belong",
)
tokens_to_experts.mistake(
    "the plan of the last call",
    {
        "return arrived[order], received.sum(0), (order, sent, come)": (
            "to_experts.plan = (order, sent, come)\n    return arrived[order], received.sum(0), None"
        ),
        "order, sent, come = plan": "order, sent, come = to_experts.plan",
    },
    expect="split|belong|rows|index|wait|was expected",
)
tokens_to_experts.mistake(
    "a plan per counts",
    {
        "return arrived[order], received.sum(0), (order, sent, come)": (
            "vars(to_experts)[str(counts)] = (order, sent, come)\n"
            "    return arrived[order], received.sum(0), str(counts)"
        ),
        "order, sent, come = plan": "order, sent, come = vars(to_experts)[plan]",
    },
    expect="split|belong|rows|index|wait|was expected",
)
tokens_to_experts.mistake(
    "never waits",
    {"input_splits=come, output_splits=sent": "input_splits=come, output_splits=sent, async_op=True"},
    expect="gave a Work.* is its wait",
)
tokens_to_experts.mistake(
    "counts as floats", {"received.sum(0), (": "received.sum(0).float(), ("}, expect="whole numbers"
)
tokens_to_experts.mistake(
    "float32 on the way back",
    {
        "torch.empty_like(rows).index_copy(0, order, rows)": (
            "torch.empty(rows.shape).index_copy(0, order, rows.float())"
        )
    },
    expect="float64 belong",
)
tokens_to_experts.mistake(
    "four columns", {"torch.empty_like(rows)": "rows.new_empty(len(rows), 4)"}, expect="size|shape|dimension"
)
tokens_to_experts.alternative(
    "a table of all counts, the inverse permutation",
    {
        "all_to_all(counts).view(n, each)": "all_gather(counts[None])[:, each * group.rank :][:, :each]",
        "torch.empty_like(rows).index_copy(0, order, rows)": "rows[order.argsort()]",
    },
)


def _numbers_beside_rows(rows, counts, group):
    """Each row's expert travels as the row does."""
    n, each = group.world_size, len(counts) // group.world_size
    sent = counts.view(n, each).sum(1)
    come = group.all_to_all(sent)
    splits = {"input_splits": sent.tolist(), "output_splits": come.tolist()}
    arrived = group.all_to_all(rows, **splits)
    numbers = group.all_to_all(torch.arange(n * each).repeat_interleave(counts), **splits) - each * group.rank
    order = numbers.argsort(stable=True)
    return arrived[order], torch.bincount(numbers, minlength=each), (order, sent.tolist(), come.tolist())


tokens_to_experts.alternative("experts' numbers beside the rows")((_numbers_beside_rows, right.from_experts))


def _summed_table(rows, counts, group):
    """All ranks' counts by an all-reduce."""
    n, each = group.world_size, len(counts) // group.world_size
    table = group.all_reduce(
        torch.zeros(n, n, each, dtype=torch.int64).index_copy(0, torch.tensor([group.rank]), counts.view(1, n, each))
    )
    sent, received = table[group.rank].sum(1).tolist(), table[:, group.rank]
    arrived = group.all_to_all(rows, input_splits=sent, output_splits=received.sum(1).tolist())
    order = torch.arange(each).repeat(n).repeat_interleave(received.flatten()).argsort(stable=True)
    return arrived[order], received.sum(0), (order, sent, received.sum(1).tolist())


tokens_to_experts.alternative("a table of all counts by all-reduce")((_summed_table, right.from_experts))


def _to_in_messages(rows, counts, group):
    """Point to point, with parts joined expert by expert."""
    n, rank, each = group.world_size, group.rank, len(counts) // group.world_size
    table = group.all_gather(counts[None])[:, each * rank :][:, :each]
    parts = list(rows.split(counts.view(n, each).sum(1).tolist()))
    arrived = [rows.new_empty(int(table[source].sum()), rows.shape[1]) for source in range(n)]
    arrived[rank] = parts[rank]
    others = [other for other in range(n) if other != rank]
    group.exchange(
        send=[(parts[other].contiguous(), other) for other in others],
        recv=[(arrived[other], other) for other in others],
    )
    pieces = [part.split(table[source].tolist()) for source, part in enumerate(arrived)]
    by_expert = [pieces[source][expert] for expert in range(each) for source in range(n)]
    return torch.cat(by_expert), table.sum(0).tolist(), (table, [len(part) for part in parts])


def _back_in_messages(rows, plan, group):
    table, sizes = plan
    n, rank = group.world_size, group.rank
    pieces = rows.split(table.T.flatten().tolist())  # by expert, then by source
    leaving = [torch.cat(pieces[source::n]) for source in range(n)]
    home = [rows.new_empty(size, rows.shape[1]) for size in sizes]
    home[rank] = leaving[rank]
    others = [other for other in range(n) if other != rank]
    group.exchange(send=[(leaving[other], other) for other in others], recv=[(home[other], other) for other in others])
    return torch.cat(home)


tokens_to_experts.alternative("messages, joined expert by expert")((_to_in_messages, _back_in_messages))

# Gradients.

expert_gradients = KnownAnswers("expert-gradients")

expert_gradients.mistake(
    "the mean over the replicas",
    {"(experts) / data.world_size": "(experts) / replicas.world_size"},
    says="This is the bug that shipped: dividing by the replicas counts every token ep times. The experts' gradients "
    "are sums over the tokens of their whole expert group already; all of the batch's ranks share the mean.",
)
expert_gradients.mistake(
    "everything over all ranks",
    {"replicas.all_reduce(experts)": "data.all_reduce(experts)"},
    says="The experts' gradients were summed over all ranks, whose experts are others: expert 0 of rank 0 got the "
    "gradient of expert 4 of rank 1.",
)
expert_gradients.mistake(
    "the experts are left alone",
    {"replicas.all_reduce(experts) / data.world_size": "experts"},
    says="The experts' gradients are those of one expert group: the replicas have seen other tokens. Sum over them "
    "and divide by all ranks that share the batch.",
)
expert_gradients.mistake(
    "sums without a mean",
    {"(router) / data.world_size": "(router)", "(experts) / data.world_size": "(experts)"},
    expect="but 4 times as large",
)
expert_gradients.mistake(
    "the router over the replicas",
    {"data.all_reduce(router) / data.world_size": "replicas.all_reduce(router) / replicas.world_size"},
    says="The router is on every rank, and each rank's tokens have a share in its gradient: average it over all ranks, "
    "not over the replicas of the experts.",
)
expert_gradients.mistake(
    "always 4",
    {"(router) / data.world_size": "(router) / 4", "(experts) / data.world_size": "(experts) / 4"},
    expect="rank 0 of 2: .* but 0.5 times as large",
)
expert_gradients.mistake(
    "all ranks of the job",
    {
        "(router) / data.world_size": "(router) / torch.distributed.get_world_size()",
        "(experts) / data.world_size": "(experts) / torch.distributed.get_world_size()",
    },
    expect="rank 0 of 2: .* but 0.5 times as large",
)
expert_gradients.mistake(
    "float64 whatever comes",
    {"replicas.all_reduce(experts)": "replicas.all_reduce(experts.double())"},
    expect="keep its dtype",
)
expert_gradients.mistake("nothing is returned", {"return router, experts": "return None"}, expect="asks for")


@expert_gradients.alternative("means, then a correction of the experts")
def corrected(router, experts, data, replicas):
    ep = data.world_size // replicas.world_size
    return data.all_reduce(router, "avg"), replicas.all_reduce(experts, "avg") / ep


@expert_gradients.alternative("divided first, experts gathered")
def divided_first(router, experts, data, replicas):
    parts = replicas.all_gather((experts / data.world_size)[None])
    return data.all_reduce(router / data.world_size), parts.sum(0)


@expert_gradients.mistake("pickles", expect="gather_objects pickles")
def pickled(router, experts, data, replicas):
    router = sum(data.gather_objects(router)) / data.world_size
    return router, sum(replicas.gather_objects(experts)) / data.world_size


@expert_gradients.mistake("a table of all experts, reduced beside the group", expect="beside the groups")
def beside_the_group(router, experts, data, replicas):
    ep = data.world_size // replicas.world_size
    table = experts.new_zeros(ep, *experts.shape)
    table[data.rank % ep] = experts
    torch.distributed.all_reduce(table)
    torch.distributed.all_reduce(router)
    return router / data.world_size, table[data.rank % ep] / data.world_size
