"""Spoilers of lab 10, failures: hours that are counted wrongly, ranks that are accused wrongly, and lonely branches."""

import math

import torch

from course.kit.exercises import KnownAnswers
from course.lab10_fault_tolerance import experiments_breaks

# Where the hours go.

goodput = KnownAnswers("goodput")

goodput.mistake(
    "half an interval per failure",
    {'spent["lost"] += worked': 'spent["lost"] += interval_s / 2'},
    says="Half an interval is the average. Each failure comes at its own time and undoes what was done after the "
    "newest save.",
)
goodput.mistake(
    "a save that was cut off counts",
    {'spent["lost"] += worked': 'spent["useful" if fails > now + work else "lost"] += worked'},
    says="A failure during a save was taken for a failure after it: the work before that save is lost, since the save "
    "was not finished.",
)
goodput.mistake(
    "unfinished saves cost nothing",
    {'        spent["saving"] += fails - now - worked\n': ""},
    says="Seconds of a save that a failure has cut short are missing from saving.",
)
goodput.mistake(
    "restarts never fail",
    {'spent["restarting"] += fails - now\n            now, fails = fails, next(upcoming)': "fails = next(upcoming)"},
    says="A failure fell into a restart, and it made no difference. The restart begins anew, and what it took until "
    "then is restarting, too.",
)
goodput.mistake(
    "no save after the last interval",
    {
        "        if now + work + save_s": (
            '        save_s = save_s if spent["useful"] + work < work_s else 0.0\n        if now + work + save_s'
        )
    },
    says="The job ends with a save, also when the last interval is shorter: without it the result is not on the disk.",
)
goodput.mistake(
    "restarts are not counted",
    {'        spent["restarting"] += restart_s\n': ""},
    says="Seconds of restarts pass, and nobody has counted them.",
)
goodput.mistake(
    "the share only",
    {"return spent": 'return spent["useful"] / sum(spent.values())'},
    expect="the exercise asks for a dict",
)


@goodput.alternative("stretch by stretch")
def by_stretches(work_s, interval_s, save_s, restart_s, failures):
    """Each attempt lasts until the next failure that does not fall into its restart."""
    saving = lost = restarting = useful = start = 0.0
    for place, end in enumerate([*failures, math.inf]):
        ready = start if place == 0 else start + restart_s
        if end < ready:
            restarting, start = restarting + end - start, end
            continue
        restarting += ready - start
        while useful < work_s and ready + min(interval_s, work_s - useful) + save_s <= end:
            ready += min(interval_s, work_s - useful) + save_s
            useful, saving = useful + min(interval_s, work_s - useful), saving + save_s
        if useful >= work_s:
            break
        begun = min(interval_s, work_s - useful)
        lost, saving = lost + min(begun, end - ready), saving + max(0.0, end - ready - begun)
        start = end
    return {"useful": useful, "saving": saving, "lost": lost, "restarting": restarting}


# Slow ranks.

straggler = KnownAnswers("straggler")

straggler.mistake(
    "step times",
    {" - step[rank][1]": ""},
    says="Step times are equal on all ranks, as all wait for the slowest. Subtract what each has waited.",
)
straggler.mistake(
    "the rank that waits most",
    {
        "step[rank][0] - step[rank][1]": "step[rank][1]",
        "[rank for rank in ranks if own[rank] > factor * others[rank]]": "[own.index(max(own))]",
    },
    says="The ranks that wait are the fast ones: they wait for the slow one.",
)
straggler.mistake(
    "means",
    {"median(step": "sum(step", "in steps)": "in steps) / len(steps)"},
    says="One step that something held up makes a mean large. A median forgives it.",
)
straggler.mistake(
    "compares with all, itself included",
    {" if other != rank": ""},
    says="A slow rank of two is half of the median that it is compared with. Compare with the other ranks only.",
)
straggler.mistake(
    "compares with the fastest",
    {"median(own": "min(own"},
    says="One fast rank does not make all others slow: compare with what is usual, not with the fastest.",
)
straggler.mistake(
    "always names the slowest",
    {"[rank for rank in ranks if own[rank] > factor * others[rank]]": "[own.index(max(own))]"},
    says="Somebody is always the slowest. Slow is a rank that takes more than factor times what is usual.",
)
straggler.mistake(
    "compares with the mean of the others",
    {"median(own[other] for other in ranks if other != rank)": "(sum(own) - own[rank]) / (len(own) - 1)"},
    says="A second slow rank makes the mean of the others large and hides the first. Their median stays usual.",
)
straggler.mistake(
    "one step only",
    {"in steps)": "in steps[-1:])"},
    says="One step was looked at, and in that step something held a rank up. Take what is usual over all steps.",
)
straggler.mistake(
    "the fastest step",
    {"median(step": "min(step"},
    says="The fastest step of a rank was looked at. A slow rank may have one: take what is usual over all steps.",
)
straggler.mistake(
    "factor as seconds",
    {"factor * others[rank]": "factor"},
    says="`factor` is no number of seconds: it multiplies what is usual among the other ranks.",
)
straggler.mistake(
    "twice, whatever the factor",
    {"factor * others": "2.0 * others"},
    says="The limit is `factor` times what is usual, not twice.",
)


straggler.mistake(
    "three steps in the middle",
    {"for step in steps) for rank in ranks]": "for step in steps[1:4]) for rank in ranks]"},
    expect="held up in a few steps",
)


@straggler.alternative("with tensors")
def with_tensors(steps, factor=2.0):
    own = torch.tensor(steps, dtype=torch.float64)
    own = (own[..., 0] - own[..., 1]).quantile(0.5, dim=0)
    others = [torch.cat([own[:rank], own[rank + 1 :]]).quantile(0.5) for rank in range(len(own))]
    return (own > factor * torch.stack(others)).nonzero().flatten().tolist()


# One branch.

same_branch = KnownAnswers("same-branch")

same_branch.mistake("skips alone", expect="who waits for whom")(experiments_breaks.skip_bad_batch)


@same_branch.mistake(
    "a gradient of zeros instead",
    says="The bad rank gave zeros, so the mean over all ranks is smaller than it should be, and nobody knows. Skip the "
    "step on every rank.",
)
def zeros_instead(loss, gradient, group):
    gradient = gradient if torch.isfinite(loss) else torch.zeros_like(gradient)
    return group.all_reduce(gradient) / group.world_size


@same_branch.mistake(
    "skips its own step after the all-reduce",
    says="Nobody hangs, but the rank with the bad loss skips the step that the others make: from now on replicas have "
    "different weights.",
)
def drifts_apart(loss, gradient, group):
    total = group.all_reduce(gradient) / group.world_size
    return total if torch.isfinite(loss) else None


@same_branch.mistake(
    "looks at the gradient",
    says="Nobody looked at the loss. Here the gradients are finite although a loss is not: decide by the loss of every "
    "rank.",
)
def looks_at_the_gradient(loss, gradient, group):
    total = group.all_reduce(gradient) / group.world_size
    return total if torch.isfinite(total).all() else None


same_branch.mistake("always 3", {"group.world_size": "3"}, expect="4 ranks, all losses are finite: .* another gradient")


@same_branch.mistake("skips only if all are bad", expect="All ranks must skip it")
def only_if_all(loss, gradient, group):
    good = group.all_reduce(torch.isfinite(loss).float().reshape(1))
    total = group.all_reduce(torch.where(torch.isfinite(loss), gradient, 0.0))
    return total / good if good > 0 else None


@same_branch.alternative("the losses of all")
def all_losses(loss, gradient, group):
    losses = group.all_gather(loss.reshape(1))
    total = group.all_reduce(gradient)
    return total / group.world_size if losses.isfinite().all() else None


@same_branch.alternative("the flag travels with the gradient")
def one_message(loss, gradient, group):
    flag = torch.tensor([0.0 if torch.isfinite(loss) else 1.0])
    total = group.all_reduce(torch.cat([gradient, flag]))
    return total[:-1] / group.world_size if total[-1] == 0 else None
