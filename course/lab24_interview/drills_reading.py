"""Drills in reading: a hang report, step times, a timeline, a line of NCCL's tests, a memory snapshot."""

from random import Random

from course.lab24_interview.numbers import n
from course.shared.decisions import Decision

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def hang_report(draw: Random) -> Decision:
    ranks, number = draw.choice((4, 6, 8)), draw.randrange(200, 900)
    missing = draw.randrange(ranks)
    before, now = draw.sample(COLLECTIVES, 2)
    lines = [
        f"  rank {rank}: #{number - (rank == missing)} {before if rank == missing else now}, "
        f"{'completed' if rank == missing else 'started, not completed'}"
        for rank in range(ranks)
    ]
    return Decision(
        "A job hangs. The flight recorder has, as the last collective of each rank:\n"
        + "\n".join(lines)
        + "\nWhich rank's stack do you look at first?",
        missing,
        "",
        f"Rank {missing} never entered #{number}: the others wait for it. Its stack says what it does instead.",
        tolerance=0.001,
        below="That rank is in the collective and waits.",
        above="That rank is in the collective and waits.",
    )


def slow_steps(draw: Random) -> Decision:
    ranks = 6
    slow = draw.randrange(ranks)
    step = draw.choice((1.2, 1.5, 2.0))
    waits = [round(draw.uniform(0.25, 0.4) * step, 2) for _ in range(ranks)]
    waits[slow] = round(0.03 * step, 2)
    lines = [f"  rank {rank}: step {step:.2f} s, of it {wait:.2f} s in collectives" for rank, wait in enumerate(waits)]
    return Decision(
        "All ranks report the same step time:\n" + "\n".join(lines) + "\nWhich rank is the slow one?",
        slow,
        "",
        f"Rank {slow} waits least, so its own work takes longest: {step - waits[slow]:.2f} s.",
        tolerance=0.001,
        below="That rank waits for a slower one.",
        above="That rank waits for a slower one.",
    )


def exposed(draw: Random) -> Decision:
    compute = draw.choice((80, 100, 120))
    first, length = draw.choice((10, 20, 30)), draw.choice((20, 30))
    second, tail = compute - draw.choice((5, 10, 15)), draw.choice((25, 30, 40))
    value = second + tail - compute
    return Decision(
        f"A timeline of one step, in ms:\n  compute stream  0 to {compute}\n"
        f"  all_reduce 1    {first} to {first + length}\n"
        f"  all_reduce 2    {second} to {second + tail}\nHow many milliseconds of communication are exposed?",
        value,
        "ms",
        f"The first hides whole; of the second {second + tail} - {compute} = {value} ms lie behind all compute.",
        slips={(length + tail) / value: "That is all communication, hidden or not."},
        tolerance=0.02,
    )


def nccl_line(draw: Random) -> Decision:
    ranks, size, micros = draw.choice((4, 8, 16)), draw.choice((256, 512, 1024)), draw.choice((900, 1800, 3600, 9000))
    algorithm = size * 1e6 / (micros * 1e-6)
    value = algorithm * 2 * (ranks - 1) / ranks
    return Decision(
        f"all_reduce_perf on {ranks} GPUs prints: size {size * 10**6:,} B, time {micros:,} us. "
        "What is the bus bandwidth?",
        value,
        "B/s",
        f"{size} MB / {micros:,} µs = {n(algorithm / 1e9, 3)} GB/s, times 2(N-1)/N: {n(value / 1e9, 3)} GB/s.",
        slips={ranks / (2 * (ranks - 1)): "That is the algorithm's bandwidth; the bus carries 2(N-1)/N of it."},
        tolerance=0.05,
    )


def snapshot(draw: Random) -> Decision:
    reserved, allocated, largest = draw.choice((70, 74, 76)), draw.choice((58, 60, 62)), draw.choice((2, 3, 4))
    wanted = largest + draw.choice((1, 2))
    value = reserved - allocated
    return Decision(
        f"Out of memory: tried to allocate {wanted} GB. Reserved {reserved} GB, allocated {allocated} GB, largest free "
        f"block {largest} GB. How many GB are reserved and unused?",
        value,
        "GB",
        f"{reserved} - {allocated} = {value} GB, in pieces of {largest} GB at most: fragmentation, no lack of memory.",
        tolerance=0.02,
    )
