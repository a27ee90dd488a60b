"""Lab 21's claims: a queue's mean and tail by formula and in a simulation, and what a bound does to both."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from course.kit.receipts import Row, formula, row, titled
from course.lab21_design_serving import experiments, experiments_cold, problems, problems_running
from course.shared.cases import Cases
from course.shared.table import Table, table
from course.shared.table import seconds as as_seconds
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster
from minillm.predict.planner.serving import rank_serving
from minillm.predict.serving import queueing

CASES = Cases(Path(__file__).with_name("answers.toml"), problems, problems_running)
decide, answer = CASES.decide, CASES.answer


@titled("waits in service times, random arrivals and exponential services", open_rows=6)
def queue_at_loads() -> Iterator[Row]:
    """Mean and 99th percentile of the wait, in service times."""
    for load in (0.5, 0.7, 0.85):
        waits = experiments.simulated_waits(load)
        mean, tail = queueing.mean_wait(load, 1.0), queueing.wait_quantile(load, 1.0, 0.99)
        yield row(f"mean wait at {100 * load:.0f} % load", mean, sum(waits) / len(waits), "", 0.1, kind="simulated")
        yield row("    p99", tail, experiments.quantile(waits, 0.99), "", 0.15, kind="simulated")


@titled("a queue of ten places at 85 % load", open_rows=4)
def bounded_queue() -> Iterator[Row]:
    """Ten places bound the tail and reject some."""
    tail, rejected = experiments.bounded(0.85, 10)
    unbounded = experiments.quantile(experiments.simulated_waits(0.85), 0.99)
    load, room = 0.85, 11  # ten that wait and one in service
    share = (1 - load) * load**room / (1 - load ** (room + 1))
    yield row("share rejected", share, rejected, "", 0.15, kind="simulated")
    yield row("p99 of the wait below that without a bound", True, tail < unbounded, kind="simulated")
    yield row("    with ten places, service times", None, round(tail, 1), kind="simulated")
    yield row("    without a bound", queueing.wait_quantile(load, 1.0, 0.99), unbounded, "", 0.15, kind="simulated")


@titled("{model} on {gpus} H100, prompts of 1,000 and answers of 300 tokens", show="TPOT|sequences")
def capacity(model: str = "llama-3-70b", gpus: int = 8) -> Iterator[Row]:
    """What a node serves under three limits on the time per output token."""
    for limit in (0.02, 0.05, 0.2):
        try:
            best = rank_serving(architecture(model), cluster("h100", gpus), 1000, 300, tpot=limit)[0]
        except ValueError:
            continue
        layout = f"tp {best.tp}, pp {best.pp}, {best.replicas} replicas"
        yield formula(f"TPOT of at most {limit * 1e3:.0f} ms: {layout}", best.tokens_per_s, "tokens/s")
        yield formula("    sequences per replica", best.sequences)
        yield formula(f"    GiB of cache per GPU at {limit * 1e3:.0f} ms", round(best.cache / GIB, 1))


def first_requests() -> Table:
    """The first request of a process beside later ones."""
    took = experiments_cold.in_a_new_process()
    steady = median(took[-11:-1])
    cases = {
        "the first request": took[0],
        "the second": took[1],
        f"the {len(took) - 1}th (median of the last ten)": steady,
        "the last prompt once more": took[-1],
    }
    lines = [(name, as_seconds(each), f"{each / steady:.1f}") for name, each in cases.items()]
    title = f"{experiments_cold.PROMPT} + {experiments_cold.ANSWER} tokens, the draft model, a new process"
    return table(title, ("", "measured", "/ steady state"), lines)


CLAIMS = (queue_at_loads, bounded_queue)
