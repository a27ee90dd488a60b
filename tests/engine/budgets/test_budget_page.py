"""docs/proof.md gives the budgets as the tests beside this one hold them."""

from pathlib import Path

import pytest

from tests.engine.budgets import test_budget_collectives as collectives
from tests.engine.budgets import test_budget_launches as kernels
from tests.engine.budgets import test_budget_scheduler as scheduler
from tests.engine.budgets import test_budget_waits as waits

PAGE = (Path(__file__).parents[3] / "docs/proof.md").read_text(encoding="utf-8")
LAUNCHES = kernels.BUDGETS | {("decode compiled", name): budget for name, budget in kernels.COMPILED.items()}
ROWS = {
    **{f"Python calls, {name}": (collectives.BEFORE[name], most, None) for name, most in collectives.MOST.items()},
    "Python calls, scheduler, a decoding sequence": (scheduler.BEFORE, scheduler.MOST, None),
    **{f"kernels of a layer, {kind}, {name}": (b.before, b.now, b.target) for (kind, name), b in LAUNCHES.items()},
    "host waits, training step": (None, waits.MOST, 1),
    "host waits more, layer of experts": (2, waits.MORE["experts"] // waits.EXPERTS.num_layers, 1),
    "host waits, decoding step": (None, waits.MOST, 1),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_page_gives_the_budget(row):
    cells = ["–" if number is None else str(number) for number in ROWS[row]]
    assert f"| {row} | {' | '.join(cells)} |" in PAGE


def test_the_page_gives_no_other():
    rows = PAGE.partition("## What a step may launch")[2].count("\n| ")
    assert rows == 1 + len(ROWS)  # the heading
