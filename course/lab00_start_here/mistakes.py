"""Spoilers of lab 00: wrong answers that people write, and right ones that look different."""

import numpy as np
import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("00_start_here")

# The cost of a matmul


def cost(says, label, flops=lambda m, k, n: 2 * m * k * n, moved=lambda m, k, n, size: (m * k + k * n + m * n) * size):
    """One wrong pair of numbers."""
    mistake("matmul-cost", label, says=says)(lambda m, k, n, size: (flops(m, k, n), moved(m, k, n, size)))


cost(
    "You counted multiplications only: every one comes with an addition.",
    "no-additions",
    flops=lambda m, k, n: m * k * n,
)
cost(
    "You counted k − 1 additions per dot product. By convention, and in hardware that multiplies and adds in one "
    "instruction, it is k of each.",
    "first-addition-saved",
    flops=lambda m, k, n: m * n * (2 * k - 1),
)
cost(
    "The result is missing from the bytes: two matrices are read, one is written.",
    "result-never-written",
    moved=lambda m, k, n, size: (m * k + k * n) * size,
)
cost(
    "These are the bytes of the second matrix alone; the first is read as well, and the result is written.",
    "weights-only",
    moved=lambda m, k, n, size: k * n * size,
)
cost(
    "This is the number of elements, and each takes itemsize bytes.",
    "elements-not-bytes",
    moved=lambda m, k, n, size: m * k + k * n + m * n,
)
cost(
    "This counts a load for every FLOP, but a value that has been read once is used many times.",
    "load-per-flop",
    moved=lambda m, k, n, size: 2 * m * k * n * size,
)
cost(
    "The result is counted as read and written. A result that is not added to anything is only written.",
    "result-twice",
    moved=lambda m, k, n, size: (m * k + k * n + 2 * m * n) * size,
)


@mistake("matmul-cost", "swapped", says="These are the two right numbers in the other order: FLOPs come first.")
def bytes_first(m, k, n, itemsize):
    return right.matmul_cost(m, k, n, itemsize)[::-1]


@mistake("matmul-cost", "flops-only", expect="the exercise asks for two numbers")
def forgets_bytes(m, k, n, itemsize):
    return 2 * m * k * n


@alternative("matmul-cost", "ask-tensors")
def asks_tensors(m, k, n, itemsize):
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")
    return (a @ b).numel() * 2 * k, sum(x.nbytes for x in (a, b, a @ b))


@alternative("matmul-cost", "array")
def an_array(m, k, n, itemsize):
    return np.array(right.matmul_cost(m, k, n, itemsize))


# The roofline


def roof(says, label):
    return mistake("roofline", label, says=says)


@roof("You took the larger of the two limits; no program is faster than the smaller one.", "max")
def takes_the_larger(intensity, peak_flops, bandwidth):
    return max(peak_flops, intensity * bandwidth)


@roof("You found the peak everywhere; with few FLOP per byte, memory cannot feed the cores that fast.", "always-peak")
def believes_the_data_sheet(intensity, peak_flops, bandwidth):
    return peak_flops


@roof("You found a slope without end; right of the ridge the cores are the limit, and the roof is flat.", "never-flat")
def forgets_the_peak(intensity, peak_flops, bandwidth):
    return intensity * bandwidth


@roof("You divided where it should be multiplied: bytes/s times FLOP/byte is FLOP/s.", "divides")
def divides(intensity, peak_flops, bandwidth):
    return min(peak_flops, bandwidth / intensity)


@roof("You added the two times; memory and cores work at once, so only the slower one counts.", "adds-times")
def adds_times(intensity, peak_flops, bandwidth):
    return 1 / (1 / peak_flops + 1 / (intensity * bandwidth))


@roof("You compared FLOP/s with bytes/s; multiply the bandwidth by the intensity first.", "intensity-unused")
def compares_unlike_units(intensity, peak_flops, bandwidth):
    return min(peak_flops, bandwidth)


@roof("This is a share of the peak; the exercise asks for FLOP/s.", "share-of-peak")
def a_share(intensity, peak_flops, bandwidth):
    return min(1.0, intensity * bandwidth / peak_flops)


@roof("Left of the ridge you return bytes/s; each byte is good for `intensity` FLOP.", "bandwidth-as-flops")
def bandwidth_left_of_the_ridge(intensity, peak_flops, bandwidth):
    return peak_flops if intensity > peak_flops / bandwidth else bandwidth


@alternative("roofline", "by-time")
def slower_of_two_times(intensity, peak_flops, bandwidth):
    return intensity / max(intensity / peak_flops, 1 / bandwidth)


@alternative("roofline", "by-ridge")
def asks_the_ridge(intensity, peak_flops, bandwidth):
    return peak_flops if intensity > peak_flops / bandwidth else intensity * bandwidth


@alternative("roofline", "by-tensor")
def asks_torch(intensity, peak_flops, bandwidth):
    return torch.tensor([peak_flops, intensity * bandwidth], dtype=torch.float64).min()


# The first rank program


@mistake("first-rank-program", "sum-not-mean", says="This is the sum over the ranks: divide it by group.world_size.")
def forgets_to_divide(group, x):
    return group.all_reduce(x.clone())


@mistake("first-rank-program", "own-x", says="This is the rank's own x: nothing came from the other ranks.")
def never_communicates(group, x):
    return x.clone()


@mistake(
    "first-rank-program",
    "divides-own-x",
    says="This is the rank's own x divided by the number of ranks: the other ranks' x are missing.",
)
def divides_without_sum(group, x):
    return x / group.world_size


@mistake("first-rank-program", "divides-twice", says="The mean was divided by the number of ranks once more.")
def divides_twice(group, x):
    return group.all_reduce(x / group.world_size, op="avg")


@mistake(
    "first-rank-program",
    "divides-by-4",
    says="You divided by 4 on every group; group.world_size is the number of ranks, and the check runs 3 as well.",
)
def assumes_four_ranks(group, x):
    return group.all_reduce(x.clone()) / 4


@mistake(
    "first-rank-program",
    "mean-over-elements",
    expect=r"\[\] float32, but the exercise asks for the mean, as many",
)
def reduces_the_elements_too(group, x):
    return group.all_reduce(x.mean(), op="avg")


@mistake("first-rank-program", "returns-nothing", expect=r"nothing \(None\): is there a return")
def leaves_it_in_a_copy(group, x):
    mean = group.all_reduce(x.clone(), op="avg")
    mean /= 1


@mistake("first-rank-program", "never-waits", expect="returned a HandleWithoutWait; the exercise asks for the mean")
def returns_the_handle(group, x):
    return group.all_reduce(x / group.world_size, async_op=True)


@mistake("first-rank-program", "destroys-input", expect=r"changed its input x.*clone")
def works_in_place(group, x):
    group.all_reduce(x)
    return x / group.world_size


@mistake("first-rank-program", "only-rank-0", expect="wait for each other for ever")
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


def reader(limit=lambda p, n: 2 * p * (n - 1) / n, calls=lambda led: led.calls.total()):
    """Reads as the solution does, but for the most bytes of an all-reduce, or for what counts as a call."""

    def read(led, num_bytes, world_size):
        if not led.calls:
            return "silent"
        if led.bytes() > limit(num_bytes, world_size):
            return "wasteful"
        return "chatty" if calls(led) > 1 else "fine"

    return read


READERS = {
    "expects-one-copy": (reader(lambda p, n: p), "you call it 'wasteful', but it is '(fine|chatty)'"),
    "four-ranks-always": (reader(lambda p, n: 1.5 * p), "you call it 'wasteful', but it is '(fine|chatty)': 5 ranks"),
    "all-ranks-together": (reader(lambda p, n: 2 * p * (n - 1)), "you call it '(fine|chatty)', but it is 'wasteful'"),
    "counts-messages": (reader(calls=lambda led: led.messages), r"'chatty', but it is 'fine'(.*)in \d messages"),
    "bytes-only": (reader(calls=lambda led: 1), "you call it 'fine', but it is 'chatty'"),
}
for label, (read, expect) in READERS.items():
    mistake("read-a-receipt", label, expect=expect)(read)


@mistake("read-a-receipt", "own-words", expect="the answer is one of fine, silent")
def answers_in_own_words(led, num_bytes, world_size):
    return "ok" if led.calls == {"all_reduce": 1} else "not ok"


@alternative("read-a-receipt", "by-name")
def asks_for_names(led, num_bytes, world_size):
    verdicts = {(): "silent", ("all_gather",): "wasteful", ("all_reduce",): "fine"}
    return "chatty" if led.calls["all_reduce"] > 1 else verdicts[tuple(led.calls)]


# Alpha and beta


def line(sizes, seconds):
    slope, latency = np.polyfit(sizes, seconds, 1)
    return float(latency), float(slope)


def link(says, label):
    return mistake("alpha-beta", label, says=says)


@link("This is the slope, seconds per byte: the bandwidth is one over it.", "slope-not-inverted")
def returns_the_slope(sizes, seconds):
    return line(sizes, seconds)


@link("Bytes by seconds of one message: take the latency off its time first.", "no-latency")
def forgets_latency(sizes, seconds):
    return min(seconds), max(sizes) / max(seconds)


@link("Your line runs through zero, but a message of no bytes still takes the latency.", "through-zero")
def fits_through_zero(sizes, seconds):
    sizes, seconds = np.array(sizes, float), np.array(seconds)
    return 0.0, float((sizes * sizes).sum() / (sizes * seconds).sum())


@link("You took the mean of bytes / seconds, in which the latency is hidden.", "mean-rate")
def averages_rates(sizes, seconds):
    return min(seconds), float(np.mean(np.array(sizes) / np.array(seconds)))


@link("This is the time of the smallest message: take its bytes × slope off.", "smallest-message-is-latency")
def takes_the_smallest_for_latency(sizes, seconds):
    return min(seconds), 1 / line(sizes, seconds)[1]


@link("Both numbers are right, in the other order: latency first.", "swapped")
def swaps(sizes, seconds):
    latency, slope = line(sizes, seconds)
    return 1 / slope, latency


@link("np.polyfit returns the slope first and the height at zero last.", "polyfit-order")
def takes_polyfit_the_wrong_way(sizes, seconds):
    latency, slope = line(sizes, seconds)
    return slope, 1 / latency


@link("The bandwidth is eight times too large: the exercise asks for bytes per second, not bits.", "bits")
def in_bits(sizes, seconds):
    latency, slope = line(sizes, seconds)
    return latency, 8 / slope


@alternative("alpha-beta", "two-points")
def draws_through_two_points(sizes, seconds):
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return seconds[0] - slope * sizes[0], 1 / slope


@alternative("alpha-beta", "polyfit")
def polyfit(sizes, seconds):
    latency, slope = line(sizes, seconds)
    return latency, 1 / slope


@alternative("alpha-beta", "lstsq")
def solves_the_normal_equations(sizes, seconds):
    columns = np.stack([np.ones(len(sizes)), np.array(sizes, float)], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.array(seconds), rcond=None)[0]
    return latency, 1 / slope


@mistake("first-rank-program", "torch-distributed", expect="recorded no operation of `group`")
def goes_round_the_group(group, x):
    mean = x.clone()
    torch.distributed.all_reduce(mean, group=group.process_group)
    return mean / group.world_size
