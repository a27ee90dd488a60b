"""Spoilers of lab 03: wrong ways to overlap and to accumulate, and right ones that look different."""

import contextlib

import torch

from course.kit.exercises import KnownAnswers

# Overlap

overlap_hooks = KnownAnswers("overlap-hooks")


@overlap_hooks.mistake("after-backward", expect="starts after backward has ended: nothing overlaps")
def everything_in_finish(buckets, group):
    def finish():
        for handle in [group.all_reduce(bucket.flat, op="avg", async_op=True) for bucket in buckets]:
            handle.wait()

    return finish


overlap_hooks.mistake(
    "blocks-in-the-hook",
    {
        'handles.append(group.all_reduce(buckets[len(handles)].flat, op="avg", async_op=True))': (
            'handles.append(group.all_reduce(buckets[len(handles)].flat, op="avg"))'
        ),
        "for handle in handles:\n            handle.wait()\n        handles.clear()": "handles.clear()",
    },
    expect="blocks backward until it is reduced: use async_op=True",
)
overlap_hooks.mistake(
    "last-parameter-only",
    {
        "for parameter in bucket.parameters:": "for parameter in bucket.parameters[-1:]:",
        "missing = [len(bucket.parameters) for bucket in buckets]": "missing = [1] * len(buckets)",
        "missing[:] = [len(bucket.parameters) for bucket in buckets]": "missing[:] = [1] * len(buckets)",
    },
    expect=r"on rank \d bucket \d starts before the gradient of",
)
overlap_hooks.mistake(
    "as-they-become-ready",
    {
        "while len(handles) < len(buckets) and missing[len(handles)] == 0:": "if missing[index] == 0:",
        "buckets[len(handles)]": "buckets[index]",
    },
    expect="Start bucket i only after bucket i-1",
)
overlap_hooks.mistake(
    "counts-not-set-back",
    {"        handles.clear()\n        missing[:] = [len(bucket.parameters) for bucket in buckets]\n": ""},
    expect="right in step 1, but in step 2 on rank 0 no all-reduce",
)
overlap_hooks.mistake(
    "one-list-for-all-calls",
    {
        "def overlap(buckets, group):": "pending = []\n\n\ndef overlap(buckets, group):",
        "    handles = []\n": "    handles = pending\n",
    },
    expect="with two of them at once",
)
overlap_hooks.mistake(
    "starts-with-the-first-gradient",
    {
        "while len(handles) < len(buckets) and missing[len(handles)] == 0:": "while len(handles) <= index:",
        "buckets[len(handles)]": "buckets[index]",
    },
    expect="starts before the gradient of",
)
overlap_hooks.mistake(
    "skips-what-is-not-next",
    {
        "while len(handles) < len(buckets) and missing[len(handles)] == 0:": (
            "if missing[index] == 0 and index == len(handles):"
        )
    },
    expect="is not started then: start it in that hook|all ranks must start the same buckets",
)
overlap_hooks.mistake(
    "never-waits",
    {"for handle in handles:\n            handle.wait()\n        ": ""},
    expect="finish returns after 0 of 6 handles were waited for",
)
overlap_hooks.mistake("no-division", {'op="avg", ': ""}, expect="is the sum over the ranks, 3 times their mean")


overlap_hooks.mistake(
    "all-with-the-last-gradient",
    {"and missing[len(handles)] == 0:": "and not any(missing):"},
    expect="is not started then: start it in that hook",
)
overlap_hooks.mistake(
    "one-bucket-behind",
    {
        "and missing[len(handles)] == 0:": (
            "and missing[len(handles)] == 0 and (not any(missing) or not missing[len(handles) + 1]):"
        )
    },
    expect="is not started then: start it in that hook",
)
overlap_hooks.mistake(
    "counts-down-what-it-resets-to",
    {
        "    missing = [len(bucket.parameters) for bucket in buckets]\n": (
            "    full = [len(bucket.parameters) for bucket in buckets]\n    missing = list(full)\n"
        ),
        "missing[:] = [len(bucket.parameters) for bucket in buckets]": "nonlocal missing\n        missing = full",
    },
    expect="right in step 1, but in step 3",
)
overlap_hooks.mistake(
    "waits-in-the-hook-of-step-2",
    {
        "    def arrived(index):": "    steps = []\n\n    def arrived(index):",
        'op="avg", async_op=True))': 'op="avg", async_op=True))\n            steps and handles[-1].wait()',
        "        handles.clear()": "        handles.clear()\n        steps.append(1)",
    },
    expect="in step 2 .* while backward still runs",
)
overlap_hooks.mistake(
    "told-by-values",
    {"and missing[len(handles)] == 0:": "and all(p.grad.any() for p in buckets[len(handles)].parameters):"},
    expect="do not tell by values",
)


@overlap_hooks.alternative("divides-in-finish")
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

accumulate_no_sync = KnownAnswers("accumulate-no-sync")

accumulate_no_sync.mistake(
    "reduces-every-microbatch",
    {"if last else ddp.no_sync()": ""},
    expect="12 all-reduces per step of 3 microbatches where 4",
)
accumulate_no_sync.mistake(
    "no-division",
    {"(loss_of(ddp, x, y) / len(microbatches))": "loss_of(ddp, x, y)"},
    expect="the mean times 3: each microbatch's loss is a mean, so divide",
)
accumulate_no_sync.mistake(
    "never-reduces",
    {"contextlib.nullcontext() if last else ddp.no_sync()": "ddp.no_sync()"},
    expect="nothing was reduced at all",
)
accumulate_no_sync.mistake(
    "reduces-the-first",
    {"last = index == len(microbatches) - 1": "last = index == 0"},
    expect="is not the mean over the ranks, nor any multiple of it",
)


accumulate_no_sync.mistake(
    "always-3", {"/ len(microbatches)).backward()": "/ 3).backward()"}, expect="is right for 3 only"
)


@accumulate_no_sync.alternative("last-one-apart")
def all_but_the_last(ddp, microbatches, loss_of):
    k, (*others, last) = len(microbatches), microbatches
    with ddp.no_sync():
        for x, y in others:
            loss_of(ddp, x, y).div(k).backward()
    loss_of(ddp, *last).div(k).backward()


@accumulate_no_sync.mistake("one-loss", expect="the activations of 2 microbatches are held at once")
def adds_up_the_losses(ddp, microbatches, loss_of):
    with ddp.no_sync():
        (sum(loss_of(ddp, x, y) for x, y in microbatches[:-1]) / len(microbatches)).backward()
    (loss_of(ddp, *microbatches[-1]) / len(microbatches)).backward()


@accumulate_no_sync.mistake("joins-the-microbatches", expect="joined microbatches need the activations of the whole")
def one_batch(ddp, microbatches, loss_of):
    x, y = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    loss_of(ddp, x, y).backward()


accumulate_no_sync.mistake(
    "needs-two",
    {"last = index == len(microbatches) - 1": "last = index == len(microbatches) - 1 > 0"},
    expect="right for 3 microbatches, but for 1 .* nothing was averaged",
)


@accumulate_no_sync.mistake("losses-of-the-bare-module", expect="activations of 2 microbatches are held at once")
def forwards_without_the_wrapper(ddp, microbatches, loss_of):
    *others, last = microbatches
    losses = [loss_of(ddp.module, x, y) / len(microbatches) for x, y in others]
    with ddp.no_sync():
        for loss in losses:
            loss.backward()
    (loss_of(ddp, *last) / len(microbatches)).backward()


accumulate_no_sync.mistake(
    "forward-outside",
    {
        "with contextlib": "loss = loss_of(ddp, x, y) / len(microbatches)\n        with contextlib",
        "            (loss_of(ddp, x, y) / len(microbatches)).backward()": "            loss.backward()",
    },
    expect="3 forwards ran outside ddp.no_sync",
)


@accumulate_no_sync.alternative("looks-at-the-losses")
def looks_first(ddp, microbatches, loss_of):
    with torch.no_grad():
        sum(loss_of(ddp.module, x, y) for x, y in microbatches)  # a look at the loss costs nothing
    for index, (x, y) in enumerate(microbatches):
        with contextlib.nullcontext() if index == len(microbatches) - 1 else ddp.no_sync():
            (loss_of(ddp, x, y) / len(microbatches)).backward()
