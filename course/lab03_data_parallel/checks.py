"""Lab 03, data parallel: gradients averaged, packed into buckets, and sent while backward still runs.

Every check trains replicas on real ranks for a few steps (`rank_programs.py`) and asks: does each gradient equal that
of one process on the whole batch, do replicas stay bit-identical, and do the ledger and the order of events show the
mechanism? Overlap and accumulation are in `checks_overlap.py`, what is sent at all in `checks_weights.py`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab03_data_parallel import rank_programs
from course.lab03_data_parallel.rank_programs import Bucket, Net, Trained, TrainingCase
from course.shared.trials import run
from minillm.comm import Group, MismatchError
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
    _judge_two_models(learner)
    return receipt("naive data parallel on 3 ranks", rows)


def _judge_two_models(learner: Callable) -> None:
    """CheckFailed unless two models in turn come out right: of two dtypes, with a weight whose memory is not contiguous
    and a gradient that is zero on rank 1."""
    worlds = 2, 4, 6  # rings of them cut every tensor evenly
    case = TrainingCase(random.choice(worlds), steps=1, mixed=True, strided=True, idle=(1,))
    cases = replace(case, seed=case.seed + 1), case
    first, second = zip(*run(_averaged_in_turn, case.world_size, learner, cases), strict=True)
    rank_programs.right_gradients(cases[0], first)
    if first[0].calls["all_reduce"] > 1:  # all gradients joined in one tensor have one dtype
        rank_programs.byte_row(cases[0], first, "each gradient needs to travel once, in its own dtype")
    try:
        rank_programs.right_gradients(case, second)
    except CheckFailed as failure:
        raise CheckFailed(
            f"right for the first model of a process, but for the second one {failure}. Is something kept from the "
            "first call?"
        ) from None


def _averaged_in_turn(group: Group, learner: Callable, cases: Sequence[TrainingCase]) -> list[Trained]:
    try:
        return [_averaged(group, learner, case) for case in cases]
    except MismatchError as error:
        raise CheckFailed(
            f"{error}. Does every gradient take part? Only None is left out; rank 1's gradient of first.weight is "
            "exactly zero here"
        ) from None


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
        found = _look_at(learner, case.model(), cap)
        expected = sum(len(buckets) for buckets in _expected(model, cap).values())
        rows.append(row(f"buckets, {word} cap of {cap:,} B", expected, len(found)))
    square = (case.size, case.size)
    _look_at(learner, Alternating(4, (square, torch.float64), (square, torch.float32)), 2 * size)
    # Both dtypes have buckets that fill up and one that does not; a float32 one is open while bfloat16 ones close.
    _look_at(learner, Alternating(11, ((12, 12), torch.bfloat16), ((18,), torch.float32)), 576)
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
    if any(p not in named for bucket in found for p in bucket.parameters):
        raise CheckFailed(
            "a bucket holds a parameter that was not handed in: is something left over from an earlier call?"
        )
    packed = [named[p] for bucket in found for p in bucket.parameters]
    trainable = [name for p, name in named.items() if p.requires_grad]
    if extra := [name for name in packed if name not in trainable]:
        raise CheckFailed(f"{extra[0]} is frozen (requires_grad is False): it never gets a gradient, leave it out")
    if lost := [name for name in trainable if name not in packed]:
        dtype = dict(model.named_parameters())[lost[-1]].dtype
        raise CheckFailed(
            f"{lost[-1]}, {dtype}, is in no bucket (cap {cap:,} B): are the buckets of every dtype kept, and those "
            "that never fill up?"
        )
    if len(packed) != len(set(packed)):
        raise CheckFailed("a parameter is in two buckets")
    for index, bucket in enumerate(found):
        who = f"bucket {index} (cap {cap:,} B)"
        if len({p.dtype for p in bucket.parameters}) > 1:
            raise CheckFailed(f"{who} mixes dtypes: one flat tensor has one dtype, so keep a bucket open for each")
        if not bucket.parameters:
            raise CheckFailed(f"{who} holds no parameter")
        if bucket.flat.dim() != 1:
            raise CheckFailed(f"{who}: flat is {list(bucket.flat.shape)}; the exercise asks for one dimension, [numel]")
        if bucket.flat.requires_grad:
            raise CheckFailed(f"{who}: flat hangs on a graph (requires_grad is True): make it of zeros, not of weights")
        if bucket.flat.count_nonzero():
            raise CheckFailed(f"{who} does not start at zero: backward adds to what .grad holds")
        _views_of(bucket, who, named)
    for dtype, expected in _expected(model, cap).items():
        mine = [[named[p] for p in bucket.parameters] for bucket in found if bucket.parameters[0].dtype == dtype]
        _same_buckets(mine, expected, {name: p.nbytes for p, name in named.items()}, cap)
    full = [sum(p.nbytes for p in bucket.parameters) >= cap for bucket in found]
    if full != sorted(full, reverse=True):
        raise CheckFailed(
            f"bucket {full.index(False)} (cap {cap:,} B) never fills up and comes before one that does: it is complete "
            "only when backward is over, and what comes later in the list waits for it"
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


def _same_buckets(mine: list[list[str]], expected: list[list[str]], nbytes: dict[str, int], cap: int) -> None:
    """CheckFailed unless one dtype's buckets hold the same parameters (names), in the same order."""
    both = ([name for names in buckets for name in names] for buckets in (mine, expected))
    for found, right in zip(*both, strict=True):
        if found != right:
            raise CheckFailed(
                f"{found} is packed where {right} is expected, which backward reaches first: pack the last "
                "parameter first, or the first bucket is complete only when backward is over"
            )
    for found, right in zip(mine, expected, strict=False):
        if found != right:
            held, due = (sum(nbytes[name] for name in names) for names in (found, right))
            raise CheckFailed(
                f"the bucket that begins with {right[0]} holds {held:,} B where {due:,} B are expected for a cap of "
                f"{cap:,} B: close a bucket with the tensor that fills it to the cap, not before and not after (a "
                "change of dtype does not close it: keep one open for each)"
            )


def _expected(model: nn.Module, cap: int) -> dict[torch.dtype, list[list[str]]]:
    """Names of the parameters in each dtype's buckets, whose sizes are those of the closed form."""
    order = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad][::-1]
    found = {}
    for dtype in dict.fromkeys(parameter.dtype for _, parameter in order):
        left = [(name, parameter.nbytes) for name, parameter in order if parameter.dtype == dtype]
        found[dtype] = []
        for size in bucket_sizes([nbytes for _, nbytes in left], cap):
            names = []
            while size > 0:
                name, nbytes = left.pop(0)
                names.append(name)
                size -= nbytes
            found[dtype].append(names)
    return found


class Alternating(nn.Module):
    """Weights of several (shape, dtype) in turn, `times` times, as when norms stay in float32."""

    def __init__(self, times: int, *kinds: tuple[Sequence[int], torch.dtype]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in kinds * times)


def _views_of(bucket: Bucket, who: str, named: dict[nn.Parameter, str]) -> None:
    """CheckFailed unless the gradients of a bucket are views that tile its flat tensor."""
    covered = torch.zeros(bucket.flat.numel(), dtype=torch.int64)
    for parameter in bucket.parameters:
        grad = parameter.grad
        if grad is None:
            raise CheckFailed(f"{who}: {named[parameter]}.grad is None; make it a view of flat")
        if grad.untyped_storage().data_ptr() != bucket.flat.untyped_storage().data_ptr():
            raise CheckFailed(f"{who}: {named[parameter]}.grad is a copy, not a view: what backward adds never gets in")
        if grad.stride() != parameter.stride():
            raise CheckFailed(f"{who}: {named[parameter]}.grad lies in memory in another order than its parameter")
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
