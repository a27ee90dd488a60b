"""Lab 03, data parallel: gradients averaged, packed into buckets, and sent while backward still runs.

Every check trains replicas on real ranks for a few steps (`rank_programs.py`) and asks: does each gradient equal that
of one process on the whole batch, do replicas stay bit-identical, and do the ledger and the order of events show the
mechanism? Overlap and accumulation are in `checks_overlap.py`, what is sent at all in `checks_weights.py`.
"""

import itertools
import random
from collections.abc import Callable

import torch
from torch import nn

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab03_data_parallel import rank_programs
from course.lab03_data_parallel.rank_programs import Bucket, Net, Trained, TrainingCase
from course.shared.trials import run
from minillm.comm import Group
from minillm.predict.training.sharding import bucket_sizes

# What they are held to.


@exercise(
    "naive-ddp",
    minutes=10,
    difficulty=1,
    hints=(
        "What has to be the same on all ranks after the step, so that the weights stay the same? The optimizer makes "
        "the step from parameter.grad.",
        "Go over model.parameters(). Some have no gradient (frozen, or no loss reaches them): .grad is None. "
        "group.all_reduce(x) replaces x by its sum over the ranks.",
    ),
)
def check_average(learner: Callable) -> Receipt:
    case = TrainingCase(steps=3)
    ranks = run(_averaged, case.world_size, learner, case)
    if any(trained.note for trained in ranks):
        raise CheckFailed(
            "your function changed the parameters themselves: reduce the gradients, then the optimizer moves every "
            "replica alike (averaged weights are another algorithm, local SGD, and the gradients stay apart)"
        )
    if not any(trained.calls for trained in ranks):
        rank_programs.all_communicate(ranks)
    rows = rank_programs.right_gradients(case, ranks)
    rank_programs.all_communicate(ranks)
    tensors = sum(gradient is not None for gradient in case.alone()[0][0].values())
    calls = ranks[0].calls["all_reduce"] / case.steps
    rows.append(row("all-reduces per step: one per tensor, or one for all", 1 if calls == 1 else tensors, calls))
    rows.append(rank_programs.byte_row(case, ranks, "each gradient needs to travel once"))
    other = TrainingCase(world_size=random.choice((2, 4, 5, 6)), steps=1)
    rank_programs.right_gradients(other, run(_averaged, other.world_size, learner, other))
    return receipt("naive data parallel on 3 ranks", rows)


def _averaged(group: Group, learner: Callable, case: TrainingCase) -> Trained:
    changed = []

    def step_of(model: Net, step: int) -> None:
        model.zero_grad()
        rank_programs.loss_of(model, *case.data(step, group.rank)).backward()
        before = rank_programs.weights(model)
        learner(model, group)
        changed.extend(name for name, now in rank_programs.weights(model).items() if not torch.equal(now, before[name]))

    trained = rank_programs.train(group, case, step_of)
    trained.note = ", ".join(changed)
    return trained


@exercise(
    "gradient-buckets",
    minutes=20,
    difficulty=3,
    hints=(
        "Two separate jobs: decide which parameters share a bucket, then give each bucket its memory.",
        "Go through the trainable parameters in reverse, keeping one open list per dtype; close a list as soon as its "
        "bytes reach the cap, and all open ones at the end. A bucket's flat tensor has as many zeros as its parameters "
        "have elements, and parameter.grad = (a piece of flat).view_as(parameter).",
    ),
)
def check_buckets(learner: Callable) -> Receipt:
    case = TrainingCase(mixed=True, unused=False, steps=1)  # a float32 step would spread its rounding to all gradients
    size = case.size * case.size * 8  # of a weight matrix
    more = random.randint(1, size // 3)
    caps = {"small": size // 2 + more, "middle": size + size // 3 + more, "large": 100 * size + more}
    model, rows = case.model(), []
    for word, cap in caps.items():
        found = [bucket.parameters for bucket in _look_at(learner, case.model(), cap)]
        expected = sum(len(sizes) for sizes in _bucket_bytes(model, cap))
        rows.append(row(f"buckets, {word} cap of {cap:,} B", expected, len(found)))
    _look_at(learner, Alternating(case.size), 2 * size)  # two matrices of a dtype fill a bucket
    _on_their_device(learner, case.model().to("meta"), size)
    ranks = run(_bucketed, case.world_size, learner, case, caps["middle"])
    if not any(trained.calls for trained in ranks):
        raise CheckFailed("there is no bucket to reduce")
    rows += rank_programs.right_gradients(case, ranks)
    rows.append(row("all-reduces per step", rows[1].predicted, ranks[0].calls["all_reduce"] / case.steps))
    rows.append(rank_programs.byte_row(case, ranks, "a bucket's flat tensor is as large as its gradients together"))
    return receipt("gradients packed into flat buckets", rows)


def _look_at(learner: Callable, model: nn.Module, cap: int) -> list[Bucket]:
    """The learner's buckets for one cap; CheckFailed if they are not what was asked for."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    found = learner(model.parameters(), cap)
    if not isinstance(found, list | tuple) or not all(isinstance(bucket, Bucket) for bucket in found):
        raise CheckFailed("the exercise asks for a list of Bucket(flat, parameters)")
    packed = [named[p] for bucket in found for p in bucket.parameters]
    trainable = [name for p, name in named.items() if p.requires_grad]
    if extra := [name for name in packed if name not in trainable]:
        raise CheckFailed(f"{extra[0]} is frozen (requires_grad is False): it never gets a gradient, leave it out")
    if lost := [name for name in trainable if name not in packed]:
        raise CheckFailed(f"{lost[-1]} is in no bucket (cap {cap:,} B): are the buckets that never fill up kept?")
    if len(packed) != len(set(packed)):
        raise CheckFailed("a parameter is in two buckets")
    for index, bucket in enumerate(found):
        who = f"bucket {index} (cap {cap:,} B)"
        if len({p.dtype for p in bucket.parameters}) > 1:
            raise CheckFailed(f"{who} mixes dtypes: one flat tensor has one dtype, so keep a bucket open for each")
        if bucket.flat.count_nonzero():
            raise CheckFailed(f"{who} does not start at zero: backward adds to what .grad holds")
        _views_of(bucket, who, named)
    orders = [[named[p] for bucket in found for p in bucket.parameters if p.dtype == torch.float64]]
    orders.append([name for p, name in reversed(named.items()) if name in trainable and p.dtype == torch.float64])
    if orders[0] != orders[1]:
        raise CheckFailed(
            f"the buckets begin with {orders[0][0]}, but backward reaches {orders[1][0]} first: pack the last "
            "parameter first, or the first bucket is complete only when backward is over"
        )
    closed, unfilled = _bucket_bytes(model, cap)
    sizes = [sum(p.nbytes for p in bucket.parameters) for bucket in found]
    sizes[len(closed) :] = sorted(sizes[len(closed) :])  # those that never fill up may come in any order
    for index, (mine, theirs) in enumerate(zip(sizes, closed + sorted(unfilled), strict=False)):
        if mine != theirs:
            raise CheckFailed(
                f"bucket {index} holds {mine:,} B where {theirs:,} B are expected for a cap of {cap:,} B: close a "
                "bucket with the tensor that fills it to the cap, not before and not after (a change of dtype does not "
                "close it: keep one open for each)"
            )
    return found


def _on_their_device(learner: Callable, model: nn.Module, cap: int) -> None:
    """CheckFailed unless flat tensors are made where the parameters are."""
    try:
        devices = {bucket.flat.device for bucket in learner(model.parameters(), cap)}
    except RuntimeError as error:
        raise CheckFailed(f"with parameters on another device than the CPU: {error}") from None
    if devices != {torch.device("meta")}:
        raise CheckFailed("flat is on the CPU although its parameters are not: make it with device=parameter.device")


def _bucket_bytes(model: nn.Module, cap: int) -> tuple[list[int], list[int]]:
    """Bytes of the buckets that close, in that order, and of those that never fill up: by the closed form for each
    dtype."""
    order = [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]
    closed, unfilled = {}, []
    for dtype in dict.fromkeys(parameter.dtype for parameter in order):
        places = [place for place, parameter in enumerate(order) if parameter.dtype == dtype]
        so_far = list(itertools.accumulate(order[place].nbytes for place in places))
        sizes = bucket_sizes([order[place].nbytes for place in places], cap)
        for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
            if size >= cap:
                closed[places[so_far.index(end)]] = size
            else:
                unfilled.append(size)
    return [closed[place] for place in sorted(closed)], unfilled


class Alternating(nn.Module):
    """Matrices of two dtypes in turn, as when norms stay in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        dtypes = (torch.float64, torch.float32) * 4
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size, size, dtype=dtype)) for dtype in dtypes)


def _views_of(bucket: Bucket, who: str, named: dict[nn.Parameter, str]) -> None:
    """CheckFailed unless the gradients of a bucket are views that tile its flat tensor."""
    covered = torch.zeros(bucket.flat.numel(), dtype=torch.int64)
    for parameter in bucket.parameters:
        grad = parameter.grad
        if grad is None:
            raise CheckFailed(f"{who}: {named[parameter]}.grad is None; make it a view of flat")
        if grad.untyped_storage().data_ptr() != bucket.flat.untyped_storage().data_ptr():
            raise CheckFailed(f"{who}: {named[parameter]}.grad is a copy, not a view: what backward adds never gets in")
        start = grad.storage_offset() - bucket.flat.storage_offset()
        covered[start : start + grad.numel()] += 1
    if covered.max() > 1:
        raise CheckFailed(f"{who}: two gradients lie over each other: advance by numel (elements, not bytes or rows)")
    if covered.min() < 1:
        raise CheckFailed(
            f"{who}: flat has {bucket.flat.numel()} elements, its gradients use {int(covered.count_nonzero())} of them"
        )


def _bucketed(group: Group, learner: Callable, case: TrainingCase, cap: int) -> Trained:
    buckets: list[Bucket] = []

    def step_of(model: Net, step: int) -> None:
        if not buckets:
            buckets.extend(learner(model.parameters(), cap))
        for bucket in buckets:
            bucket.flat.zero_()
        rank_programs.loss_of(model, *case.data(step, group.rank)).backward()
        for bucket in buckets:
            group.all_reduce(bucket.flat, op="avg")

    return rank_programs.train(group, case, step_of)
