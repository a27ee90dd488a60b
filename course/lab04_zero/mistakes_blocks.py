"""Spoilers of lab 04: hooks that free nothing, flat gradients that stay, reductions that send twice as much."""

from course.kit.exercises import KnownAnswers

# Stage 2

reduce_scatter_hooks = KnownAnswers("reduce-scatter-hooks")

reduce_scatter_hooks.mistake(
    "frees-nothing",
    {
        "            for p in bucket:\n                p.grad = None\n": "",
        "missing.update(bucket)": (
            "if index == len(buckets) - 1:  # the last bucket of backward: only now is anything "
            "freed\n"
            "                for p in sum(buckets, []):\n"
            "                    p.grad = None\n"
            "            missing.update(bucket)"
        ),
    },
    expect="free a bucket's gradients",
)
reduce_scatter_hooks.mistake(
    "all-reduce-then-slice",
    {
        'group.reduce_scatter(flat, op="avg")': (
            'group.all_reduce(flat, op="avg").chunk(group.world_size)[group.rank].clone()'
        )
    },
    expect="sends half of what an all-reduce does",
)
reduce_scatter_hooks.mistake("adds-gradients", {', op="avg"': ""}, expect="it is the sum, 4 times the average")
reduce_scatter_hooks.mistake(
    "works-once",
    {"missing.update(bucket)  # for the next backward": "missing.add(None)  # never empty again"},
    expect="armed again for the second",
)
reduce_scatter_hooks.mistake(
    "first-gradient-fires",
    {
        "            if missing:\n                return\n": "",
        "p.grad.flatten()": "torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()",
    },
    expect="before the last gradient of the bucket is there",
)
reduce_scatter_hooks.mistake(
    "loop-variable", {"watch(index, bucket):": "watch(_, bucket):"}, expect="is None: was the bucket never full"
)
reduce_scatter_hooks.mistake(
    "hooks-one-parameter",
    {
        "            if missing:\n                return\n": "",
        "for parameter in bucket:": "for parameter in bucket[:1]:",
    },
    expect="'NoneType' object has no attribute 'flatten'",
)
reduce_scatter_hooks.mistake(
    "adds-to-the-last-shard",
    {
        "shards[index] = group": "mine = group",
        "missing.update(bucket)": (
            "shards[index] = mine if shards[index] is None else shards[index] + mine\n"
            "            missing.update(bucket)"
        ),
    },
    expect="gradients of earlier passes are still in it",
)


reduce_scatter_hooks.mistake(
    "fires-at-the-second",
    {"            if missing:\n": "            if len(bucket) - len(missing) != 2:  # a weight and a bias\n"},
    expect="'NoneType' object has no attribute 'flatten'",
)
reduce_scatter_hooks.mistake(
    "a-buffer-of-float32",
    {
        "flat = torch.cat([p.grad.flatten() for p in bucket])": (
            "flat = torch.zeros(sum(p.numel() for p in bucket))\n"
            "            torch.cat([p.grad.flatten() for p in bucket], out=flat)"
        )
    },
    expect="float64",
)


@reduce_scatter_hooks.alternative("counts-and-a-flat-buffer")
def with_a_buffer(buckets, group):
    return fills_buffers(buckets, group, drop=True)


def fills_buffers(buckets, group, drop):
    """drop: a bucket's buffer lives from its first gradient to the reduce-scatter; else for ever."""
    n, shards, buffers = group.world_size, [None] * len(buckets), {}
    counts = [0] * len(buckets)
    for index, bucket in enumerate(buckets):
        size, start = sum(p.numel() for p in bucket), 0
        for parameter in bucket:

            def ready(parameter, start=start, size=size, index=index):
                if index not in buffers:
                    buffers[index] = parameter.new_zeros(size + -size % n)
                buffers[index][start : start + parameter.numel()] = parameter.grad.flatten()
                parameter.grad = None
                counts[index] += 1
                if counts[index] == len(buckets[index]):
                    counts[index] = 0
                    shards[index] = group.reduce_scatter(buffers[index]) / n
                    if drop:
                        del buffers[index]

            start += parameter.numel()
            parameter.register_post_accumulate_grad_hook(ready)
    return shards


@reduce_scatter_hooks.mistake("a-buffer-per-bucket-for-ever", expect="no buffer per bucket")
def with_buffers_that_stay(buckets, group):
    return fills_buffers(buckets, group, drop=False)


reduce_scatter_hooks.alternative(
    "one-buffer-for-all-buckets",
    {
        "shards = [None] * len(buckets)": (
            "shards = [None] * len(buckets)\n"
            "    most = max(sum(p.numel() for p in bucket) for bucket in buckets) + group.world_size\n"
            "    buffer = buckets[0][0].new_zeros(most)"
        ),
        "flat = F.pad(flat, (0, -len(flat) % group.world_size))": (
            "size, whole = len(flat), len(flat) + -len(flat) % group.world_size\n"
            "            buffer[:size], buffer[size:whole] = flat, 0\n"
            "            flat = buffer[:whole]"
        ),
    },
)
reduce_scatter_hooks.mistake(
    "shards-are-views-of-whole-buckets",
    {
        'group.reduce_scatter(flat, op="avg")': (
            'group.reduce_scatter(flat, op="avg", out=flat.chunk(group.world_size)[group.rank])'
        )
    },
    expect="none that is a view of a whole bucket",
)
reduce_scatter_hooks.mistake(
    "keeps-flat-gradients",
    {
        "shards = [None] * len(buckets)": "shards, whole = [None] * len(buckets), {}",
        "shards[index] = group": "whole[index] = flat\n            shards[index] = group",
    },
    expect="whole flat gradients are still there after backward",
)
reduce_scatter_hooks.mistake(
    "all-buckets-at-the-end",
    {
        "shards = [None] * len(buckets)": "shards, waiting = [None] * len(buckets), {}",
        'shards[index] = group.reduce_scatter(flat, op="avg")': (
            "waiting[index] = flat\n"
            "            while len(waiting) == len(buckets) or (waiting and 0 not in waiting):\n"
            "                place = min(waiting)\n"
            '                shards[place] = group.reduce_scatter(waiting.pop(place), op="avg")'
        ),
    },
    expect="as soon as its last gradient is there",
)
reduce_scatter_hooks.mistake(
    "padding-left-as-it-was",
    {
        "flat = F.pad(flat, (0, -len(flat) % group.world_size))": (
            "flat = F.pad(flat, (0, -len(flat) % group.world_size), value=7.0)"
        )
    },
    expect="the padding at the end is not zeros",
)


reduce_scatter_hooks.alternative(
    "all-to-all-and-a-sum",
    {'group.reduce_scatter(flat, op="avg")': "group.all_to_all(flat).view(group.world_size, -1).mean(0)"},
)
