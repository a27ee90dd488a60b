"""Measures one round of a ring: N ranks on loopback, each of which sends right and receives from the left at once.

`python -m minillm.comm.probe --world-sizes 2,3,4` prints, on the last line of its output, for every N the median
seconds of one round by message size: {"2": [[1024, 4.1e-05], ...], ...}. The N ranks share this machine's cores, as the
ranks of a lab do, so the latency and bandwidth fitted to these samples are those of a ring round under contention.

It uses plain torch.distributed, not minillm's own groups, which are compared with its results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from minillm.measure.wire import loopback

SIZES = tuple(2**k for k in (10, 12, 14, 16, 18, 20, 22, 23))  # bytes, 1 KiB to 8 MiB
BATCH_S = 0.002  # rounds are timed in batches about this long, so that starting together costs little
REPEATS = 15  # sweeps over all sizes: a burst of somebody else's work spoils one sweep, not one size
MAX_WORLD_SIZE = 64


def probe(world_sizes: list[int], sizes: tuple[int, ...] = SIZES) -> dict[int, list[tuple[int, float]]]:
    """Median seconds of a neighbour shift: {world_size: [(bytes, seconds), ...]}. Starts max(world_sizes) processes."""
    wrong = [n for n in world_sizes if not 2 <= n <= MAX_WORLD_SIZE]
    if wrong or not world_sizes:
        raise ValueError(f"world sizes are {world_sizes}; a ring round takes 2 to {MAX_WORLD_SIZE} ranks")
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":
        multiprocessing.get_context(method).set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory(prefix="minillm-probe-") as folder:
        args = (folder, world_sizes, sizes)
        mp.start_processes(_rank, args, nprocs=max(world_sizes), start_method=method)
        return {int(n): rows for n, rows in json.loads((Path(folder) / "samples.json").read_text()).items()}


def _rank(rank: int, folder: str, world_sizes: list[int], sizes: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    everyone = max(world_sizes)
    store = dist.FileStore(os.path.join(folder, "store"), everyone)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=everyone)
    samples = {}
    for n in world_sizes:
        group = dist.new_group(list(range(n)))
        if rank < n:
            samples[n] = _sweep(rank, n, sizes, group)
        dist.barrier()  # the others sleep here and leave the cores alone
    if rank == 0:
        (Path(folder) / "samples.json").write_text(json.dumps(samples))
    dist.destroy_process_group()


def _sweep(rank: int, n: int, sizes: tuple[int, ...], group: dist.ProcessGroup) -> list[tuple[int, float]]:
    """Median over the sweeps of the seconds per round, for each size."""
    buffers = [(torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)) for size in sizes]
    guesses = [min(_round_seconds(rank, n, *pair, 3, group) for _ in range(3)) for pair in buffers]  # warms up, too
    counts = [max(1, round(BATCH_S / guess)) for guess in guesses]
    batches = [
        [_round_seconds(rank, n, *pair, count, group) for pair, count in zip(buffers, counts, strict=True)]
        for _ in range(REPEATS)
    ]
    return list(zip(sizes, map(statistics.median, zip(*batches, strict=True)), strict=True))


def _round_seconds(
    rank: int, n: int, sent: torch.Tensor, received: torch.Tensor, count: int, group: dist.ProcessGroup
) -> float:
    """Seconds per round of the slowest rank, over `count` rounds; every rank returns the same number."""
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(count):
        outgoing = dist.isend(sent, (rank + 1) % n, group)
        dist.irecv(received, (rank - 1) % n, group).wait()
        outgoing.wait()
    seconds = torch.tensor((time.perf_counter() - start) / count, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return seconds.item()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.comm.probe", description=__doc__.splitlines()[0])
    parser.add_argument("--world-sizes", default="2,3,4", help="comma-separated, for example 2,3,4")
    text = parser.parse_args(argv).world_sizes
    try:
        world_sizes = [int(n) for n in text.split(",")]
        print(json.dumps(probe(world_sizes)))
    except ValueError as error:
        parser.error(f"--world-sizes {text}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
