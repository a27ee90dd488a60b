"""Lab 04's claims, each once: the notebook prints them, the tour and the tests run `CLAIMS`.

Every function yields the rows of its receipt; without arguments it measures for itself.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from course.kit.receipts import Row, formula, row, titled
from course.lab04_zero import experiments as stages
from course.lab04_zero import experiments_breaks
from course.lab04_zero import experiments_links as links
from course.lab04_zero import experiments_torch as torch_peers
from course.lab04_zero.experiments import PSI, Setup
from course.shared.sharding import list_calls
from course.shared.table import Table, seconds, table
from minillm.comm import launch
from minillm.predict import comms
from minillm.predict.model import ADAM_MIXED

WORLD, BAD_RANK = 4, 2


Findings = dict[Setup, list[stages.ZeroRecord]]
STATE = {
    True: ("16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "16Ψ/N"),
    False: ("16Ψ", "8Ψ + 8Ψ/N", "4Ψ + 12Ψ/N", "16Ψ/N"),
}


@cache
def _compared() -> Findings:
    """DDP and the three stages on 4 ranks, in bf16 and fp32, and two stages with accumulation: one launch."""
    setups = [Setup(stage, WORLD, mixed=mixed) for mixed in (True, False) for stage in stages.STAGES]
    return stages.compare([*setups, *(Setup(stage, WORLD, accumulate=2) for stage in (2, 3))])


@cache
def _accidents() -> list[dict[str, Any]]:
    return launch(experiments_breaks.all_accidents, WORLD, BAD_RANK, device="cpu")


@titled("7B parameters on 8 ranks, bf16 with masters", open_rows=1)
def memory_7b(guess_gb: float | None = None) -> Iterator[Row]:
    for stage, guess in ((1, guess_gb), (2, None), (3, None)):
        gb = ADAM_MIXED.per_rank(7 * 10**9, 8, stage=stage) / 1e9
        yield formula(f"state per rank, ZeRO-{stage}: {STATE[True][stage]}", gb, "GB", guess=guess)


@titled("your ZeRO-1: 4 ranks beside one")
def trained(four: Sequence[float], one: Sequence[float]) -> Iterator[Row]:
    yield row(f"loss of step {len(four)} (formula: on one rank)", one[-1], four[-1], tolerance=1e-4)


@titled(f"state per rank, N = 4, Ψ = {PSI:,}", open_rows=1)
def state(found: Findings | None = None, world_size: int = WORLD) -> Iterator[Row]:
    found = found or _compared()
    for setup, ranks in sorted(found.items(), key=lambda each: (not each[0].mixed, -each[0].stage)):
        if setup.accumulate == 1 and setup.world_size == world_size:
            held = max(sum(rank.memory.values()) for rank in ranks)
            name = f"{setup.name}, {'bf16 with masters' if setup.mixed else 'fp32'}: {STATE[setup.mixed][setup.stage]}"
            yield row(name, stages.predicted_state(setup), held, "B", tolerance=0.02)


@titled(f"sent per rank and step, N = 4, P = {4 * PSI:,} B")
def sent(found: Findings | None = None, world_size: int = WORLD) -> Iterator[Row]:
    found = found or _compared()
    unit = 4 * PSI * (world_size - 1) / world_size
    exact = [setup for setup in found if setup.world_size == world_size and not setup.mixed]
    for many in sorted({setup.accumulate for setup in exact}):
        same = [setup for setup in exact if setup.accumulate == many]
        most = tuple(max(rank.sent for rank in found[setup]) for setup in same)
        times = ", ".join(f"{setup.name} {round(sent / unit, 2):g}" for setup, sent in zip(same, most, strict=True))
        name = f"{many} microbatch{'es' * (many > 1)}, in P(N-1)/N: {times}"
        yield row(name, tuple(map(stages.predicted_bytes, same)), most, "B")


@titled("fp32")
def same_losses(found: Findings | None = None) -> Iterator[Row]:
    found = found or _compared()
    exact = {setup: ranks for setup, ranks in found.items() if not setup.mixed}
    baseline = exact[Setup(0, WORLD)][0].losses[-1]
    off = max(abs(ranks[0].losses[-1] / baseline - 1) for ranks in exact.values())
    yield row("last loss of every stage, N and K: DDP's on 4 ranks, to 1e-5", True, off < 1e-5)


@titled("what one block ahead gains and costs", open_rows=1)
def prefetch(clocks: dict[int, dict[str, Any]] | None = None) -> Iterator[Row]:
    clocks = clocks or links.stage3_on_a_clock((0, 1))
    held = tuple(numbers["units_held"] for numbers in clocks.values())
    name = f"blocks whole at once, prefetch {' and '.join(map(str, clocks))}"
    yield row(name, tuple(ahead + 1 for ahead in clocks), held)
    for ahead, numbers in clocks.items():
        seconds = numbers["predicted_s"], numbers["measured_s"]
        yield row(f"prefetch {ahead}: one step, emulated link", *seconds, "s", tolerance=0.3, noisy=True)


@titled("ZeRO-2 on 2 ranks, bf16 with masters, offloaded", open_rows=1, show="left in")
def offload(lines: Sequence[tuple[str, float, float, int, bool]]) -> Iterator[Row]:
    for where, down, up, _, same in lines:
        yield row(f"{where}: gradients down, weights up per step, 2Ψ each", (2 * PSI, 2 * PSI), (down, up), "B")
        yield row("    the same losses as without", True, same)
    names = ", ".join(where for where, *_ in lines)
    yield row(f"optimizer bytes left in the process: {names}", None, tuple(left for *_, left, _ in lines), "B")


@titled("one gradient, four shards")
def clipping(found: Sequence[dict[str, Any]] | None = None) -> Iterator[Row]:
    found = found or [rank["clip"] for rank in _accidents()]
    local, true, n = [each["local"] for each in found], found[0]["global"], len(found)
    mean = (sum(norm**2 for norm in local) / n) ** 0.5
    yield row("local norms, root mean square / global: 1/√N", n**-0.5, mean / true, "", 1e-4)
    yield row("clipped to 0.1 by local norms: √N times too long", 0.1 * n**0.5, found[0]["clipped to"], "", 1e-3)
    yield row("    and turned by (degrees)", None, found[0]["degrees"])
    root = sum(norm**2 for norm in local) ** 0.5
    yield row("root of the sum of squares (formula: minillm's global norm)", true, root, "", 1e-4)


@titled("every rank its own seed: how many weights of the model are each rank's?")
def seeds(found: dict[str, list[int]] | None = None) -> Iterator[Row]:
    found = found or _accidents()[0]["seeds"]
    whole, n = found["elements"][0], len(found["FullyShard"])
    due, held = ((whole // n,) * n, (whole, *[0] * (n - 1))), (tuple(found["fully_shard"]), tuple(found["FullyShard"]))
    yield row("torch's fully_shard, minillm's FullyShard", due, held)


@titled("Adam's first moment in the checkpoint", open_rows=1)
def saving(found: dict[str, int] | None = None) -> Iterator[Row]:
    found = found or _accidents()[0]["save"]
    yield row("rank 0 saves its optimizer.state_dict(): elements", PSI // WORLD, found["inner"])
    yield row("every rank calls state_dict(): elements", found["model"], found["whole"])


@titled("an overflow in the shard of rank {bad_rank}")
def scaler(found: Sequence[dict[str, Any]] | None = None, bad_rank: int = BAD_RANK) -> Iterator[Row]:
    found = found or [rank["scaler"] for rank in _accidents()]
    stepped = sum(each["stepped"] for each in found)
    yield row("one shard overflows, plain GradScaler: ranks that step", len(found) - 1, stepped)
    yield row("    loss scales afterwards", None, tuple(each["scale"] for each in found))


@titled("stage 3 in bf16 on 4 ranks, one step", open_rows=1)
def reduction(found: dict[str, float] | None = None) -> Iterator[Row]:
    """P is rounded up to whole shards, hence the tolerance."""
    found = found or launch(stages.reduced_in, WORLD, device="cpu")[0]
    more, errors = found["fp32 bytes"] / found["bf16 bytes"], (found["bf16 error"], found["fp32 error"])
    yield row(f"error of the mean: gradients in bf16, in fp32 ({more:.2f} times as many bytes)", None, errors)
    yield row("gradients in fp32 instead of bf16: times as many bytes", 8 / 6, more, "", 0.05)
    for name, size in (("bf16", 2), ("fp32", 4)):
        due = (2 + 2 + size) * PSI * (WORLD - 1) / WORLD
        sent = found[f"{name} bytes"]
        yield row(f"gradients in {name}: sent, (2 + 2 + {size})·Ψ·3/4", due, sent, "B", tolerance=0.05)


@titled("bytes sent per rank and step")
def hybrid(found: dict[str, int]) -> Iterator[Row]:
    """On 2 nodes with 2 ranks. Over 4 ranks P is rounded up to whole shards, hence the tolerance."""
    p = 4 * PSI
    name = "hybrid: inside the node 3·P·1/2, across nodes 2·(P/2)·1/2"
    yield row(name, (3 * p / 2, p / 2), (found["inside"], found["across"]), "B")
    yield row("stage 3 over 4 ranks: sent per rank, 3·P·3/4", 3 * p * 3 / 4, found["all"], "B", tolerance=0.1)


@titled("4 ranks after 3 steps")
def bug_hunt(found: dict[str, Any]) -> Iterator[Row]:
    yield row("losses", None, tuple(found["losses"]))
    yield row("weights: distance of ranks 0 to 3 from rank 0's", None, tuple(found["apart"]))


@titled("emulated slow link: formula for communication, measured whole steps", open_rows=1)
def slow_link(found: dict[str, Any]) -> Iterator[Row]:
    times = {(line["stage"], line["accumulate"]): (line["predicted_s"], line["measured_s"]) for line in found["rows"]}
    for (stage, many), both in reversed(times.items()):
        if stage != "DDP":
            shares = (ours / ddp for ours, ddp in zip(both, times["DDP", many], strict=True))
            name = f"{stage}, {many} microbatch{'es' * (many > 1)}: times as long as DDP"
            yield row(name, *shares, tolerance=0.5, noisy=True)


@titled(f"torch {torch.__version__} on gloo, sent per rank and step, P = {4 * PSI:,} B", open_rows=1, show="FSDP2, 1 ")
def peers(theirs: Sequence[dict[str, Any]], one_step: float) -> Iterator[Row]:
    blocks, unit = stages.MODEL.num_layers, 4 * PSI * 3 / 4
    due = {
        "DDP + ZeroRedundancyOptimizer": "1 allreduce, 40 broadcast",  # one bucket, then a broadcast per parameter
        "FSDP2": f"{2 * blocks + 1} allgather_base, {blocks + 1} reduce_scatter_base",
    }
    calls = {name: list_calls(theirs[0][name]["calls"]) for name in due}
    for line in torch_peers.byte_rows([{name: rank[name] for name in due} for rank in theirs]):
        many = f"{line['accumulate']} microbatch{'es' * (line['accumulate'] > 1)}"
        name = f"{line['name']}, {many}: {line['sent'] / unit:.2f} P(N-1)/N"
        name += f", {calls[line['name']]}" if line["accumulate"] == 1 else ""
        yield row(name, line["predicted"], line["sent"], "B", tolerance=0.05, noisy=True)
    for name, expected in due.items():
        yield row(f"{name}: collectives of a step", expected, calls[name])
    off = max(abs(peer["losses"][1] / one_step - 1) for peer in theirs[0].values())
    yield row("all have minillm's loss, to 1e-4", True, off < 1e-4)


@titled("fp32, N = 4: who shards what", open_rows=1)
def held_by_peers(ours: dict[str, int], theirs: dict[str, Any]) -> Iterator[Row]:
    held = {"minillm FullyShard": ours, **{name: peer["memory"] for name, peer in theirs.items()}}
    held[f"accelerate {version('accelerate')}"] = held.pop("accelerate")
    for name, memory in reversed(held.items()):  # accelerate first
        yield row(f"{name}: bytes of state per rank / Ψ", None, sum(memory.values()) / PSI)


def design_sharding() -> Table:
    """13B on 64 GPUs in nodes of 8, 8 microbatches: state per GPU, seconds of communication per step."""
    p, inside, across, rows = 2 * 13e9, 400e9, 50e9, []
    for name, n, stage, times in (
        ("ZeRO-1 over 64", 64, 1, 2),
        ("ZeRO-2 over 64", 64, 2, 9),
        ("ZeRO-3 over 64", 64, 3, 24),
        ("ZeRO-3 over 8, replicated over 8 nodes", 8, 3, 24),
    ):
        held = ADAM_MIXED.per_rank(13 * 10**9, n, stage) / 1e9
        took = times * p * (n - 1) / n / (inside if n == 8 else across)
        took += 2 * p / 8 * 7 / 8 / across if n == 8 else 0  # shards of gradients across nodes, once per step
        rows.append((name, f"{held:.1f} GB", f"{took:.1f} s"))
    return table("13B, 64 GPUs, 8 microbatches", ("", "state per GPU", "communication"), rows)


def design_hiding() -> Table:
    """One block of 218M parameters over 8 GPUs: its compute beside its two gathers and its reduce-scatter."""
    rows = []
    for tokens in (4096, 8192, 16384):
        links = [3 * comms.ring_all_gather(218 * 10**6, 2, 8).time(1e-5, speed) for speed in (50e9, 400e9)]
        rows.append((f"{tokens:,}", seconds(6 * 218e6 * tokens / 400e12), *map(seconds, links)))
    return table("one block", ("tokens per GPU", "compute", "link of 50 GB/s", "link of 400 GB/s"), rows)


CLAIMS = (state, sent, same_losses, reduction, prefetch, clipping, seeds, saving, scaler)
