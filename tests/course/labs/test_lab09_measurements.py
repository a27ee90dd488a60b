"""Lab 09's tables and pictures: published runs recomputed, and what its answers say in words is what formulas give."""

import pytest

from course.lab09_four_dimensions import experiments, experiments_breaks, receipts
from course.lab09_four_dimensions import experiments_plan as plans
from course.lab09_four_dimensions import figures as pictures
from minillm.predict.planner import published
from minillm.predict.planner.clusters import GIB
from minillm.predict.planner.step import step


def test_published_runs_are_recomputed():
    rows = receipts.published_table().rows
    assert len(rows) == len(published.CHOSEN) == 13
    for run, (name, axes, reported, predicted, off, held) in zip(published.CHOSEN, rows, strict=True):
        found = published.compare(run)
        assert name == run.name and all(f"{axis} " in axes for axis in ("tp", "pp") if run.layout.size(axis) > 1)
        assert (reported, predicted) == (f"{found.reported:.1%}", f"{found.predicted:.1%}")
        assert abs(found.off) < 0.15 and float(off.rstrip("%")) == pytest.approx(100 * found.off, abs=0.051)
        assert held == f"{found.memory / GIB:.0f} of {found.usable / GIB:.0f}"


def test_the_bug_is_in_meshes_of_one_replica_and_the_loss_hides_it():
    for outcome in experiments_breaks.bug_hunt():
        assert outcome.loss < 1e-10
        assert outcome.worst > 0.5 if outcome.mesh.startswith("dp 1") else outcome.worst < 1e-10


@pytest.mark.parametrize("hidden", [1024, 8192])
def test_fsdp_and_tensor_parallelism_send_the_same_at_four_and_a_half_tokens_per_channel(hidden):
    for ranks in (2, 8):
        sharded, tensor = plans.layer_traffic(hidden, round(4.5 * hidden), ranks)
        assert sharded == pytest.approx(tensor, rel=1e-6) and plans.equal_tokens(hidden) == 4.5 * hidden
        assert (
            plans.layer_traffic(hidden, hidden, ranks)[1] < sharded < plans.layer_traffic(hidden, 9 * hidden, ranks)[1]
        )


def test_the_numbers_of_the_design_answers():
    big = {cells[0]: [float(cell.rstrip("%")) for cell in cells[2:]] for cells in receipts.design_405b().rows}
    assert (
        min(big, key=lambda name: big[name][0]) == "as trained" and big["dp innermost"][0] > 1.8 * big["as trained"][0]
    )
    assert abs(big["as trained"][1] - 41) < 4 and all(row[2] < 73 for row in big.values())
    small = {cells[0]: [float(cell.rstrip("%")) for cell in cells[2:]] for cells in receipts.design_13b().rows}
    fitting = [name for name, row in small.items() if row[2] < 73]
    assert min(fitting, key=lambda name: small[name][0]) == "ZeRO 2" and "ZeRO 1" not in fitting
    assert small["ZeRO 3"][0] / small["ZeRO 2"][0] == pytest.approx(1 + 1 / 12, abs=0.01)
    assert small["tp 8, dp 4"][0] / small["ZeRO 2"][0] == pytest.approx(1 + 1 / 9, abs=0.01)


def test_what_the_text_says_of_the_plans():
    judged = {name: plans.judge(layout) for name, layout in receipts.COMMON.items()}
    best = plans.best().step.seconds
    assert judged["tp 8, pp 8"].fits and judged["tp 8, pp 8"].seconds / best == pytest.approx(1.05, abs=0.01)
    assert judged["tp 16 over two nodes"].seconds > 2 * best
    found = plans.estimates(receipts.ANSWERS.estimate)
    assert 15 < len(found) / sum(held <= plans.SIXTY_FOUR.usable for _, held, _ in found) < 30
    inside, across = plans.tensor_across(8)
    assert 7 < across / inside < 8


def test_an_order_is_only_a_matter_of_links():
    seconds = {state: experiments.link_seconds(experiments.LAYOUTS["dp 2, tp 2"], state) for state in experiments.LINKS}
    assert seconds["one node"] < seconds["inner inside"] < seconds["inner across"]
    layout = plans.best().layout
    alone = step(plans.SEVENTY, layout, plans.SIXTY_FOUR, plans.SEQ)
    assert alone.seconds == plans.best().step.seconds


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp"])
def test_the_pictures_with_sliders_draw(axis):
    figure = pictures.mesh_on_nodes("pp dp cp tp", tp=2, cp=2, pp=2, dp=1, per_node=4, axis=axis)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sum(text.startswith("rank") for text in texts) == 8 and "node 1" in texts
    assert "equal at" in pictures.fsdp_or_tensor(4096, 4).axes[0].get_legend_handles_labels()[1][-1]
