"""The formulas that cards print, each beside what counting gives: simulations and brute force, no closed form.

FORMULAS: the text as it is printed, and pairs of what it says for some sizes and of what was counted.
"""

import itertools
import math
import random


def ring(ranks: int, size: int = 840) -> tuple[int, int]:
    """(bytes that each rank sends, rounds) of a ring all-reduce, counted message by message on real sums."""
    own = [[rank + 10 * part for part in range(ranks)] for rank in range(ranks)]
    wanted = [sum(row[part] for row in own) for part in range(ranks)]
    sent, rounds = 0, 0
    for phase, step in itertools.product(("reduce", "gather"), range(ranks - 1)):
        first = 0 if phase == "reduce" else 1
        moving = [(rank, (rank + first - step) % ranks) for rank in range(ranks)]
        values = [own[rank][part] for rank, part in moving]
        for (rank, part), value in zip(moving, values, strict=True):
            there = own[(rank + 1) % ranks]
            there[part] = there[part] + value if phase == "reduce" else value
        sent, rounds = sent + size // ranks, rounds + 1
    assert all(row == wanted for row in own)
    return sent, rounds


def doubling_rounds(ranks: int) -> int:
    """Rounds until every rank knows every other's number, if partners exchange all they know."""
    known, rounds = [{rank} for rank in range(ranks)], 0
    while any(len(each) < ranks for each in known):
        known = [known[rank] | known[rank ^ (1 << rounds)] for rank in range(ranks)]
        rounds += 1
    return rounds


def two_level_rounds(nodes: int, gpus: int) -> int:
    """A reduce-scatter inside, a ring all-reduce between, an all-gather inside."""
    return ring(gpus)[1] // 2 + ring(nodes)[1] + ring(gpus)[1] // 2


def causal_shares(ranks: int, order: str) -> list[float]:
    """Of all pairs (query, key seen), those of each rank's queries; parts are counted as halves on the diagonal."""
    parts = ranks if order == "contiguous" else 2 * ranks
    work = [part + 0.5 for part in range(parts)]
    mine = {r: [r] if order == "contiguous" else [r, parts - 1 - r] for r in range(ranks)}
    return [sum(work[part] for part in mine[rank]) / sum(work) for rank in range(ranks)]


def makespan(stages: int, microbatches: int) -> tuple[int, int]:
    """(steps until the last one is through, idle steps of a stage) of GPipe with unit times, place by place."""
    done = {}
    for microbatch, stage in itertools.product(range(microbatches), range(stages)):
        done[microbatch, stage] = 1 + max(done.get((microbatch - 1, stage), 0), done.get((microbatch, stage - 1), 0))
    end = 2 * max(done.values())
    return end, end - 2 * microbatches


def mean_wait(load: float) -> float:
    """Of a random queue: the mean number of exponential services in front, term by term."""
    return sum(k * load**k * (1 - load) for k in range(4000))


def tail(load: float, share: float) -> float:
    """The wait that is exceeded with that probability, found by halving an interval: P(wait > t) by Poisson sums."""
    low, high = 0.0, 400.0
    for _ in range(60):
        middle = (low + high) / 2
        # with k in front, each with probability (1 - load) load^k, the wait is a sum of k services
        exceeds, at_most = 0.0, 0.0
        term = math.exp(-middle)
        for k in range(1, 1200):
            at_most += term  # fewer than k services end within that time
            term *= middle / k
            exceeds += (1 - load) * load**k * at_most
        low, high = (middle, high) if exceeds > share else (low, middle)
    return low


def drafted(alpha: float, k: int) -> float:
    """Tokens of a pass: one, and each draft token if all before it were accepted."""
    return sum(alpha**i for i in range(k + 1))


def best_interval(save: float, mtbf: float) -> float:
    """Where a save's cost and half an interval per failure are least, found by trying tenths of a second: every
    hundredth of them first, then those around the best."""

    def cost(tenths: int) -> float:
        return 10 * save / tenths + tenths / 20 / mtbf

    near = min(range(10, 400_000, 100), key=cost)
    return min(range(max(10, near - 100), near + 101), key=cost) / 10


def accepted_and_rest(p: list[float], q: list[float]) -> list[float]:
    """The distribution of a speculated token, by drawing a hundred thousand."""
    draw, counts = random.Random(0), [0] * len(p)
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    for token in draw.choices(range(len(q)), q, k=100_000):
        keep = draw.random() < min(1.0, p[token] / q[token])
        counts[token if keep else draw.choices(range(len(p)), rest)[0]] += 1
    return [count / 100_000 for count in counts]


def overlap(p: list[float], q: list[float]) -> float:
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def variation(p: list[float], q: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def flops_of_a_product(m: int, k: int, n: int) -> int:
    """A multiplication and an addition for each term of each element."""
    return sum(2 for _ in itertools.product(range(m), range(k), range(n)))


def zero_traffic(stage: int, microbatches: int) -> float:
    """In P(N-1)/N per rank: reduce-scatters of gradients and all-gathers of weights, collective by collective."""
    calls = []
    for microbatch in range(microbatches):
        last = microbatch == microbatches - 1
        calls += ["gather for forward", "gather for backward"] if stage == 3 else []
        calls += ["reduce"] if stage >= 2 or last else []
    return len(calls + (["gather the update"] if stage < 3 else []))


PAIRS = list(itertools.combinations(range(8), 2))
BEST = best_interval(30, 10800)
HALF, TILTED = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
FORMULAS = {
    "2P(N-1)/N": [(2 * 840 * (n - 1) / n, ring(n)[0]) for n in (2, 3, 8)],
    "P(N-1)/N": [(840 * (n - 1) / n, ring(n)[0] / 2) for n in (2, 3, 8)],
    "2(N-1)": [(2 * (n - 1), ring(n)[1]) for n in (2, 3, 16)],
    "2(N-1)/N": [(2 * (n - 1) / n, ring(n)[0] / 840) for n in (2, 8)],
    "(N-1)/N": [((n - 1) / n, sum(1 / n for part in range(n) if part != 0)) for n in (2, 8)],
    "log2 N": [(math.log2(n), doubling_rounds(n)) for n in (2, 8, 64)],
    "P(N-1)": [(840 * (n - 1), sum(840 for rank in range(n) if rank != 0)) for n in (2, 9)],
    "(N-1)P": [((n - 1) * 840, sum(840 for rank in range(n) if rank != 0)) for n in (2, 9)],
    "2(g-1) + 2(n-1)": [(2 * 7 + 2 * 15, two_level_rounds(16, 8))],
    "2(gn-1)": [(2 * 23, ring(24)[1])],
    "2(n-1)/n · P": [(2 * 7 / 8 * 840, ring(8)[0])],
    "1/g": [(1 / 8, ring(8, 8 * 840)[0] / 14 / (8 * 840))],
    "2 · dp index + tp index": [
        (2 * dp + tp, sorted(itertools.product(range(4), range(2))).index((dp, tp))) for dp, tp in ((1, 0), (3, 1))
    ],
    "(2r+1)/N²": [((2 * r + 1) / 16, causal_shares(4, "contiguous")[r]) for r in range(4)],
    "2N parts; rank r takes part r and part 2N-1-r": [(1 / 4, share) for share in causal_shares(4, "zigzag")],
    "4·L·q·S/2 equals 2 FLOPs per weight": [  # scores and weighted values of the keys up to each query, on average
        (4 * 16 * 400 / 2, sum((2 + 2) * 16 for query in range(400) for key in range(query + 1)) / 400)
    ],
    "N-1 times": [(7, ring(8)[1] / 2)],
    "1/N": [(1 / 8, len([rank for rank in range(64) if rank % 8 == 3]) / 64)],
    "8 · (1 - (1 - 2/8)^16)": [
        (8 * (1 - 0.75**2), sum(len({*a, *b}) for a, b in itertools.product(PAIRS, repeat=2)) / len(PAIRS) ** 2)
    ],
    "1 - mean/max": [(1 - 5 / 9, sum(9 - length for length in (1, 9, 5, 5)) / (4 * 9))],
    "2P, 2P and 3P against 2P": [
        (units, zero_traffic(stage, 1)) for stage, units in ((0, 2), (1, 2), (2, 2), (3, 3))
    ],
    "still 2P": [(2, zero_traffic(1, 4))],
    "5P in all": [(5, zero_traffic(2, 4))],
    "12P": [(12, zero_traffic(3, 4))],
    "DDP's 2P": [(2, zero_traffic(0, 4))],
    "T = 4.5·H": [  # 3 passes over 12·H² weights against 4 all-reduces of T·H
        (4.5 * 64, next(t for t in range(1, 999) if 4 * 2 * t * 64 >= 3 * 12 * 64**2))
    ],
    "12·H²": [(12 * 64**2, 64 * (3 * 64) + 64 * 64 + 64 * 256 + 256 * 64)],
    "p + n - 1": [(3 + 4 - 1, len([1, 2, 3, *[4, 5, 6, 7][:-1]]))],
    "2 · layers · kv heads · head_dim · 2 bytes": [
        (2 * 3 * 2 * 4 * 2, sum(2 for _ in itertools.product("kv", range(3), range(2), range(4))))
    ],
    "√(2 · cost of a save · MTBF)": [(math.sqrt(2 * 30 * 10800), best_interval(30, 10800))],
    "save/t + t/(2 · MTBF)": [(0.5, sum(k / 1000 for k in range(1001)) / 1001)],  # a failure strikes anywhere in t
    "√(2 · save/MTBF)": [(math.sqrt(2 * 30 / 10800), 30 / BEST + BEST / 2 / 10800)],
    "2·m·k·n": [(2 * 3 * 4 * 5, flops_of_a_product(3, 4, 5))],
    "m·k + k·n + m·n": [(12 + 20 + 15, sum(rows * columns for rows, columns in ((3, 4), (4, 5), (3, 5))))],
    "6N: 2 forward, 4 backward": [(6 * 20, 3 * flops_of_a_product(1, 4, 5))],
    "(n-1)/(M+n-1)": [((n - 1) / (m + n - 1), makespan(n, m)[1] / makespan(n, m)[0]) for n, m in ((4, 8), (8, 3))],
    "(n-1)/M": [((n - 1) / m, makespan(n, m)[1] / (2 * m)) for n, m in ((4, 8), (8, 3))],
    "3(n-1)": [
        (3 * (n - 1), next(m for m in range(1, 99) if 4 * makespan(n, m)[1] <= makespan(n, m)[0])) for n in (2, 4, 8)
    ],
    "2(n-1) · batch · seq · hidden · bytes": [
        (2 * 3 * 8 * 5 * 2, sum(8 * 5 * 2 for a, b in itertools.product(range(4), repeat=2) if abs(a - b) == 1))
    ],
    "1/n of the layers": [(1 / 8, len(range(0, 80, 8)) / 80)],
    "ρ/(1-ρ)": [(load / (1 - load), mean_wait(load)) for load in (0.5, 0.85, 0.95)],
    "ln(ρ/0.01)/(1-ρ)": [(math.log(load / 0.01) / (1 - load), tail(load, 0.01)) for load in (0.5, 0.85)],
    "ln(0.85/0.01)/(1-0.85)": [(math.log(85) / 0.15, tail(0.85, 0.01))],
    "min(1, p(x)/q(x))": [(a, b) for a, b in zip(HALF, accepted_and_rest(HALF, TILTED), strict=True)],
    "max(0, p-q)": [(1 - overlap(HALF, TILTED), sum(max(0.0, a - b) for a, b in zip(HALF, TILTED, strict=True)))],
    "min(1, p/q)": [(overlap(HALF, TILTED), sum(q * min(1, p / q) for p, q in zip(HALF, TILTED, strict=True)))],
    "1 - Σ min": [(1 - overlap(HALF, TILTED), variation(HALF, TILTED))],
    "1 - total variation": [(1 - variation(HALF, TILTED), overlap(HALF, TILTED))],
    "(1 - 0.8^5)/(1 - 0.8)": [((1 - 0.8**5) / 0.2, drafted(0.8, 4))],
    "4L · 2(t-1)/t · tokens · H · 2": [(4 * 2 * 7 / 8 * 840, 4 * ring(8)[0])],
    "(t-1)/t · tokens · V · 4": [(7 / 8 * 840, ring(8)[0] / 2)],
    "s/2": [(0.5, max(abs(x / 1000 - round(x / 1000)) for x in range(5000)))],
    "n - 1 - s": [(3 - s, len([later for later in range(4) if later > s])) for s in range(4)],
}  # fmt: skip
