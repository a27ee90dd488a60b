"""Lab 10's claims, each once: the notebook prints them, the tour and the tests run `CLAIMS`.

Every function yields the rows of its receipt; without arguments it measures for itself.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from course.kit.receipts import Row, formula, row, titled
from course.lab10_fault_tolerance import experiments, experiments_breaks, experiments_production, experiments_steps
from course.lab10_fault_tolerance.experiments import MTBF_S, RESTART_S, SAVE_S, ElasticRun
from course.shared.table import Table, seconds, table
from minillm.predict import faults
from minillm.predict.faults import CheckpointCost
from minillm.serve.requests.summary import percentiles

HOUR, YEAR = 3600.0, 365 * 86400.0
STORAGE, COPY, LINK = 100e9, 20e9, 5e9  # bytes/s: all storage, one GPU to its host, one GPU's network


@titled("419 interruptions in 54 days on 16,384 GPUs")
def interruptions(guess_hours: float | None = None) -> Iterator[Row]:
    days = faults.LLAMA3_DAYS * 24 / faults.LLAMA3_INTERRUPTIONS
    yield formula("hours between two interruptions: 54 · 24 / 419", days, "h", guess=guess_hours)
    yield formula("    years between two of one GPU: times 16,384", faults.LLAMA3_GPU_MTBF_S / YEAR, "years")


@titled("killed after every operation, three kinds of power cut", open_rows=1, show="metadata first: kills")
def torn() -> Iterator[Row]:
    ours = experiments_breaks.ANSWERS.save, experiments_breaks.ANSWERS.load
    theirs = experiments_breaks.metadata_first, experiments_breaks.newest_with_a_manifest
    for name, (save, load), harmless in (("manifest last, renamed", ours, True), ("metadata first", theirs, False)):
        found = [experiments_breaks.torn(save, load, order) for order in ((0, 1, 2), (2, 1, 0))]
        count, kills = sum(each["torn"] for each in found), sum(each["kills"] for each in found)
        yield row(f"{name}: kills of {kills} after which load takes a torn one", 0 if harmless else None, count)
        yield row("    what load takes is always whole", harmless, count == 0)


@titled("saved by 4 ranks under ZeRO 3, restored in three other layouts", open_rows=2)
def reshard(found: Sequence[Sequence[tuple[str, int, int, int]]] | None = None) -> Iterator[Row]:
    found = found or experiments.reshard()
    layouts = {name: [each for rank in found for each in rank if each[0] == name] for name in experiments.LAYOUTS}
    everywhere = [each for ranks in layouts.values() for each in ranks]
    yield row("tensors that differ, on all ranks", 0, sum(other for _, other, *_ in everywhere))
    yield row("ranks that read more bytes than they hold", 0, sum(read > held for *_, read, held in everywhere))
    for name, ranks in layouts.items():
        read, held = max(read for *_, read, _ in ranks), max(held for *_, held in ranks)
        yield row(f"{name}: bytes read and held by the busiest rank", None, f"{read:,} and {held:,}")


@titled("resumed without one part: largest difference of 20 losses", open_rows=1)
def forgotten(found: dict[str, tuple[int | None, float]] | None = None) -> Iterator[Row]:
    found = dict(found or experiments.forgotten())
    complete = found.pop("nothing")[0] is None
    yield row(
        f"other losses, whichever of {len(found)} parts is forgotten", True, all(a > 0 for _, a in found.values())
    )
    yield row("nothing forgotten: the same bits", True, complete)
    for part, (first, apart) in found.items():
        yield row(f"    {part}: first loss that differs, largest difference", None, f"loss {first}, {apart:.2g}")


@titled(
    f"a save of {SAVE_S:.0f} s, a restart of {RESTART_S / 60:.0f} minutes, a failure every {MTBF_S / HOUR:.0f} hours",
    open_rows=1,
)
def intervals(played: dict[float, dict[str, float]] | None = None) -> Iterator[Row]:
    played = played or experiments.intervals()
    best = faults.young_interval(SAVE_S, MTBF_S)
    share = {interval: spent["useful"] / sum(spent.values()) for interval, spent in played.items()}
    reached = faults.goodput(best, SAVE_S, RESTART_S, MTBF_S)
    yield row(f"goodput at Young's interval, {best:.0f} s", reached, share[best], "", 0.01, kind="simulated")
    top = max(share.values())
    yield row("    no interval gains more than 0.005", True, top - share[best] < 0.005, kind="simulated")
    for factor in (0.25, 4):
        near = min(share, key=lambda each: abs(each - factor * best))
        expected = faults.goodput(near, SAVE_S, RESTART_S, MTBF_S)
        yield row(f"goodput at {factor:g} times as long", expected, share[near], "", 0.02, kind="simulated")


@titled("16,384 GPUs", open_rows=1)
def llama() -> Iterator[Row]:
    mtbf, days = faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, faults.LLAMA3_GPUS), faults.LLAMA3_DAYS * 86400
    for save, restart in ((60.0, 900.0), (3.0, 600.0)):
        interval = faults.daly_interval(save, mtbf)
        expected = faults.goodput(interval, save, restart, mtbf)
        job = faults.simulate_failures(20 * days, interval, save, restart, mtbf)
        name = f"a save of {save:.0f} s, a restart of {restart / 60:.0f} min"
        yield row(f"{name}: goodput", expected, job.goodput, "", 0.01, kind="simulated")
    yield row(
        "    failures in 54 days",
        faults.LLAMA3_INTERRUPTIONS,
        job.failures * days / job.total_s,
        "",
        0.05,
        kind="simulated",
    )


@titled("10 steps on 4 ranks", open_rows=1)
def slow(
    steps: Sequence[Sequence[tuple[float, float]]] | None = None, found: Sequence[int] | None = None
) -> Iterator[Row]:
    steps = steps or experiments.slow_rank()
    named = experiments.named(steps) if found is None else list(found)
    totals = [sum(step[rank][0] for step in steps) for rank in range(len(steps[0]))]
    own = [sum(step[rank][0] - step[rank][1] for step in steps) for rank in range(len(steps[0]))]
    yield row("named: rank 2", "2", ", ".join(map(str, named)) or "nobody", noisy=True)
    yield row("    seconds of 10 steps, ranks 0 to 3", None, tuple(totals), "s", noisy=True)
    yield row("    seconds of own work", None, tuple(own), "s", noisy=True)


def late_steps() -> Table:
    """Spread of step times, and which part made the late ones late."""
    steps = experiments_steps.late_steps()
    totals = [sum(step.values()) for step in steps]
    without = [sum(step.values()) - step["save"] for step in steps]
    lines = [
        (name, *map(seconds, (sum(each) / len(each), *percentiles(each, (0.5, 0.99)), max(each))))
        for name, each in (("all of a step", totals), ("without saves", without))
    ]
    late = ", ".join(f"{part} {count}" for part, count in experiments_steps.causes(steps).items() if count)
    columns = ("", "mean", "median", "p99", "longest")
    return table(f"{len(steps)} steps, measured; over twice the median by cause: {late}", columns, lines)


def rollback() -> Table:
    """The steps around each that was spoiled."""
    steps = experiments_steps.spoiled()
    near = {place + shift for place in experiments_steps.SPOILED for shift in (0, 1, 2)}
    lines = [
        (f"{steps[place].step}", f"{steps[place].position}", f"{steps[place].loss:.2f}", steps[place].rollback or "")
        for place in sorted(near)
    ]
    return table("weights spoiled twice", ("step", "windows before it", "loss", "rolled back"), lines)


@titled("a checkpoint of 2 ranks", open_rows=2)
def saves(found: Sequence[dict[str, Any]] | None = None) -> Iterator[Row]:
    found = found or experiments.saves()
    total, n = found[0]["total"], len(found)
    written = max(rank["foreground"].nbytes for rank in found)
    extra = max(rank["background"].peak - rank["foreground"].peak for rank in found)
    yield row("memory that a background save takes more: a copy", written, extra, "B", tolerance=0.02)
    stalls = [max(rank[how].stall_s for rank in found) for how in ("foreground", "background")]
    copying = max(rank["background"].copy_s for rank in found)
    name = "stall in the foreground, in the background, of the latter the copy"
    yield row(name, None, (*stalls, copying), "s", noisy=True)
    yield row("bytes that a rank writes: all / N", total / n, written, "B", tolerance=0.02)


@titled("killed twice, beside a run on one rank that nobody disturbed", open_rows=1, show="windows")
def killed(whole: ElasticRun | None = None, found: ElasticRun | None = None) -> Iterator[Row]:
    whole, found = whole or experiments.run(()), found or experiments.run()
    apart = max(abs(a - b) / b for a, b in zip(found.losses, whole.losses, strict=True))
    yield row("losses: relative difference below 1e-5", True, apart < 1e-5)
    yield row("    the largest", None, apart)
    same = found.positions == whole.positions == [step * experiments.WINDOWS for step in range(experiments.STEPS)]
    yield row("windows of the data: none twice, none left out", True, same)
    made = sum(event["event"] == "step" for event in found.events)
    lost = sum(step % experiments.SAVE_EVERY for step, *_ in experiments.KILLS)
    yield row("steps made, with those since the last save again", experiments.STEPS + lost, made)
    yield row("    attempts, on 3, 2 and 1 ranks", 3, found.spent.attempts)
    yield row("    ranks of the last step", 1, found.ranks[-1])
    yield row("    useful share of the time, with starts of seconds", None, found.spent.share, noisy=True)


@titled("a timeout of {timeout_s:g} s", open_rows=1)
def hang(found: tuple[str, float] | None = None, timeout_s: float = 1.5) -> Iterator[Row]:
    table, measured = found or experiments_breaks.hang(timeout_s)
    yield row("seconds without progress until it is known", timeout_s, measured, "s", tolerance=0.3, noisy=True)
    yield row("ranks that wait in the all-reduce", 2, experiments_breaks.waiting(table))


@titled("what a neighbour says", open_rows=1, show="waits for others|another machine")
def health() -> Iterator[Row]:
    for fault, found in zip(experiments_breaks.FAULTS, experiments_breaks.health(), strict=True):
        yield row(fault.what, fault.health.value, found.value)


@titled("Adam's first moment, ZeRO 1 on 4 ranks", open_rows=1)
def rank_0() -> Iterator[Row]:
    found = experiments_breaks.rank_0_saves()
    yield row("elements that rank 0 writes: 1/4", found["model"] // 4, found["rank 0"])
    yield row("    of the model", None, found["model"])


@titled("one flipped bit", open_rows=2)
def corruption(found: Sequence[dict[Any, Any]] | None = None) -> Iterator[Row]:
    found = found or experiments.corruption()
    clean, dirty = (found[0]["loss", flipped] for flipped in (False, True))
    named = found[0]["named", True]
    yield row("relative difference of the loss: below 1e-3", True, abs(dirty - clean) / clean < 1e-3)
    yield row("rank and weight that the hashes name", ((1,), found[0]["name"]), (named.ranks, named.name))
    yield row("without a fault: replicas that differ", 0, sum(each["named", False] is not None for each in found))


def too_often(found: dict[tuple[int, bool], float]) -> Table:
    """Measured share of the time in which training waits, by steps between saves."""
    lines = [
        (f"every {every} steps", *(share_of(found[every, background]) for background in (False, True)))
        for every in dict.fromkeys(every for every, _ in found)
    ]
    return table(
        "time that training stands still, measured", ("a save", "in the foreground", "in the background"), lines
    )


@titled("torch.distributed.checkpoint")
def distributed_checkpoint(found: dict[str, Any] | None = None) -> Iterator[Row]:
    found = found or experiments_production.distributed_checkpoint()
    yield row("loaded on 3 ranks: the same bits", [True] * 3, found["same"])
    same, complaint = found["flipped"]
    told = complaint or ("the same numbers" if same else "other numbers, no complaint")
    yield row("loaded after a bit was flipped", "other numbers, no complaint", told)
    yield row("without .metadata: refused", True, bool(found["torn"][1]))
    yield row("files", None, ", ".join(found["files"]))


@titled("torchrun --max-restarts 1", open_rows=1)
def elastic(found: Sequence[Sequence[tuple[int, int]]] | None = None) -> Iterator[Row]:
    first, second = found or experiments_production.elastic()
    counted = [tuple(step for restarts, step in first if restarts == attempt) for attempt in (0, 1)]
    yield row("rank 1 was started again, too", True, any(restarts == 1 for restarts, _ in second))
    yield row("rank 0 after: from the last save on", tuple(range(5, 11)), counted[1])
    yield row("rank 0 before it is killed", tuple(range(1, 7)), counted[0])


# Design questions.


def _cost(parameters: float, gpus: int, storage: float = STORAGE) -> CheckpointCost:
    return CheckpointCost(faults.checkpoint_bytes(parameters), gpus, storage, LINK, COPY)


def design_interval() -> Table:
    """70B on 2,048 GPUs: intervals, and what they leave."""
    cost, mtbf, restart = _cost(70e9, 2048), faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, 2048), 480.0
    young = faults.young_interval(cost.sync_stall_s, mtbf)
    rows = [
        (
            "foreground, Young's interval",
            seconds(young),
            seconds(cost.sync_stall_s),
            share_of(faults.wasted_share(young, cost.sync_stall_s, restart, mtbf)),
        )
    ]
    for interval in (60.0, 300.0, 1800.0):
        wasted = cost.async_wasted_share(interval, restart, mtbf)
        rows.append(
            (
                f"background, every {interval / 60:.0f} min",
                seconds(interval),
                seconds(cost.async_stall_s(interval)),
                share_of(wasted),
            )
        )
    rows.append(("restarts alone", "", "", share_of(restart / mtbf)))
    return table(
        f"70B, 2,048 GPUs: a failure every {mtbf / HOUR:.0f} h, a write of {cost.write_s:.1f} s",
        ("", "interval", "stall", "wasted"),
        rows,
    )


def design_lever() -> Table:
    """405B on 16,384 GPUs: which lever moves most."""
    mtbf, rows = faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, 16384), []
    for name, storage, restart, background in (
        ("foreground, 100 GB/s, restart of 8 min", STORAGE, 480.0, False),
        ("storage of 2 TB/s", 2e12, 480.0, False),
        ("in the background", STORAGE, 480.0, True),
        ("restart of 2 min", STORAGE, 120.0, False),
        ("in the background, restart of 2 min", STORAGE, 120.0, True),
    ):
        cost = _cost(405e9, 16384, storage)
        if background:
            interval = max(cost.write_s, faults.young_interval(cost.copy_s, mtbf))
            wasted = cost.async_wasted_share(interval, restart, mtbf)
        else:
            interval = faults.young_interval(cost.sync_stall_s, mtbf)
            wasted = faults.wasted_share(interval, cost.sync_stall_s, restart, mtbf)
        rows.append(
            (name, seconds(interval), share_of(wasted - restart / mtbf), share_of(restart / mtbf), share_of(wasted))
        )
    return table("405B, 16,384 GPUs", ("", "interval", "saves and lost work", "restarts", "wasted"), rows)


def share_of(value: float) -> str:
    return f"{value:.1%}"


CLAIMS = (
    torn, reshard, forgotten, intervals, slow, saves, killed, hang, health, rank_0, corruption, distributed_checkpoint,
)  # fmt: skip
