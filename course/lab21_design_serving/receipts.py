"""Lab 21's claims: a queue's mean and tail by formula and in a simulation, and what a bound does to both."""

from pathlib import Path

from course.kit.receipts import Receipt, formula, receipt, row
from course.lab21_design_serving import experiments, problems, problems_running
from course.shared.cases import Cases
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster
from minillm.predict.planner.serving import rank_serving
from minillm.predict.serving import queueing

CASES = Cases(Path(__file__).with_name("answers.toml"), problems, problems_running)
decide, answer = CASES.decide, CASES.answer


def queue_at_loads() -> Receipt:
    """Mean and 99th percentile of the wait, in service times."""
    rows = []
    for load in (0.5, 0.7, 0.85):
        found = experiments.simulated_waits(load)
        mean, tail = queueing.mean_wait(load, 1.0), queueing.wait_quantile(load, 1.0, 0.99)
        rows.append(row(f"mean wait at {load:.0%} load", mean, sum(found) / len(found), "", 0.1, kind="simulated"))
        rows.append(row("    p99", tail, experiments.quantile(found, 0.99), "", 0.15, kind="simulated"))
    return receipt("waits in service times", rows)


def bounded_queue() -> Receipt:
    """Ten places bound the tail and reject some."""
    tail, rejected = experiments.bounded(0.85, 10)
    unbounded = experiments.quantile(experiments.simulated_waits(0.85), 0.99)
    load, room = 0.85, 11  # ten that wait and one in service
    share = (1 - load) * load**room / (1 - load ** (room + 1))
    return receipt(
        "a queue of ten places at 85 % load",
        [
            row("share rejected", share, rejected, "", 0.15, kind="simulated"),
            row("p99 of the wait below that without a bound", True, tail < unbounded, kind="simulated"),
            row("    with ten places, service times", None, round(tail, 1), kind="simulated"),
            row("    without a bound", None, round(unbounded, 1), kind="simulated"),
        ],
    )


def capacity(model: str = "llama-3-70b", gpus: int = 8) -> Receipt:
    """What a node serves under three limits on the time per output token."""
    rows = []
    for limit in (0.02, 0.05, 0.2):
        try:
            best = rank_serving(architecture(model), cluster("h100", gpus), 1000, 300, tpot=limit)[0]
        except ValueError:
            continue
        rows.append(
            formula(
                f"TPOT of at most {limit * 1e3:.0f} ms: tp {best.tp}, pp {best.pp}, {best.replicas} replicas",
                best.tokens_per_s,
                "tokens/s",
            )
        )
        rows.append(formula("    sequences per replica", best.sequences))
        rows.append(formula("    GiB of cache per GPU", round(best.cache / GIB, 1)))
    return receipt(f"{model} on {gpus} H100, prompts of 1,000 and answers of 300 tokens", rows)


CLAIMS = (queue_at_loads, bounded_queue)
