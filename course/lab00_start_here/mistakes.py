"""Spoilers of lab 00: wrong answers that people write, and right ones that look different."""

import numpy as np
import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("00_start_here")

# The cost of a matmul

matmul_cost = KnownAnswers("matmul-cost")

matmul_cost.mistake(
    "no-additions", {"2 * m": "m"}, says="You counted multiplications only: every one comes with an addition."
)
matmul_cost.mistake(
    "result-never-written",
    {" + m * n": ""},
    says="The result is missing from the bytes: two matrices are read, one is written.",
)
matmul_cost.mistake(
    "load-per-flop",
    {"m * k + k * n + m * n": "2 * m * k * n"},
    says="This counts a load for every FLOP, but a value that has been read once is used many times.",
)
matmul_cost.mistake(
    "elements-not-bytes", {" * itemsize": ""}, says="This is the number of elements, and each takes itemsize bytes."
)
matmul_cost.mistake(
    "swapped",
    {"2 * m * k * n, (m * k + k * n + m * n) * itemsize": "(m * k + k * n + m * n) * itemsize, 2 * m * k * n"},
    says="These are the two right numbers in the other order: FLOPs come first.",
)
matmul_cost.mistake(
    "flops-only", {", (m * k + k * n + m * n) * itemsize": ""}, expect="the exercise asks for two numbers"
)
matmul_cost.mistake(
    "first-addition-saved",
    {"2 * m * k * n,": "m * n * (2 * k - 1),"},
    says="You counted k − 1 additions per dot product. By convention, and in hardware that multiplies and adds in one "
    "instruction, it is k of each.",
)
matmul_cost.mistake(
    "weights-only",
    {"m * k + k * n + m * n": "k * n"},
    says="These are the bytes of the second matrix alone; the first is read as well, and the result is written.",
)
matmul_cost.mistake(
    "result-twice",
    {" + m * n": " + 2 * m * n"},
    says="The result is counted as read and written. A result that is not added to anything is only written.",
)


matmul_cost.mistake(
    "int32",
    {"2 * m * k * n,": "2 * m * torch.tensor(k * n, dtype=torch.int32),"},
    says="The FLOPs of a real layer do not fit into int32: use Python's integers or int64.",
)
matmul_cost.mistake(
    "two-bytes-at-least", {" * itemsize": " * max(itemsize, 2)"}, says="An element can take a single byte, as in fp8."
)


@matmul_cost.alternative("float32")
def in_float32(m, k, n, itemsize):
    return torch.tensor(right.matmul_cost(m, k, n, itemsize), dtype=torch.float32)


@matmul_cost.alternative("ask-tensors")
def asks_tensors(m, k, n, itemsize):
    dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[itemsize]
    a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")
    return (a @ b).numel() * 2 * k, sum(x.nbytes for x in (a, b, a @ b))


@matmul_cost.alternative("array")
def an_array(m, k, n, itemsize):
    return np.array(right.matmul_cost(m, k, n, itemsize))


# The roofline

roofline = KnownAnswers("roofline")

roofline.mistake(
    "max", {"min(": "max("}, says="You took the larger of the two limits; no program is faster than the smaller one."
)
roofline.mistake(
    "always-peak",
    {"min(peak_flops, intensity * bandwidth)": "peak_flops"},
    says="You found the peak everywhere; with few FLOP per byte, memory cannot feed the cores that fast.",
)
roofline.mistake(
    "never-flat",
    {"min(peak_flops, intensity * bandwidth)": "intensity * bandwidth"},
    says="You found a slope without end; right of the ridge the cores are the limit, and the roof is flat.",
)
roofline.mistake(
    "divides",
    {"intensity * bandwidth": "bandwidth / intensity"},
    says="You divided where it should be multiplied: bytes/s times FLOP/byte is FLOP/s.",
)
roofline.mistake(
    "adds-times",
    {"min(peak_flops, intensity * bandwidth)": "1 / (1 / peak_flops + 1 / (intensity * bandwidth))"},
    says="You added the two times; memory and cores work at once, so only the slower one counts.",
)
roofline.mistake(
    "bandwidth-as-flops",
    {"min(peak_flops, intensity * bandwidth)": "peak_flops if intensity > peak_flops / bandwidth else bandwidth"},
    says="Left of the ridge you return bytes/s; each byte is good for `intensity` FLOP.",
)
roofline.mistake(
    "intensity-unused",
    {"intensity * bandwidth": "bandwidth"},
    says="You compared FLOP/s with bytes/s; multiply the bandwidth by the intensity first.",
)
roofline.mistake(
    "share-of-peak",
    {"min(peak_flops, intensity * bandwidth)": "min(1.0, intensity * bandwidth / peak_flops)"},
    says="This is a share of the peak; the exercise asks for FLOP/s.",
)
roofline.mistake(
    "whole-number-ridge",
    {
        "min(peak_flops, intensity * bandwidth)": (
            "peak_flops if intensity > peak_flops // bandwidth else intensity * bandwidth"
        )
    },
    says="You rounded the ridge to a whole number: divide with /, and do not round.",
)
roofline.alternative(
    "by-time", {"min(peak_flops, intensity * bandwidth)": "intensity / max(intensity / peak_flops, 1 / bandwidth)"}
)
roofline.alternative(
    "by-ridge",
    {
        "min(peak_flops, intensity * bandwidth)": (
            "peak_flops if intensity > peak_flops / bandwidth else intensity * bandwidth"
        )
    },
)


@roofline.alternative("by-tensor")
def asks_torch(intensity, peak_flops, bandwidth):
    return torch.tensor([peak_flops, intensity * bandwidth]).min()


# Alpha and beta

alpha_beta = KnownAnswers("alpha-beta")

alpha_beta.mistake(
    "slope-not-inverted",
    {"1 / slope": "slope"},
    says="This is the slope, seconds per byte: the bandwidth is one over it.",
)
alpha_beta.mistake(
    "no-latency",
    {"mean_time - slope * mean_size, 1 / slope": "min(seconds), max(sizes) / max(seconds)"},
    says="Bytes by seconds of one message: take the latency off its time first.",
)
alpha_beta.mistake(
    "through-zero",
    {"slope -= n * mean_size * mean_time": "", " - n * mean_size**2": "", "mean_time - slope * mean_size": "0.0"},
    says="Your line runs through zero, but a message of no bytes still takes the latency.",
)
alpha_beta.mistake(
    "smallest-message-is-latency",
    {"mean_time - slope * mean_size": "min(seconds)"},
    says="This is the time of the smallest message: take its bytes × slope off.",
)
alpha_beta.mistake(
    "swapped",
    {"mean_time - slope * mean_size, 1 / slope": "1 / slope, mean_time - slope * mean_size"},
    says="Both numbers are right, in the other order: latency first.",
)
alpha_beta.mistake(
    "bits",
    {"1 / slope": "8 / slope"},
    says="The bandwidth is eight times too large: the exercise asks for bytes per second, not bits.",
)
alpha_beta.mistake(
    "mean-rate",
    {
        "slope = sum(size * time": "rates = sum(size / time",
        "slope -= n * mean_size * mean_time": "",
        "slope /= sum(size * size for size in sizes) - n * mean_size**2": "",
        "mean_time - slope * mean_size, 1 / slope": "min(seconds), rates / n",
    },
    says="You took the mean of bytes / seconds, in which the latency is hidden.",
)
alpha_beta.mistake(
    "polyfit-order",
    {"mean_time - slope * mean_size, 1 / slope": "slope, 1 / (mean_time - slope * mean_size)"},
    says="np.polyfit returns the slope first and the height at zero last.",
)


@alpha_beta.mistake("first-two-points", expect="Use all of them, or the smallest")
def draws_through_two_points(sizes, seconds):
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    return seconds[0] - slope * sizes[0], 1 / slope


@alpha_beta.mistake("sorted-apart", expect="Use all of them, or the smallest")
def sorts_sizes_and_times_apart(sizes, seconds):
    return draws_through_two_points(sorted(sizes)[:: len(sizes) - 1], sorted(seconds)[:: len(sizes) - 1])


@alpha_beta.alternative("two-points")
def draws_from_smallest_to_largest(sizes, seconds):
    i, j = sizes.index(min(sizes)), sizes.index(max(sizes))
    return draws_through_two_points([sizes[i], sizes[j]], [seconds[i], seconds[j]])


@alpha_beta.alternative("polyfit")
def polyfit(sizes, seconds):
    slope, latency = np.polyfit(sizes, seconds, 1)
    return latency, 1 / slope


@alpha_beta.alternative("lstsq")
def solves_the_normal_equations(sizes, seconds):
    columns = np.stack([np.ones(len(sizes)), np.array(sizes, float)], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.array(seconds), rcond=None)[0]
    return latency, 1 / slope
