"""Spoilers of lab 03: wrong ways to average and pack gradients, and right ones that look different."""

import torch

from course.kit.exercises import alternative, mistake
from course.lab03_data_parallel.rank_programs import Bucket

# Naive data parallel

mistake(
    "naive-ddp",
    "no-division",
    {"parameter.grad /= group.world_size": ""},
    expect="it is the sum|is the sum over the ranks, 3 times their mean: divide",
)


@mistake("naive-ddp", "reduces-parameters", expect="changed the parameters themselves: reduce the gradients")
def averages_the_weights(model, group):
    with torch.no_grad():
        for parameter in model.parameters():
            group.all_reduce(parameter, op="avg")


mistake(
    "naive-ddp",
    "only-matrices",
    {"is not None": "is not None and parameter.dim() > 1"},
    expect=r"gradient of gain is this rank's own",
)
mistake(
    "naive-ddp",
    "divides-twice",
    {"/= group.world_size": "/= group.world_size**2"},
    expect="divided by 3 once more: divide only once",
)
mistake(
    "naive-ddp",
    "rank-0-decides",
    {"group.all_reduce(parameter.grad)": "group.broadcast(parameter.grad)", "parameter.grad /= group.world_size": ""},
    expect="is rank 0's, not the mean of all",
)
mistake(
    "naive-ddp",
    "zeros-for-none",
    {
        "if parameter.grad is not None:": (
            "if parameter.grad is None:\n            parameter.grad = torch.zeros_like(parameter)\n        if True:"
        )
    },
    expect=r"times as many: each gradient|should be None, since no loss reaches it",
)
mistake(
    "naive-ddp",
    "torch-distributed",
    {"group.all_reduce(parameter.grad)": "torch.distributed.all_reduce(parameter.grad, group=group.process_group)"},
    expect="ledger saw no communication",
)
mistake(
    "naive-ddp",
    "gathers-everything",
    {"group.all_reduce(parameter.grad)": "parameter.grad.copy_(group.all_gather(parameter.grad[None]).sum(0))"},
    expect="you used all_gather",
)
alternative(
    "naive-ddp",
    "average-by-op",
    {"(parameter.grad)": '(parameter.grad, op="avg")', "parameter.grad /= group.world_size": ""},
)


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


mistake(
    "naive-ddp",
    "float32-on-the-wire",
    {"group.all_reduce(parameter.grad)": "parameter.grad.copy_(group.all_reduce(parameter.grad.float()))"},
    expect="is right to float32's digits only",
)
mistake(
    "naive-ddp", "always-3", {"group.world_size": "3"}, expect="step 1, rank .* is .* times the mean over the ranks"
)
mistake("naive-ddp", "divides-by-4", {"group.world_size": "4"}, expect="is 0.75 times the mean over the ranks")
mistake(
    "naive-ddp",
    "remembers-the-first-model",
    {
        "def average_gradients(model, group):": "found = []\n\n\ndef average_gradients(model, group):",
        "    for parameter in model.parameters():": (
            "    if not found:\n        found.extend(model.parameters())\n    for parameter in found:"
        ),
    },
    expect="for the second one .* kept from the first call",
)
mistake(
    "naive-ddp",
    "reduces-a-copy",
    {
        "group.all_reduce(parameter.grad)": 'group.all_reduce(parameter.grad.flatten(), op="avg")',
        "parameter.grad /= group.world_size": "",
    },
    expect="not contiguous, so flatten and reshape copy it",
)
mistake(
    "naive-ddp",
    "skips-zeros",
    {"is not None": "is not None and parameter.grad.any()"},
    expect="Only None is left out",
)
mistake(
    "naive-ddp",
    "float64-on-the-wire",
    {"group.all_reduce(parameter.grad)": "parameter.grad.copy_(group.all_reduce(parameter.grad.double()))"},
    expect="in its own dtype",
)


# Buckets


mistake(
    "gradient-buckets",
    "first-parameter-first",
    {"reversed([p for p in parameters if p.requires_grad])": "[p for p in parameters if p.requires_grad]"},
    expect="pack the last parameter first",
)
mistake(
    "gradient-buckets",
    "copies-not-views",
    {"part.view_as(parameter)": "part.view_as(parameter).clone()"},
    expect="is a copy, not a view",
)
mistake(
    "gradient-buckets",
    "on-the-cpu",
    {
        "members[0].new_zeros(sum(p.numel() for p in members))": (
            "torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype)"
        )
    },
    expect="on another device|device=parameter.device",
)
mistake("gradient-buckets", "last-bucket-lost", {"[*closed, *filling.values()]": "closed"}, expect="is in no bucket")
mistake(
    "gradient-buckets",
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
mistake(
    "gradient-buckets",
    "offset-not-advanced",
    {"part.view_as(parameter)": "flat[: parameter.numel()].view_as(parameter)"},
    expect="two gradients lie over each other",
)
mistake(
    "gradient-buckets",
    "frozen-too",
    {"[p for p in parameters if p.requires_grad]": "list(parameters)"},
    expect="is frozen",
)
mistake(
    "gradient-buckets",
    "parameters-in-the-bucket",
    {"parameter.grad = part.view_as(parameter)": "parameter.grad = part.view_as(parameter).copy_(parameter.detach())"},
    expect="does not start at zero",
)
mistake(
    "gradient-buckets",
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
mistake(
    "gradient-buckets",
    "dtype-by-dtype",
    {"[*closed, *filling.values()]": "sorted([*closed, *filling.values()], key=lambda members: str(members[0].dtype))"},
    expect="never fills up and comes before one that does",
)
mistake(
    "gradient-buckets",
    "two-dtypes-only",
    {"if p.requires_grad": "if p.requires_grad and p.dtype in (torch.float32, torch.float64)"},
    expect="torch.bfloat16, is in no bucket",
)
mistake(
    "gradient-buckets",
    "left-over-from-the-first-call",
    {"(parameters, cap_bytes)": "(parameters, cap_bytes, buckets=[])", "    buckets = []\n": ""},
    expect="left over from an earlier call",
)
mistake(
    "gradient-buckets",
    "two-dimensions",
    {"Bucket(flat, members)": "Bucket(flat[None], members)"},
    expect="one dimension",
)
mistake(
    "gradient-buckets",
    "made-of-weights",
    {"members[0].new_zeros(sum(p.numel() for p in members))": "0 * torch.cat([p.flatten() for p in members])"},
    expect="flat hangs on a graph",
)
mistake(
    "gradient-buckets",
    "transposed",
    {"part.view_as(parameter)": "part.view(parameter.shape[::-1]).permute(*range(parameter.dim())[::-1])"},
    expect="in another order than its parameter",
)


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
    full_first = sorted(buckets, key=lambda members: sum(q.nbytes for q in members) < cap_bytes)
    return [_bucket(members) for members in full_first]


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
    flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
    for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
        parameter.grad = part.view_as(parameter)
    return Bucket(flat, members)
