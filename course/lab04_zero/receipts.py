"""Stop 04: every stage of ZeRO once: bytes held and sent, the losses of data parallelism; and what breaks silently."""

from collections.abc import Iterator

from course.lab04_zero import experiments as stages
from course.lab04_zero import experiments_breaks as breaks
from course.lab04_zero import experiments_links as links
from course.lab04_zero.experiments import PSI, Setup
from minillm.comm import launch
from minillm.labkit.receipts import Row, row

WORLD, BAD_RANK = 4, 2


def rows() -> Iterator[Row]:
    """State and bytes of DDP and the three stages on 4 ranks, stage 3 on an emulated link, four accidents."""
    setups = [Setup(stage, WORLD, mixed=mixed) for mixed in (True, False) for stage in stages.STAGES]
    setups += [Setup(stage, WORLD, accumulate=2) for stage in (2, 3)]
    found = stages.compare(setups)
    baseline = found[Setup(0, WORLD)][0].losses[-1]
    for setup, ranks in found.items():
        name = f"{setup.name}, {'bf16 with masters' if setup.mixed else 'fp32'}"
        if setup.accumulate == 1:
            held = max(sum(rank.memory.values()) for rank in ranks)
            yield row(f"{name}: state per rank", stages.predicted_state(setup), held, "B", tolerance=0.02)
        name += f", {setup.accumulate} microbatches" if setup.accumulate > 1 else ""
        yield row(f"{name}: sent per rank and step", stages.predicted_bytes(setup), max(r.sent for r in ranks), "B")
        if not setup.mixed:
            yield row(f"{name}: loss after two steps, beside DDP", baseline, ranks[0].losses[-1], "", tolerance=1e-5)

    for prefetch, numbers in links.stage3_on_a_clock((0, 1)).items():
        yield row(f"stage 3, prefetch {prefetch}: blocks whole at once", prefetch + 1, numbers["units_held"])
        yield row("    step on an emulated link, predicted", None, numbers["predicted_s"], "s")
        yield row("    measured", None, numbers["measured_s"], "s")

    ranks = launch(breaks.all_accidents, WORLD, BAD_RANK, device="cpu")
    local, clipped = [rank["clip"]["local"] for rank in ranks], ranks[0]["clip"]
    yield row("global norm from local ones", clipped["global"], sum(norm**2 for norm in local) ** 0.5, "", 1e-4)
    yield row("clipped to 0.1 by local norms: √N times too long", 0.1 * WORLD**0.5, clipped["clipped to"], "", 1e-3)
    seeds = ranks[0]["seeds"]
    share = seeds["elements"][0] // WORLD
    yield row("fully_shard, seeded by rank: weights from each rank", (share,) * WORLD, tuple(seeds["fully_shard"]))
    yield row("FullyShard, seeded by rank", (WORLD * share, 0, 0, 0), tuple(seeds["FullyShard"]))
    yield row("rank 0's optimizer alone: elements saved", PSI // WORLD, ranks[0]["save"]["inner"])
    yield row("state_dict() of all ranks", PSI, ranks[0]["save"]["whole"])
    stepped = sum(rank["scaler"]["stepped"] for rank in ranks)
    yield row("a plain GradScaler, one shard overflows: ranks that step", WORLD - 1, stepped)


CLAIMS = (rows,)
