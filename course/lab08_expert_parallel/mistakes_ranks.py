"""Spoilers of lab 08, on several ranks: rows in wrong places or too many of them, gradients over the wrong group."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("08_expert_parallel")

# To the experts and back.


def _to(rows, counts, group, *, sort=True, undo=True, table=None):
    """The reference with its parts exchangeable. table: how received [from, own expert] is read."""
    n, each = group.world_size, len(counts) // group.world_size
    received = (table or _table)(counts, group)
    sent, come = counts.view(n, each).sum(1).tolist(), received.sum(1).tolist()
    arrived = group.all_to_all(rows, input_splits=sent, output_splits=come)
    order = torch.arange(each).repeat(n).repeat_interleave(received.flatten()).argsort(stable=True)
    return (arrived[order] if sort else arrived), received.sum(0), (order if undo else None, sent, come)


def _table(counts, group):
    return group.all_to_all(counts).view(group.world_size, -1)


def _back(rows, plan, group):
    order, sent, come = plan
    arrived = rows if order is None else torch.empty_like(rows).index_copy(0, order, rows)
    return group.all_to_all(arrived, input_splits=come, output_splits=sent)


def _unsorted(rows, counts, group):
    return _to(rows, counts, group, sort=False, undo=False)


mistake("tokens-to-experts", "by source, not by expert", expect="right rows in a wrong order")((_unsorted, _back))


def _not_undone(rows, plan, group):
    return group.all_to_all(rows, input_splits=plan[2], output_splits=plan[1])


mistake(
    "tokens-to-experts",
    "home without sorting back",
    says="The answers went home in the order of the experts. Their ranks expect them by source, as they came: undo the "
    "sort before the second all-to-all.",
)((right.to_experts, _not_undone))


def _sorted_again(rows, plan, group):
    return group.all_to_all(rows[plan[0]], input_splits=plan[2], output_splits=plan[1])


mistake(
    "tokens-to-experts",
    "sorted twice",
    says="rows[order] sorts a second time instead of undoing it: row i came from place order[i].",
)((_to, _sorted_again))


def _same_splits(rows, plan, group):
    order, sent, come = plan
    return group.all_to_all(torch.empty_like(rows).index_copy(0, order, rows), input_splits=sent, output_splits=come)


mistake("tokens-to-experts", "the same splits on the way back", expect="split")((_to, _same_splits))


def _own_counts(rows, counts, group):
    """Takes its own counts for those that come: equal only if all ranks ask alike."""
    return _to(rows, counts, group, table=lambda counts, group: counts.view(group.world_size, -1))


mistake("tokens-to-experts", "never asks how many come", expect="rows|split|belong|wait")((_own_counts, _back))


def _padded(rows, counts, group):
    """Every pair of ranks exchanges as many rows as the fullest one needs."""
    n, each = group.world_size, len(counts) // group.world_size
    received = _table(counts, group)
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


mistake("tokens-to-experts", "padded to the fullest rank", expect="without padding")((_padded, _back))


def _rows_alone(rows, counts, group):
    return _to(rows, counts, group)[0]


mistake("tokens-to-experts", "returns the rows alone", expect="gave a Tensor")((_rows_alone, _back))


def _counts_of_sources(rows, counts, group):
    found, _, plan = _to(rows, counts, group)
    return found, torch.tensor(plan[2]), plan


mistake("tokens-to-experts", "rows by source as counts", expect="your counts say otherwise|belong")(
    (_counts_of_sources, _back)
)


def _by_gathered_table(counts, group):
    rank, each = group.rank, len(counts) // group.world_size
    return group.all_gather(counts[None])[:, each * rank : each * (rank + 1)].contiguous()


def _to_by_table(rows, counts, group):
    return _to(rows, counts, group, table=_by_gathered_table)


def _back_by_inverse(rows, plan, group):
    return group.all_to_all(rows[plan[0].argsort()], input_splits=plan[2], output_splits=plan[1])


alternative("tokens-to-experts", "a table of all counts, the inverse permutation")((_to_by_table, _back_by_inverse))


def _to_in_messages(rows, counts, group):
    """Point to point, with parts joined expert by expert."""
    n, rank, each = group.world_size, group.rank, len(counts) // group.world_size
    table = _by_gathered_table(counts, group)
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


alternative("tokens-to-experts", "messages, joined expert by expert")((_to_in_messages, _back_in_messages))

# Gradients.


@mistake(
    "expert-gradients",
    "the mean over the replicas",
    says="This is the bug that shipped: dividing by the replicas counts every token ep times. The experts' gradients "
    "are sums over the tokens of their whole expert group already; all of the batch's ranks share the mean.",
)
def mean_over_replicas(router, experts, data, replicas):
    return data.all_reduce(router) / data.world_size, replicas.all_reduce(experts) / replicas.world_size


@mistake(
    "expert-gradients",
    "everything over all ranks",
    says="The experts' gradients were summed over all ranks, whose experts are others: expert 0 of rank 0 got the "
    "gradient of expert 4 of rank 1.",
)
def over_all_ranks(router, experts, data, replicas):
    return data.all_reduce(router) / data.world_size, data.all_reduce(experts) / data.world_size


@mistake(
    "expert-gradients",
    "the experts are left alone",
    says="The experts' gradients are those of one expert group: the replicas have seen other tokens. Sum over them "
    "and divide by all ranks that share the batch.",
)
def experts_alone(router, experts, data, replicas):
    return data.all_reduce(router) / data.world_size, experts


@mistake("expert-gradients", "sums without a mean", expect="but 4 times as large")
def sums(router, experts, data, replicas):
    return data.all_reduce(router), replicas.all_reduce(experts)


@mistake(
    "expert-gradients",
    "the router over the replicas",
    says="The router is on every rank, and each rank's tokens have a share in its gradient: average it over all ranks, "
    "not over the replicas of the experts.",
)
def router_over_replicas(router, experts, data, replicas):
    return replicas.all_reduce(router) / replicas.world_size, replicas.all_reduce(experts) / data.world_size


@mistake("expert-gradients", "nothing is returned", expect="asks for")
def nothing_returned(router, experts, data, replicas):
    data.all_reduce(router).div_(data.world_size)
    replicas.all_reduce(experts).div_(data.world_size)


@alternative("expert-gradients", "means, then a correction of the experts")
def corrected(router, experts, data, replicas):
    ep = data.world_size // replicas.world_size
    return data.all_reduce(router, "avg"), replicas.all_reduce(experts, "avg") / ep


@alternative("expert-gradients", "divided first, experts gathered")
def divided_first(router, experts, data, replicas):
    parts = replicas.all_gather((experts / data.world_size)[None])
    return data.all_reduce(router / data.world_size), parts.sum(0)
