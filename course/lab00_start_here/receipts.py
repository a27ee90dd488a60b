"""Stop 00: ranks start and answer, a rank that stays away is found, and what this machine can do."""

import time
from collections.abc import Iterator

import torch

from minillm.comm import Group, HangError, RankError, launch
from minillm.labkit.receipts import Row, row
from minillm.measure import machine
from minillm.predict import roofline

WIDTH = 4096  # 64 MiB of fp32: more than most caches hold


def rows() -> Iterator[Row]:
    """Launch, errors, hangs and the machine card."""
    yield row("4 ranks agree on the sum of their numbers", [6.0] * 4, launch(_sum_of_ranks, 4))
    try:
        launch(_fail_on_rank_2, 4)
        cause = None
    except RankError as error:
        cause = error.rank
    yield row("a failing rank is named, not its echoes", 2, cause)
    try:
        launch(_stay_away_on_rank_1, 3, timeout=1.0)
        table = ""
    except HangError as error:
        table = error.table
    blamed = {line.split()[-1] for line in table.splitlines() if "all_reduce" in line}
    yield row("a rank that never enters the collective is named", {"1"}, blamed)

    card = machine()
    yield row("peak matmul rate, fp32", None, card.peak_flops, "FLOP/s")
    yield row("memory bandwidth", None, card.memory_bandwidth_bytes_per_s, "B/s")
    for world_size, fit in sorted(card.links.items()):
        yield row(f"latency of a message round, {world_size} ranks", None, fit.latency_s, "s")
        yield row(f"bandwidth of a message round, {world_size} ranks", None, fit.bandwidth_bytes_per_s, "B/s")
    for m in (1, 256):
        intensity = roofline.matmul_intensity(m, WIDTH, WIDTH, 4)
        roof = roofline.attainable(intensity, card.peak_flops, card.memory_bandwidth_bytes_per_s)
        yield row(f"share of the roof reached by a {m} x {WIDTH} x {WIDTH} matmul", None, _matmul_rate(m) / roof)


def _sum_of_ranks(group: Group) -> float:
    return group.all_reduce(torch.tensor([float(group.rank)])).item()


def _fail_on_rank_2(group: Group) -> None:
    if group.rank == 2:
        raise RuntimeError("this rank fails on purpose")
    group.all_reduce(torch.ones(8))


def _stay_away_on_rank_1(group: Group) -> None:
    if group.rank == 1:
        time.sleep(60)
    group.all_reduce(torch.ones(8))


def _matmul_rate(m: int) -> float:
    """FLOP/s of the fastest of a few runs."""
    a, b = torch.randn(m, WIDTH), torch.randn(WIDTH, WIDTH)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return roofline.matmul_flops(m, WIDTH, WIDTH) / min(seconds)


CLAIMS = (rows,)
