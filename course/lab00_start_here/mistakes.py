"""Spoilers of lab 00: wrong answers that people write, and right ones that look different."""

import numpy as np
import torch

from minillm.labkit.exercises import alternative, mistake

# The cost of a matmul


@mistake("matmul-cost", "no-additions", expect="multiplications only")
def counts_multiplications(m, k, n, itemsize):
    return m * k * n, (m * k + k * n + m * n) * itemsize


@mistake("matmul-cost", "result-never-written", expect="the result is missing")
def forgets_the_result(m, k, n, itemsize):
    return 2 * m * k * n, (m * k + k * n) * itemsize


@mistake("matmul-cost", "elements-not-bytes", expect="number of elements")
def forgets_itemsize(m, k, n, itemsize):
    return 2 * m * k * n, m * k + k * n + m * n


@mistake("matmul-cost", "load-per-flop", expect="used many times")
def reads_for_every_flop(m, k, n, itemsize):
    return 2 * m * k * n, 2 * m * k * n * itemsize


@mistake("matmul-cost", "flops-only", expect="asked for are two numbers")
def forgets_bytes(m, k, n, itemsize):
    return 2 * m * k * n


@alternative("matmul-cost", "ask-tensors")
def asks_tensors(m, k, n, itemsize):
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")
    return (a @ b).numel() * 2 * k, sum(x.nbytes for x in (a, b, a @ b))


# The roofline


@mistake("roofline", "max", expect="the larger of the two limits")
def takes_the_larger(intensity, peak_flops, bandwidth):
    return max(peak_flops, intensity * bandwidth)


@mistake("roofline", "always-peak", expect="memory cannot feed the cores")
def believes_the_data_sheet(intensity, peak_flops, bandwidth):
    return peak_flops


@mistake("roofline", "never-flat", expect="the roof is flat")
def forgets_the_peak(intensity, peak_flops, bandwidth):
    return intensity * bandwidth


@mistake("roofline", "divides", expect="divided where it should be multiplied")
def divides(intensity, peak_flops, bandwidth):
    return min(peak_flops, bandwidth / intensity)


@mistake("roofline", "adds-times", expect="you added the two times")
def adds_times(intensity, peak_flops, bandwidth):
    return 1 / (1 / peak_flops + 1 / (intensity * bandwidth))


@alternative("roofline", "by-time")
def slower_of_two_times(intensity, peak_flops, bandwidth):
    return intensity / max(intensity / peak_flops, 1 / bandwidth)


@alternative("roofline", "by-ridge")
def asks_the_ridge(intensity, peak_flops, bandwidth):
    return peak_flops if intensity > peak_flops / bandwidth else intensity * bandwidth


# The first rank program


@mistake("first-rank-program", "sum-not-mean", expect="the sum, 4 times the mean")
def forgets_to_divide(group, x):
    return group.all_reduce(x.clone())


@mistake("first-rank-program", "own-x", expect="nothing came from the other ranks")
def never_communicates(group, x):
    return x.clone()


@mistake("first-rank-program", "divides-own-x", expect="the other ranks' x are missing")
def divides_without_sum(group, x):
    return x / group.world_size


@mistake("first-rank-program", "divides-twice", expect="divide only once")
def divides_twice(group, x):
    return group.all_reduce(x / group.world_size, op="avg")


@mistake("first-rank-program", "destroys-input", expect=r"changed its input x.*clone")
def works_in_place(group, x):
    group.all_reduce(x)
    return x / group.world_size


@mistake("first-rank-program", "only-rank-0", expect=r"wait for each other for ever(.|\n)*every rank of a group must")
def only_rank_0_calls(group, x):
    mean = x.clone()
    if group.rank == 0:
        group.all_reduce(mean)
    return mean / group.world_size


@mistake("first-rank-program", "gathers", expect="1 × all_gather: one all_reduce")
def gathers_everything(group, x):
    return group.all_gather(x).view(group.world_size, -1).mean(0)


@mistake("first-rank-program", "element-by-element", expect=r"\d+ × all_reduce: one all_reduce of the whole tensor")
def one_at_a_time(group, x):
    mean = x.clone()
    for piece in mean.split(4):
        group.all_reduce(piece)
    return mean / group.world_size


@alternative("first-rank-program", "op-avg")
def lets_the_group_divide(group, x):
    return group.all_reduce(x.clone(), op="avg")


@alternative("first-rank-program", "divide-first")
def divides_first(group, x):
    handle = group.all_reduce(x / group.world_size, async_op=True)
    return handle.wait()


# Reading a receipt


@mistake("read-a-receipt", "trusts-values", expect="you call it 'fine', but it is '(silent|chatty|wasteful)'")
def trusts_values(led, num_bytes, world_size):
    return "fine"


@mistake("read-a-receipt", "expects-one-copy", expect="you call it 'wasteful', but it is '(fine|chatty)'")
def expects_one_copy(led, num_bytes, world_size):
    if not led.calls:
        return "silent"
    if led.bytes() > num_bytes:
        return "wasteful"
    return "chatty" if led.calls.total() > 1 else "fine"


@mistake("read-a-receipt", "counts-messages", expect=r"you call it 'chatty', but it is 'fine'(.*)in \d messages")
def counts_messages(led, num_bytes, world_size):
    if not led.calls:
        return "silent"
    if led.bytes() > 2 * num_bytes * (world_size - 1) / world_size:
        return "wasteful"
    return "chatty" if led.messages > 1 else "fine"


@mistake("read-a-receipt", "bytes-only", expect="you call it 'fine', but it is 'chatty'")
def looks_at_bytes_only(led, num_bytes, world_size):
    if not led.bytes():
        return "silent"
    return "wasteful" if led.bytes() > 2 * num_bytes * (world_size - 1) / world_size else "fine"


@mistake("read-a-receipt", "own-words", expect="the answer is one of fine, silent")
def answers_in_own_words(led, num_bytes, world_size):
    return "ok" if led.calls == {"all_reduce": 1} else "not ok"


@alternative("read-a-receipt", "by-name")
def asks_for_names(led, num_bytes, world_size):
    verdicts = {(): "silent", ("all_gather",): "wasteful", ("all_reduce",): "fine"}
    return "chatty" if led.calls["all_reduce"] > 1 else verdicts[tuple(led.calls)]


# Alpha and beta


@mistake("alpha-beta", "slope-not-inverted", expect="seconds per byte: the bandwidth is one over it")
def returns_the_slope(sizes, seconds):
    slope, latency = np.polyfit(sizes, seconds, 1)
    return float(latency), float(slope)


@mistake("alpha-beta", "no-latency", expect="take the latency off")
def forgets_latency(sizes, seconds):
    return min(seconds), max(sizes) / max(seconds)


@mistake("alpha-beta", "through-zero", expect="that line runs through zero")
def fits_through_zero(sizes, seconds):
    sizes, seconds = np.array(sizes, float), np.array(seconds)
    return 0.0, float((sizes * sizes).sum() / (sizes * seconds).sum())


@mistake("alpha-beta", "smallest-message-is-latency", expect="the time of the smallest message")
def takes_the_smallest_for_latency(sizes, seconds):
    slope, _ = np.polyfit(sizes, seconds, 1)
    return min(seconds), 1 / float(slope)


@mistake("alpha-beta", "swapped", expect="in this order")
def swaps(sizes, seconds):
    slope, latency = np.polyfit(sizes, seconds, 1)
    return 1 / float(slope), float(latency)


@alternative("alpha-beta", "two-points")
def draws_through_two_points(sizes, seconds):
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return seconds[0] - slope * sizes[0], 1 / slope


@alternative("alpha-beta", "polyfit")
def polyfit(sizes, seconds):
    slope, latency = np.polyfit(sizes, seconds, 1)
    return float(latency), 1 / float(slope)
