"""Lab 20's claims: published runs come out of the formulas, and Young's interval wastes least in a simulation."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from course.kit.receipts import Row, formula, row, titled
from course.lab20_design_training import experiments, experiments_limits, problems, problems_running
from course.shared.cases import Cases
from course.shared.table import Table, table
from minillm.predict import faults
from minillm.predict.planner import published, search
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster

SAVE_S, RESTART_S, MTBF_S = 30.0, 600.0, 11135.0
FACTORS = (0.5, 1.0, 2.0)  # of Young's interval

CASES = Cases(Path(__file__).with_name("answers.toml"), problems, problems_running)
decide, answer = CASES.decide, CASES.answer


@titled("published runs: formula beside what authors measured", open_rows=1, show="share of the peak|more than the")
def published_runs() -> Iterator[Row]:
    """Utilisation by our formulas beside what the authors measured: at most 15 % apart; memory fits where it fitted."""
    for run in published.CHOSEN:
        found = published.compare(run)
        counted = ", recomputation counted" if run.basis == "hardware" else ""
        name = f"{run.name}: share of the peak{counted}{', fitted' if run.fitted else ''}"
        yield row(name, found.predicted, found.reported, "", 0.15)
        bound = "more than the" if found.memory > found.usable else "of"
        name = f"    GiB per GPU of {run.name}, {bound} {found.usable / GIB:.0f} usable"
        yield formula(name, round(found.memory / GIB, 1))


def judges() -> str:
    """How far off our formulas are for the runs that were not used to fit the constants."""
    fitted = sum(run.fitted for run in published.CHOSEN)
    worst = max((run for run in published.RUNS if not run.fitted), key=lambda run: abs(published.compare(run).off))
    off = published.errors(fitted=False)
    return (
        f"{fitted} of these {len(published.CHOSEN)} runs were used to fit the constants. "
        f"Of all {len(off)} that were not,\nhalf are within {median(off):.1%}, nine in ten within "
        f"{off[len(off) * 9 // 10]:.1%}; the worst, {worst.name}, is {off[-1]:.1%} off."
    )


@titled(f"a save of {SAVE_S:.0f} s, a failure every {MTBF_S / 3600:.1f} hours", open_rows=4)
def save_intervals() -> Iterator[Row]:
    """Waste at half, once and twice Young's interval: formula against a simulated job."""
    best = faults.young_interval(SAVE_S, MTBF_S)
    simulated = {each: experiments.simulated_waste(each * best, SAVE_S, RESTART_S, MTBF_S) for each in FACTORS}
    for factor, waste in simulated.items():
        expected = faults.wasted_share(factor * best, SAVE_S, RESTART_S, MTBF_S)
        yield row(f"wasted at {factor:g} times Young's interval", expected, waste, "", 0.12, kind="simulated")
    least = min(simulated, key=simulated.get)
    yield row("least waste at this many times Young's interval", 1.0, least, "", kind="simulated")


@titled("70B on 64 GPUs: seconds per step")
def best_plans() -> Iterator[Row]:
    """The planner's three best meshes for 70B on 64 GPUs, and what costs the others most."""
    best, *others = search.rank(architecture("llama-3-70b"), cluster("h100", 64), 8192, 512, keep=3).plans
    for plan in (best, *sorted(others, key=lambda plan: plan.step.seconds)):
        why = "" if plan is best else f" ({search.explain(best, plan)})"
        yield formula(f"{plan.layout}, {plan.memory.total / GIB:.1f} GiB per GPU{why}", plan.step.seconds, "s")


def ledgers() -> Table:
    """Five runs, each with one thing wrong, as a page of metrics shows them."""
    lines = []
    for letter, (_, run) in experiments_limits.RUNS.items():
        found = run.ledger
        shares = (found.memory, found.input, found.link, found.bubble, found.reached)
        lines.append((f"{letter}: {run.model}, {run.where.gpus} GPUs", *(f"{share:.0%}" for share in shares)))
    columns = ("", "memory", "waits for input", "for messages", "for stages", "of the peak while it computes")
    return table("five runs by formula", columns, lines)


def limits(diagnosis: dict[str, str]) -> Table:
    """The reader's diagnosis of each run beside what is wrong with it and what the five questions find."""
    lines = [
        (letter, diagnosis.get(letter, "?"), wrong, experiments_limits.limit(run.ledger))
        for letter, (wrong, run) in experiments_limits.RUNS.items()
    ]
    return table("what to look at first", ("run", "you", "what is wrong", "the five questions say"), lines)


CLAIMS = (published_runs, save_intervals)
