"""Spoilers of lab 03: wrong ways to average and pack gradients, and right ones that look different."""

import torch

from course.kit.exercises import KnownAnswers
from course.lab03_data_parallel.rank_programs import Bucket

# Naive data parallel

naive_ddp = KnownAnswers("naive-ddp")

naive_ddp.mistake(
    "no-division",
    {"parameter.grad /= group.world_size": ""},
    expect="it is the sum|is the sum over the ranks, 3 times their mean: divide",
)


@naive_ddp.mistake("reduces-parameters", expect="changed the parameters themselves: reduce the gradients")
def averages_the_weights(model, group):
    with torch.no_grad():
        for parameter in model.parameters():
            group.all_reduce(parameter, op="avg")


naive_ddp.mistake(
    "only-matrices",
    {"is not None": "is not None and parameter.dim() > 1"},
    expect=r"gradient of gain is this rank's own",
)
naive_ddp.mistake(
    "divides-twice",
    {"/= group.world_size": "/= group.world_size**2"},
    expect="divided by 3 once more: divide only once",
)
naive_ddp.mistake(
    "rank-0-decides",
    {"group.all_reduce(parameter.grad)": "group.broadcast(parameter.grad)", "parameter.grad /= group.world_size": ""},
    expect="is rank 0's, not the mean of all",
)
naive_ddp.mistake(
    "zeros-for-none",
    {
        "if parameter.grad is not None:": (
            "if parameter.grad is None:\n            parameter.grad = torch.zeros_like(parameter)\n        if True:"
        )
    },
    expect=r"times as many: each gradient|should be None, since no loss reaches it",
)
naive_ddp.mistake(
    "torch-distributed",
    {"group.all_reduce(parameter.grad)": "torch.distributed.all_reduce(parameter.grad, group=group.process_group)"},
    expect="ledger saw no communication",
)
naive_ddp.mistake(
    "gathers-everything",
    {"group.all_reduce(parameter.grad)": "parameter.grad.copy_(group.all_gather(parameter.grad[None]).sum(0))"},
    expect="you used all_gather",
)
naive_ddp.alternative(
    "average-by-op", {"(parameter.grad)": '(parameter.grad, op="avg")', "parameter.grad /= group.world_size": ""}
)


@naive_ddp.alternative("handles")
def all_at_once(model, group):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        gradient.div_(group.world_size)
    for handle in [group.all_reduce(gradient, async_op=True) for gradient in gradients]:
        handle.wait()


@naive_ddp.alternative("one for all")
def joins_them(model, group):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = group.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), op="avg")
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


naive_ddp.mistake(
    "float32-on-the-wire",
    {"group.all_reduce(parameter.grad)": "parameter.grad.copy_(group.all_reduce(parameter.grad.float()))"},
    expect="is right to float32's digits only",
)
naive_ddp.mistake("always-3", {"group.world_size": "3"}, expect="step 1, rank .* is .* times the mean over the ranks")
naive_ddp.mistake("divides-by-4", {"group.world_size": "4"}, expect="is 0.75 times the mean over the ranks")
naive_ddp.mistake(
    "remembers-the-first-model",
    {
        "def average_gradients(model, group):": "found = []\n\n\ndef average_gradients(model, group):",
        "    for parameter in model.parameters():": (
            "    if not found:\n        found.extend(model.parameters())\n    for parameter in found:"
        ),
    },
    expect="for the second one .* kept from the first call",
)
naive_ddp.mistake(
    "reduces-a-copy",
    {
        "group.all_reduce(parameter.grad)": 'group.all_reduce(parameter.grad.flatten(), op="avg")',
        "parameter.grad /= group.world_size": "",
    },
    expect="not contiguous, so flatten and reshape copy it",
)
naive_ddp.mistake(
    "skips-zeros", {"is not None": "is not None and parameter.grad.any()"}, expect="Only None is left out"
)
naive_ddp.mistake(
    "float64-on-the-wire",
    {"group.all_reduce(parameter.grad)": "parameter.grad.copy_(group.all_reduce(parameter.grad.double()))"},
    expect="in its own dtype",
)


# Buckets

gradient_buckets = KnownAnswers("gradient-buckets")

gradient_buckets.mistake(
    "first-parameter-first",
    {"reversed([p for p in parameters if p.requires_grad])": "[p for p in parameters if p.requires_grad]"},
    expect="pack the last parameter first",
)
gradient_buckets.mistake(
    "copies-not-views", {"part.view_as(parameter)": "part.view_as(parameter).clone()"}, expect="is a copy, not a view"
)
gradient_buckets.mistake(
    "on-the-cpu",
    {
        "members[0].new_zeros(sum(p.numel() for p in members))": (
            "torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype)"
        )
    },
    expect="on another device|device=parameter.device",
)
gradient_buckets.mistake("last-bucket-lost", {"[*closed, *filling.values()]": "closed"}, expect="is in no bucket")
gradient_buckets.mistake(
    "closes-too-early",
    {
        (
            "filling.setdefault(parameter.dtype, []).append(parameter)\n"
            "        if sum(p.nbytes for p in filling[parameter.dtype]) >= cap_bytes:\n"
            "            closed.append(filling.pop(parameter.dtype))"
        ): (
            "members = filling.setdefault(parameter.dtype, [])\n"
            "        if members and sum(p.nbytes for p in members) + parameter.nbytes > "
            "cap_bytes:\n"
            "            closed.append(filling.pop(parameter.dtype))\n"
            "        filling.setdefault(parameter.dtype, []).append(parameter)"
        )
    },
    expect="not before and not after",
)
gradient_buckets.mistake(
    "offset-not-advanced",
    {"part.view_as(parameter)": "flat[: parameter.numel()].view_as(parameter)"},
    expect="two gradients lie over each other",
)
gradient_buckets.mistake(
    "frozen-too", {"[p for p in parameters if p.requires_grad]": "list(parameters)"}, expect="is frozen"
)
gradient_buckets.mistake(
    "parameters-in-the-bucket",
    {
        "parameter.grad = part.view_as(parameter)": (
            "parameter.grad = part.view_as(parameter).copy_(parameter.detach())"
        )
    },
    expect="does not start at zero",
)
gradient_buckets.mistake(
    "in-order-of-opening",
    {
        "filling.setdefault(parameter.dtype, []).append(parameter)": (
            "if parameter.dtype not in filling:\n            closed.append(filling.setdefault(parameter.dtype, []))\n"
            "        filling[parameter.dtype].append(parameter)"
        ),
        "closed.append(filling.pop(parameter.dtype))": "filling.pop(parameter.dtype)",
        "[*closed, *filling.values()]": "closed",
    },
    expect="never fills up and comes before one that does",
)
gradient_buckets.mistake(
    "dtype-by-dtype",
    {
        "[*closed, *filling.values()]": (
            "sorted([*closed, *filling.values()], key=lambda members: str(members[0].dtype))"
        )
    },
    expect="never fills up and comes before one that does",
)
gradient_buckets.mistake(
    "two-dtypes-only",
    {"if p.requires_grad": "if p.requires_grad and p.dtype in (torch.float32, torch.float64)"},
    expect="torch.bfloat16, is in no bucket",
)
gradient_buckets.mistake(
    "left-over-from-the-first-call",
    {"(parameters, cap_bytes)": "(parameters, cap_bytes, buckets=[])", "    buckets = []\n": ""},
    expect="left over from an earlier call",
)
gradient_buckets.mistake(
    "two-dimensions", {"Bucket(flat, members)": "Bucket(flat[None], members)"}, expect="one dimension"
)
gradient_buckets.mistake(
    "made-of-weights",
    {"members[0].new_zeros(sum(p.numel() for p in members))": "0 * torch.cat([p.flatten() for p in members])"},
    expect="flat hangs on a graph",
)
gradient_buckets.mistake(
    "transposed",
    {"part.view_as(parameter)": "part.view(parameter.shape[::-1]).permute(*range(parameter.dim())[::-1])"},
    expect="in another order than its parameter",
)


@gradient_buckets.alternative("as-strided")
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
    full_first = sorted(buckets, key=lambda members: sum(q.nbytes for q in members) < cap_bytes)
    return [_bucket(members) for members in full_first]


@gradient_buckets.mistake("closes-at-each-change-of-dtype", expect="a change of dtype does not close it")
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
    flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
    for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
        parameter.grad = part.view_as(parameter)
    return Bucket(flat, members)
