"""Lab 20's claims: published runs come out of the formulas, and Young's interval wastes least in a simulation."""

from pathlib import Path

from course.kit.receipts import Receipt, formula, receipt, row
from course.lab20_design_training import experiments, problems, problems_running
from course.shared.cases import Cases
from minillm.predict import faults
from minillm.predict.planner import published, search
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster

SAVE_S, RESTART_S, MTBF_S = 30.0, 600.0, 11135.0


CASES = Cases(Path(__file__).with_name("answers.toml"), problems, problems_running)
decide, answer = CASES.decide, CASES.answer


def published_runs() -> Receipt:
    """Utilisation by our formulas beside what the authors measured: at most 15 % apart; memory fits where it fitted."""
    rows = []
    for run in published.CHOSEN:
        found = published.compare(run)
        rows.append(row(f"{found.run}: share of the peak", found.predicted, found.reported, "", 0.15))
        rows.append(formula(f"    GiB per GPU, of {found.usable / GIB:.0f} usable", round(found.memory / GIB, 1)))
    return receipt("published runs: formula beside what their authors measured", rows, open_rows=6)


def save_intervals() -> Receipt:
    """Waste at half, once and twice Young's interval: formula against a simulated job."""
    best = faults.young_interval(SAVE_S, MTBF_S)
    rows = []
    for factor in (0.5, 1.0, 2.0):
        interval = factor * best
        waste = faults.wasted_share(interval, SAVE_S, RESTART_S, MTBF_S)
        found = experiments.simulated_waste(interval, SAVE_S, RESTART_S, MTBF_S)
        rows.append(row(f"wasted at {factor:g} times Young's interval", waste, found, "", 0.12, kind="simulated"))
    least = min(
        (0.5, 1.0, 2.0), key=lambda factor: experiments.simulated_waste(factor * best, SAVE_S, RESTART_S, MTBF_S)
    )
    rows.append(row("least waste at this many times Young's interval", 1.0, least, "", kind="simulated"))
    return receipt(f"a save of {SAVE_S:.0f} s, a failure every {MTBF_S / 3600:.1f} hours", rows)


def a_plan_of_yours(layout: str = "") -> Receipt:
    """The planner's three best meshes for 70B on 64 GPUs, and why the others lose."""
    ranking = search.rank(architecture("llama-3-70b"), cluster("h100", 64), 8192, 512, keep=3)
    rows = []
    for plan in ranking.plans:
        why = "" if plan is ranking.best else f" ({search.explain(ranking.best, plan)})"
        rows.append(formula(f"{plan.layout}{why}", plan.step.seconds, "s"))
        rows.append(formula("    GiB per GPU", round(plan.memory.total / GIB, 1)))
    return receipt("70B on 64 GPUs: seconds per step", rows)


CLAIMS = (published_runs, save_intervals)
