"""Spoilers of lab 03: wrong ways to average and pack gradients, and right ones that look different."""

import torch
import torch.distributed as dist

from course.kit.exercises import alternative, mistake
from course.lab03_data_parallel.replicas import Bucket

# Naive data parallel


@mistake("naive-ddp", "no-division", expect="it is the sum|is the sum over the ranks, 3 times their mean: divide")
def only_the_sum(model, group):
    for parameter in model.parameters():
        if parameter.grad is not None:
            group.all_reduce(parameter.grad)


@mistake("naive-ddp", "reduces-parameters", expect="changed the parameters themselves: reduce the gradients")
def averages_the_weights(model, group):
    with torch.no_grad():
        for parameter in model.parameters():
            group.all_reduce(parameter, op="avg")


@mistake("naive-ddp", "only-matrices", expect=r"gradient of gain is this rank's own")
def forgets_biases(model, group):
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            group.all_reduce(parameter.grad, op="avg")


@mistake("naive-ddp", "divides-twice", expect="divided by 3 once more: divide only once")
def average_of_the_average(model, group):
    for parameter in model.parameters():
        if parameter.grad is not None:
            group.all_reduce(parameter.grad, op="avg")
            parameter.grad /= group.world_size


@mistake("naive-ddp", "rank-0-decides", expect="is rank 0's, not the mean of all")
def broadcasts(model, group):
    for parameter in model.parameters():
        if parameter.grad is not None:
            group.broadcast(parameter.grad)


@mistake("naive-ddp", "zeros-for-none", expect=r"times as many: each gradient|should be None, since no loss reaches it")
def makes_gradients(model, group):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group.all_reduce(parameter.grad, op="avg")


@mistake("naive-ddp", "torch-distributed", expect="ledger saw no communication")
def past_the_ledger(model, group):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group.process_group)
            parameter.grad /= group.world_size


@mistake("naive-ddp", "gathers-everything", expect="you used all_gather")
def gathers(model, group):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(group.all_gather(parameter.grad[None]).mean(0))


@alternative("naive-ddp", "average-by-op")
def lets_the_group_divide(model, group):
    for parameter in reversed(list(model.parameters())):
        if parameter.grad is not None:
            group.all_reduce(parameter.grad, op="avg")


@alternative("naive-ddp", "handles")
def all_at_once(model, group):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        gradient.div_(group.world_size)
    for handle in [group.all_reduce(gradient, async_op=True) for gradient in gradients]:
        handle.wait()


@alternative("naive-ddp", "one for all")
def joins_them(model, group):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = group.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), op="avg")
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@mistake("naive-ddp", "divides-by-4", expect="is 0.75 times the mean over the ranks")
def assumes_four_ranks(model, group):
    for parameter in model.parameters():
        if parameter.grad is not None:
            group.all_reduce(parameter.grad)
            parameter.grad /= 4


# Buckets


def _fill(parameters, cap_bytes, order=reversed, frozen=False, before=False, last=True):
    closed, filling = [], {}
    for p in order([p for p in parameters if p.requires_grad or frozen]):
        mine = filling.setdefault(p.dtype, [])
        if before and mine and sum(q.nbytes for q in mine) + p.nbytes > cap_bytes:
            closed.append(filling.pop(p.dtype))
        filling.setdefault(p.dtype, []).append(p)
        if not before and sum(q.nbytes for q in filling[p.dtype]) >= cap_bytes:
            closed.append(filling.pop(p.dtype))
    return [*closed, *(filling.values() if last else [])]


def _give(lists):
    buckets = []
    for members in lists:
        flat, at = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype), 0
        for p in members:
            p.grad = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        buckets.append(Bucket(flat, members))
    return buckets


@mistake("gradient-buckets", "first-parameter-first", expect="pack the last parameter first")
def in_the_order_of_forward(parameters, cap_bytes):
    return _give(_fill(parameters, cap_bytes, order=list))


@mistake("gradient-buckets", "copies-not-views", expect="is a copy, not a view")
def flattens_once(parameters, cap_bytes):
    buckets = []
    for members in _fill(parameters, cap_bytes):
        for p in members:
            p.grad = torch.zeros_like(p)
        buckets.append(Bucket(torch.cat([p.grad.flatten() for p in members]), members))
    return buckets


@mistake("gradient-buckets", "last-bucket-lost", expect="is in no bucket")
def keeps_full_ones_only(parameters, cap_bytes):
    return _give(_fill(parameters, cap_bytes, last=False))


@mistake("gradient-buckets", "closes-too-early", expect="not before and not after")
def never_over_the_cap(parameters, cap_bytes):
    return _give(_fill(parameters, cap_bytes, before=True))


@mistake("gradient-buckets", "offset-not-advanced", expect="two gradients lie over each other")
def always_from_the_start(parameters, cap_bytes):
    buckets = []
    for members in _fill(parameters, cap_bytes):
        flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype)
        for p in members:
            p.grad = flat[: p.numel()].view(p.shape)
        buckets.append(Bucket(flat, members))
    return buckets


@mistake("gradient-buckets", "frozen-too", expect="is frozen")
def packs_everything(parameters, cap_bytes):
    return _give(_fill(parameters, cap_bytes, frozen=True))


@mistake("gradient-buckets", "parameters-in-the-bucket", expect="does not start at zero")
def flattens_the_weights(parameters, cap_bytes):
    buckets = _give(_fill(parameters, cap_bytes))
    for bucket in buckets:
        for p in bucket.parameters:
            p.grad.copy_(p.detach())
    return buckets


@alternative("gradient-buckets", "by-offset")
def with_offsets(parameters, cap_bytes):
    return _give(_fill(list(parameters), cap_bytes))


@alternative("gradient-buckets", "as-strided")
def sorted_by_dtype(parameters, cap_bytes):
    trainable = [p for p in parameters if p.requires_grad][::-1]
    buckets = []
    for dtype in dict.fromkeys(p.dtype for p in trainable):
        members = []
        for p in [p for p in trainable if p.dtype == dtype]:
            members.append(p)
            if sum(q.nbytes for q in members) >= cap_bytes:
                buckets, members = [*buckets, members], []
        buckets += [members] if members else []
    return _give(sorted(buckets, key=lambda members: sum(q.nbytes for q in members) < cap_bytes))


@mistake("gradient-buckets", "closes-at-each-change-of-dtype", expect="a change of dtype does not close it")
def closes_at_changes(parameters, cap_bytes):
    groups = []
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        last = groups[-1] if groups else []
        full = sum(p.nbytes for p in last) >= cap_bytes
        if not last or full or last[-1].dtype != parameter.dtype:
            groups.append([])
        groups[-1].append(parameter)
    return [_bucket(members) for members in groups]


def _bucket(members):
    flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype)
    for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
        parameter.grad = part.view_as(parameter)
    return Bucket(flat, members)
