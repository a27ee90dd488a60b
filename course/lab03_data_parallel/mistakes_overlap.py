"""Spoilers of lab 03: wrong ways to overlap and to accumulate, and right ones that look different."""

import contextlib

import torch

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("03_data_parallel")

# Overlap


def _watch(buckets, arrived):
    for index, bucket in enumerate(buckets):
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))


@mistake("overlap-hooks", "after-backward", expect="starts after backward has ended: nothing overlaps")
def everything_in_finish(buckets, group):
    def finish():
        for handle in [group.all_reduce(bucket.flat, op="avg", async_op=True) for bucket in buckets]:
            handle.wait()

    return finish


@mistake("overlap-hooks", "blocks-in-the-hook", expect="blocks backward until it is reduced: use async_op=True")
def waits_at_once(buckets, group):
    missing, started = [len(bucket.parameters) for bucket in buckets], []

    def arrived(index):
        missing[index] -= 1
        while len(started) < len(buckets) and missing[len(started)] == 0:
            group.all_reduce(buckets[len(started)].flat, op="avg")
            started.append(index)

    def finish():
        started.clear()
        missing[:] = [len(bucket.parameters) for bucket in buckets]

    _watch(buckets, arrived)
    return finish


@mistake("overlap-hooks", "as-they-become-ready", expect="Start bucket i only after bucket i-1")
def first_come_first_served(buckets, group):
    missing, handles = [len(bucket.parameters) for bucket in buckets], []

    def arrived(index):
        missing[index] -= 1
        if missing[index] == 0:
            handles.append(group.all_reduce(buckets[index].flat, op="avg", async_op=True))

    def finish():
        for handle in handles:
            handle.wait()
        handles.clear()
        missing[:] = [len(bucket.parameters) for bucket in buckets]

    _watch(buckets, arrived)
    return finish


@mistake("overlap-hooks", "counts-not-set-back", expect="step 2, rank 2: .* is wrong, although step 1 was right")
def works_once(buckets, group):
    missing, handles = [len(bucket.parameters) for bucket in buckets], []

    def arrived(index):
        missing[index] -= 1
        while len(handles) < len(buckets) and missing[len(handles)] == 0:
            handles.append(group.all_reduce(buckets[len(handles)].flat, op="avg", async_op=True))

    def finish():
        for handle in handles:
            handle.wait()

    _watch(buckets, arrived)
    return finish


@mistake("overlap-hooks", "starts-with-the-first-gradient", expect="starts before the gradient of")
def too_early(buckets, group):
    handles = []

    def arrived(index):
        while len(handles) <= index:
            handles.append(group.all_reduce(buckets[index].flat, op="avg", async_op=True))

    def finish():
        for handle in handles:
            handle.wait()
        handles.clear()

    _watch(buckets, arrived)
    return finish


@mistake(
    "overlap-hooks", "skips-what-is-not-next", expect="(?s)Who waits for whom.*all ranks must start the same buckets"
)
def only_if_it_is_next(buckets, group):
    missing, handles = [len(bucket.parameters) for bucket in buckets], []

    def arrived(index):
        missing[index] -= 1
        if missing[index] == 0 and index == len(handles):
            handles.append(group.all_reduce(buckets[index].flat, op="avg", async_op=True))

    def finish():
        for handle in handles:
            handle.wait()
        handles.clear()
        missing[:] = [len(bucket.parameters) for bucket in buckets]

    _watch(buckets, arrived)
    return finish


@mistake("overlap-hooks", "never-waits", expect="finish returns after 0 of 6 handles were waited for")
def fire_and_forget(buckets, group):
    missing, handles = [len(bucket.parameters) for bucket in buckets], []

    def arrived(index):
        missing[index] -= 1
        while len(handles) < len(buckets) and missing[len(handles)] == 0:
            handles.append(group.all_reduce(buckets[len(handles)].flat, op="avg", async_op=True))

    def finish():
        handles.clear()
        missing[:] = [len(bucket.parameters) for bucket in buckets]

    _watch(buckets, arrived)
    return finish


@mistake("overlap-hooks", "no-division", expect="is the sum over the ranks, 3 times their mean")
def sums(buckets, group):
    class Summing:
        """Hands on all_reduce as a sum."""

        def all_reduce(self, x, op, async_op):
            return group.all_reduce(x, async_op=async_op)

    return ANSWERS.overlap(buckets, Summing())


@alternative("overlap-hooks", "divides-in-finish")
def with_a_set_of_parameters(buckets, group):
    waiting = [set(bucket.parameters) for bucket in buckets]
    handles = []

    def hook(parameter):
        for names in waiting:
            names.discard(parameter)
        while len(handles) < len(buckets) and not waiting[len(handles)]:
            handles.append(group.all_reduce(buckets[len(handles)].flat, async_op=True))

    def finish():
        for handle, bucket in zip(handles, buckets, strict=True):
            handle.wait()
            bucket.flat /= group.world_size
        handles.clear()
        waiting[:] = [set(bucket.parameters) for bucket in buckets]

    for bucket in buckets:
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(hook)
    return finish


# Accumulation


@mistake("accumulate-no-sync", "reduces-every-microbatch", expect="12 all-reduces per step of 3 microbatches where 4")
def plain_loop(ddp, microbatches, loss_of):
    for x, y in microbatches:
        (loss_of(ddp, x, y) / len(microbatches)).backward()


@mistake("accumulate-no-sync", "no-division", expect="the mean times 3: each microbatch's loss is a mean, so divide")
def adds_up_means(ddp, microbatches, loss_of):
    for index, (x, y) in enumerate(microbatches):
        with contextlib.nullcontext() if index == len(microbatches) - 1 else ddp.no_sync():
            loss_of(ddp, x, y).backward()


@mistake("accumulate-no-sync", "never-reduces", expect="nothing was reduced at all")
def no_sync_around_all(ddp, microbatches, loss_of):
    with ddp.no_sync():
        for x, y in microbatches:
            (loss_of(ddp, x, y) / len(microbatches)).backward()


@mistake("accumulate-no-sync", "reduces-the-first", expect="is not the mean over the ranks, nor any multiple of it")
def syncs_first(ddp, microbatches, loss_of):
    for index, (x, y) in enumerate(microbatches):
        with ddp.no_sync() if index else contextlib.nullcontext():
            (loss_of(ddp, x, y) / len(microbatches)).backward()


@alternative("accumulate-no-sync", "last-one-apart")
def all_but_the_last(ddp, microbatches, loss_of):
    k, (*others, last) = len(microbatches), microbatches
    with ddp.no_sync():
        for x, y in others:
            loss_of(ddp, x, y).div(k).backward()
    loss_of(ddp, *last).div(k).backward()


@mistake("accumulate-no-sync", "one-loss", expect="the activations of 2 microbatches are held at once")
def adds_up_the_losses(ddp, microbatches, loss_of):
    with ddp.no_sync():
        (sum(loss_of(ddp, x, y) for x, y in microbatches[:-1]) / len(microbatches)).backward()
    (loss_of(ddp, *microbatches[-1]) / len(microbatches)).backward()


@mistake("accumulate-no-sync", "joins-the-microbatches", expect="joined microbatches need the activations of the whole")
def one_batch(ddp, microbatches, loss_of):
    x, y = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    loss_of(ddp, x, y).backward()


@mistake("accumulate-no-sync", "forward-outside", expect="3 forwards ran outside ddp.no_sync")
def forward_outside(ddp, microbatches, loss_of):
    for index, (x, y) in enumerate(microbatches):
        loss = loss_of(ddp, x, y) / len(microbatches)
        with contextlib.nullcontext() if index == len(microbatches) - 1 else ddp.no_sync():
            loss.backward()


@alternative("accumulate-no-sync", "looks-at-the-losses")
def looks_first(ddp, microbatches, loss_of):
    with torch.no_grad():
        sum(loss_of(ddp.module, x, y) for x, y in microbatches)  # a look at the loss costs nothing
    for index, (x, y) in enumerate(microbatches):
        with contextlib.nullcontext() if index == len(microbatches) - 1 else ddp.no_sync():
            (loss_of(ddp, x, y) / len(microbatches)).backward()
