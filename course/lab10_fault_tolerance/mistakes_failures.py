"""Spoilers of lab 10, failures: hours that are counted wrongly, ranks that are accused wrongly, and lonely branches."""

import math
from statistics import mean, median

import torch

from course.kit.exercises import alternative, mistake
from course.lab10_fault_tolerance import experiments_breaks as breaks

# Where the hours go.


def _play(
    work_s, interval_s, save_s, restart_s, failures, *, half=False, unfinished=True, again=True, keeps=False, cost=True,
    last=True,
):  # fmt: skip
    """The reference with rules to leave out."""
    spent = dict.fromkeys(("useful", "saving", "lost", "restarting"), 0.0)
    upcoming = iter([*failures, math.inf])
    fails, now = next(upcoming), 0.0
    while spent["useful"] < work_s:
        work = min(interval_s, work_s - spent["useful"])
        save = save_s if last or spent["useful"] + work < work_s else 0.0
        if now + work + save <= fails:
            now += work + save
            spent["useful"] += work
            spent["saving"] += save
            continue
        worked = min(work, fails - now)
        in_the_save = fails - now - worked
        if keeps and in_the_save > 0:
            spent["useful"] += worked
        else:
            spent["lost"] += interval_s / 2 if half else worked
        spent["saving"] += in_the_save if unfinished else 0.0
        now, fails = fails, next(upcoming)
        while again and fails < now + restart_s:
            spent["restarting"] += fails - now
            now, fails = fails, next(upcoming)
        while not again and fails < now + restart_s:
            fails = next(upcoming)
        spent["restarting"] += restart_s if cost else 0.0
        now += restart_s
    return spent


@mistake(
    "goodput",
    "half an interval per failure",
    says="Half an interval is the average. Each failure comes at its own time and undoes what was done after the "
    "newest save.",
)
def half_an_interval(*given):
    return _play(*given, half=True)


@mistake(
    "goodput",
    "a save that was cut off counts",
    says="A failure during a save was taken for a failure after it: the work before that save is lost, since the save "
    "was not finished.",
)
def cut_off_counts(*given):
    return _play(*given, keeps=True)


@mistake(
    "goodput",
    "unfinished saves cost nothing",
    says="Seconds of a save that a failure has cut short are missing from saving.",
)
def free_saves(*given):
    return _play(*given, unfinished=False)


@mistake(
    "goodput",
    "restarts never fail",
    says="A failure fell into a restart, and it made no difference. The restart begins anew, and what it took until "
    "then is restarting, too.",
)
def sure_restarts(*given):
    return _play(*given, again=False)


@mistake(
    "goodput",
    "no save after the last interval",
    says="The job ends with a save, also when the last interval is shorter: without it the result is not on the disk.",
)
def no_last_save(*given):
    return _play(*given, last=False)


@mistake("goodput", "restarts are not counted", says="Seconds of restarts pass, and nobody has counted them.")
def uncounted(*given):
    return _play(*given, cost=False)


@mistake("goodput", "the share only", expect="the exercise asks for a dict")
def share_only(*given):
    spent = _play(*given)
    return spent["useful"] / sum(spent.values())


@alternative("goodput", "stretch by stretch")
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


def _slow(steps, factor, *, of=lambda total, waited: total - waited, usual=median, others=True, theirs=median):
    ranks = range(len(steps[0]))
    own = [usual(of(*step[rank]) for step in steps) for rank in ranks]
    peers = {rank: [own[other] for other in ranks if other != rank or not others] for rank in ranks}
    return [rank for rank in ranks if own[rank] > factor * theirs(peers[rank])]


@mistake(
    "straggler",
    "step times",
    says="Step times are equal on all ranks, as all wait for the slowest. Subtract what each has waited.",
)
def step_times(steps, factor=2.0):
    return _slow(steps, factor, of=lambda total, waited: total)


@mistake(
    "straggler",
    "the rank that waits most",
    says="The ranks that wait are the fast ones: they wait for the slow one.",
)
def waits_most(steps, factor=2.0):
    waited = [median(step[rank][1] for step in steps) for rank in range(len(steps[0]))]
    return [waited.index(max(waited))]


@mistake(
    "straggler",
    "means",
    says="One step that something held up makes a mean large. A median forgives it.",
)
def by_means(steps, factor=2.0):
    return _slow(steps, factor, usual=mean)


@mistake(
    "straggler",
    "compares with all, itself included",
    says="A slow rank of two is half of the median that it is compared with. Compare with the other ranks only.",
)
def itself_included(steps, factor=2.0):
    return _slow(steps, factor, others=False)


@mistake(
    "straggler",
    "compares with the fastest",
    says="One fast rank does not make all others slow: compare with what is usual, not with the fastest.",
)
def with_the_fastest(steps, factor=2.0):
    return _slow(steps, factor, theirs=min)


@mistake(
    "straggler",
    "always names the slowest",
    says="Somebody is always the slowest. Slow is a rank that takes more than factor times what is usual.",
)
def always_one(steps, factor=2.0):
    own = [median(step[rank][0] - step[rank][1] for step in steps) for rank in range(len(steps[0]))]
    return [own.index(max(own))]


@mistake(
    "straggler",
    "compares with the mean of the others",
    says="A second slow rank makes the mean of the others large and hides the first. Their median stays usual.",
)
def mean_of_others(steps, factor=2.0):
    return _slow(steps, factor, theirs=mean)


@mistake(
    "straggler",
    "one step only",
    says="One step was looked at, and in that step something held a rank up. Take what is usual over all steps.",
)
def one_step(steps, factor=2.0):
    return _slow(steps[-1:], factor)


@mistake(
    "straggler",
    "the fastest step",
    says="The fastest step of a rank was looked at. A slow rank may have one: take what is usual over all steps.",
)
def fastest_step(steps, factor=2.0):
    return _slow(steps, factor, usual=min)


@mistake("straggler", "twice, whatever the factor", says="The limit is `factor` times what is usual, not twice.")
def always_twice(steps, factor=2.0):
    return _slow(steps, 2.0)


@alternative("straggler", "with tensors")
def with_tensors(steps, factor=2.0):
    own = torch.tensor(steps, dtype=torch.float64)
    own = (own[..., 0] - own[..., 1]).quantile(0.5, dim=0)
    others = [torch.cat([own[:rank], own[rank + 1 :]]).quantile(0.5) for rank in range(len(own))]
    return (own > factor * torch.stack(others)).nonzero().flatten().tolist()


# One branch.


mistake("same-branch", "skips alone", expect="who waits for whom")(breaks.skip_bad_batch)


@mistake(
    "same-branch",
    "a gradient of zeros instead",
    says="The bad rank gave zeros, so the mean over all ranks is smaller than it should be, and nobody knows. Skip the "
    "step on every rank.",
)
def zeros_instead(loss, gradient, group):
    gradient = gradient if torch.isfinite(loss) else torch.zeros_like(gradient)
    return group.all_reduce(gradient) / group.world_size


@mistake(
    "same-branch",
    "skips its own step after the all-reduce",
    says="Nobody hangs, but the rank with the bad loss skips the step that the others make: from now on replicas have "
    "different weights.",
)
def drifts_apart(loss, gradient, group):
    total = group.all_reduce(gradient) / group.world_size
    return total if torch.isfinite(loss) else None


@mistake(
    "same-branch",
    "looks at the gradient",
    says="Nobody looked at the loss. Here the gradients are finite although a loss is not: decide by the loss of every "
    "rank.",
)
def looks_at_the_gradient(loss, gradient, group):
    total = group.all_reduce(gradient) / group.world_size
    return total if torch.isfinite(total).all() else None


@mistake("same-branch", "skips only if all are bad", expect="All ranks must skip it")
def only_if_all(loss, gradient, group):
    good = group.all_reduce(torch.isfinite(loss).float().reshape(1))
    total = group.all_reduce(torch.where(torch.isfinite(loss), gradient, 0.0))
    return total / good if good > 0 else None


@alternative("same-branch", "the losses of all")
def all_losses(loss, gradient, group):
    losses = group.all_gather(loss.reshape(1))
    total = group.all_reduce(gradient)
    return total / group.world_size if losses.isfinite().all() else None


@alternative("same-branch", "the flag travels with the gradient")
def one_message(loss, gradient, group):
    flag = torch.tensor([0.0 if torch.isfinite(loss) else 1.0])
    total = group.all_reduce(torch.cat([gradient, flag]))
    return total[:-1] / group.world_size if total[-1] == 0 else None
