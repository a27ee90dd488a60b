"""The planner held to minillm's own trainer: bytes of every axis exactly, peak memory; time is the command's affair."""

import os
from dataclasses import replace

import pytest
import torch

from minillm.__main__ import run
from minillm.cli import scaling as command
from minillm.comm import Link, Topology, launch
from minillm.equivalence import placement, planner, scaling
from minillm.measure import ledger
from minillm.model import ModelConfig, MoEConfig
from minillm.predict import comms
from minillm.predict.planner import traffic, trainer
from minillm.predict.planner.clusters import Cluster, Device
from minillm.predict.planner.layout import AXES, Layout
from minillm.predict.training.memory import rank_step
from minillm.train.parallel_config import ParallelConfig

HERE = Device("here", 1e9, 1e12, 1e10, 4e6, 1.0, 1.0)


def machine(ranks: int, per_node: int, **how) -> Cluster:
    return Cluster(HERE, ranks, per_node, network=1e6, latency=(1e-3, 4e-3), link_efficiency=1.0, **how)


def check(ranks: int, chosen: list[ParallelConfig], model: ModelConfig = planner.MODEL) -> None:
    """Runs them once, without timing them."""
    by_rank = launch(planner.measure, ranks, chosen, 0, model, timeout=planner.PATIENCE_S)
    for layout, found in zip(chosen, zip(*by_rank, strict=True), strict=True):
        row = planner.row(layout, ranks, found, 0.0, model)
        assert row.exact, f"{layout}: predicted {row.bytes}, sent {row.measured_bytes}"
        assert abs(row.full) <= planner.MEMORY, f"{layout}: {row.full:+.1%} of {row.measured_peak} bytes"


long = pytest.mark.skipif(os.environ.get("MINILLM_PROOF") != "all", reason="a minute; MINILLM_PROOF=all runs it")


@pytest.mark.full
def test_two_ranks_send_and_hold_what_is_predicted():
    check(2, planner.layouts(2)[2::2])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=long), 4, pytest.param(8, marks=long)])
def test_every_layout_sends_and_holds_what_is_predicted(ranks):
    check(ranks, planner.layouts(ranks))


@pytest.mark.full
def test_two_ranks_of_experts_send_and_hold_what_is_predicted():
    check(2, planner.expert_layouts(2)[::3], planner.EXPERTS)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=long), 4, pytest.param(8, marks=long)])
def test_every_layout_of_experts_sends_and_holds_what_is_predicted(ranks):
    check(ranks, planner.expert_layouts(ranks), planner.EXPERTS)


@pytest.mark.full
def test_experts_with_sequence_parallelism_and_without_ep():
    layouts = [ParallelConfig(dp=2, ep=2, tp=2, sequence=True, zero=zero, accumulate=2) for zero in (0, 3)]
    layouts += [ParallelConfig(dp=2, tp=2, zero=zero, accumulate=2) for zero in (0, 2)]
    layouts += [ParallelConfig(dp=4, zero=zero, accumulate=2) for zero in (3, 1)]
    check(4, layouts, planner.EXPERTS)


def test_thirty_layouts_are_checked():
    assert sum(len(planner.layouts(ranks)) for ranks in (2, 4, 8)) >= 30
    found = [layout for ranks in (2, 4, 8) for layout in planner.expert_layouts(ranks)]
    kinds = {(layout.ep, layout.zero) for layout in found}
    assert kinds == {(ep, zero) for ep in (2, 4) for zero in range(4)}
    assert {(layout.ep, layout.tp, layout.pp) for layout in found} >= {(2, 2, 2), (4, 2, 1), (4, 1, 2)}


def test_equal_loads_are_what_is_assumed_without_counts():
    plan = Layout(dp=4, ep=2, tp=2, micro_batch=2, microbatches=3)
    half = 2 * planner.SEQ * 2 // 2  # of a rank's rows in one layer: every token has 2
    crossing = half * 4 * 8 * 3  # layers, ranks, microbatches
    assumed = traffic.bytes_by_axis(planner.EXPERTS, plan, planner.SEQ)
    assert traffic.bytes_by_axis(planner.EXPERTS, plan, planner.SEQ, crossing) == assumed
    one_more = traffic.bytes_by_axis(planner.EXPERTS, plan, planner.SEQ, crossing + 1)
    assert one_more["ep"] - assumed["ep"] == 4 * planner.EXPERTS.hidden_size * 4
    with_equal_loads = rank_step(planner.EXPERTS, plan, planner.SEQ, 0, [256.0] * 4)
    assert with_equal_loads == rank_step(planner.EXPERTS, plan, planner.SEQ)


def test_seconds_of_the_all_to_alls():
    """Four of a layer, in three rounds each, and an all-gather of counts; the gradients of experts on copies alone."""
    plan = Layout(dp=4, ep=4, micro_batch=2, microbatches=2, order=("tp", "cp", "pp", "dp"))
    found = trainer.step(planner.EXPERTS, plan, machine(4, 4), planner.SEQ, trainer.Host())
    part, counts = 2 * 64 * 2 * 64 * 4 / 4, 8 * 8
    assert found.ep == pytest.approx(2 * 4 * (4 * 3 * (1e-3 + part / 4e6) + 3 * (1e-3 + counts / 4e6)))
    across = trainer.step(planner.EXPERTS, plan, machine(4, 2, cards_per_ring=1), planner.SEQ, trainer.Host())
    assert across.ep > 3.9 * found.ep
    copies = Layout(**{**vars(plan), "ep": 2})
    assert trainer.step(planner.EXPERTS, copies, machine(4, 4), planner.SEQ, trainer.Host()).dp > found.dp


def test_one_ring_model():
    """The planner's path and the collectives' closed forms are one alpha-beta model."""
    way = planner_path(8)
    for turn, cost in ((1, comms.ring_all_gather), (2, comms.ring_all_reduce)):
        assert turn * way.ring(8000) == pytest.approx(cost(2000, 4, 8).time(way.latency, way.bandwidth))
    levels = trainer.axis_path(machine(8, 4, two_level=True), Layout(dp=8), "dp")
    expected = comms.hierarchical_all_reduce(2000, 4, 8, 4).time((1e-3, 4e6), (4e-3, 1e6))
    assert levels.all_reduce(8000) == pytest.approx(expected)


def planner_path(ranks: int):
    return trainer.axis_path(machine(ranks, 4, cards_per_ring=1), Layout(dp=ranks), "dp")


def test_gradients_cross_nodes_where_dp_is_outermost():
    outer = Layout(dp=2, pp=4, microbatches=4, order=("tp", "cp", "pp", "dp"))
    assert trainer.gradient_path(machine(8, 4), outer).crosses
    assert not trainer.gradient_path(machine(8, 4), Layout(dp=2, pp=4, microbatches=4)).crosses


@pytest.mark.parametrize(
    "change",
    [{"pp": 3}, {"tp": 8}, {"cp": 64}, {"recompute": "full", "dp": 2}, {"recompute": "light"}, {"chunks": 2, "pp": 2}],
)
def test_what_the_formulas_do_not_cover_is_refused(change):
    with pytest.raises(ValueError, match=r"use|not predicted|does not divide"):
        traffic.bytes_by_axis(planner.MODEL, Layout(**change), planner.SEQ)
    with pytest.raises(ValueError, match=r"use|not predicted|does not divide"):
        rank_step(planner.MODEL, Layout(**change), planner.SEQ)


@pytest.mark.parametrize(
    ("moe", "change", "said"),
    [
        (None, {"dp": 2, "ep": 2}, "this model has none: use ep 1"),
        (MoEConfig(8, 2), {"dp": 3, "ep": 3}, "ep 3 does not divide 8 experts and dp 3"),
        (MoEConfig(8, 2), {"dp": 2, "cp": 2, "ep": 4}, "ep 4 does not divide 8 experts and dp 2"),
        (MoEConfig(8, 2), {"dp": 2, "cp": 2, "ep": 2}, "experts beside context parallelism"),
        (MoEConfig(8, 2, capacity_factor=1.0), {"dp": 2}, "that drop tokens"),
        (MoEConfig(8, 2, bias_update_rate=0.1), {"dp": 2}, "or have balancing biases"),
        (MoEConfig(8, 2, dense_layers=(0,)), {"dp": 2}, "or dense layers"),
    ],
)
def test_experts_that_the_formulas_do_not_cover_are_refused(moe, change, said):
    model = replace(planner.MODEL, moe=moe)
    with pytest.raises(ValueError, match=said):
        traffic.bytes_by_axis(model, Layout(**change), planner.SEQ)


def test_seats_follow_the_order_of_axes():
    sizes = ParallelConfig(dp=2, tp=2, pp=2).axes
    assert placement.seats(sizes, ("tp", "cp", "pp", "dp")) == tuple(range(8))  # as the trainer's mesh has them
    dp_inside = placement.seats(sizes, ("dp", "cp", "pp", "tp"))
    assert dp_inside[0] // 2 == dp_inside[4] // 2  # ranks 0 and 4 are neighbours along dp, and share a node of two
    assert sorted(dp_inside) == list(range(8))


def test_the_worst_order_has_the_busiest_axis_between_nodes():
    layout = planner.planned(ParallelConfig(dp=4, tp=2, accumulate=2))
    here = machine(8, 2, cards_per_ring=1)

    def seconds(*order: str) -> float:
        plan = Layout(**{**vars(layout), "order": order})
        return trainer.step(planner.MODEL, plan, here, planner.SEQ, trainer.Host()).seconds

    assert seconds(*AXES) < seconds("dp", "cp", "pp", "tp")


def test_only_orders_that_are_predicted_to_differ_are_run():
    runs = {}
    for layout in placement.LAYOUTS:
        row = placement.predicted(layout, machine(8, 2, cards_per_ring=1), trainer.Host())
        runs[layout] = placement.worth_running(row)
        assert row.ratio >= 1 and row.nodes == 4 and row.measured_ratio is None
    assert all(names[0] == "best" for names in runs.values())
    assert runs[ParallelConfig(dp=2, cp=4, accumulate=2)] == ["best", "two levels"]  # its ring crosses in any order
    assert runs[ParallelConfig(dp=2, tp=2, pp=2, accumulate=4)] == ["best", "worst"]


def test_rows_of_a_placement_come_one_by_one(monkeypatch):
    monkeypatch.setattr(placement, "this_machine", lambda ranks, per_node: (machine(ranks, per_node), trainer.Host()))
    monkeypatch.setattr(placement, "launch", lambda program, ranks, *arguments, **how: [1.5] * ranks)
    told = []
    first = next(placement.compare(8, [4], tell=told.append))
    assert set(first.measured_seconds.values()) == {1.5} and first.measured_ratio == 1
    assert len(told) == 1 + len(first.measured_seconds) and "4 steps of about" in told[-1]


def summed(group) -> tuple[list[float], int, int]:
    """An all-reduce's result, and the bytes and messages that this rank sent."""
    x = torch.arange(12.0) + group.rank
    with ledger() as led:
        group.all_reduce(x)
    return x.tolist(), led.bytes("all_reduce"), led.messages


def test_two_levels_add_up_what_one_ring_does():
    inter = Link(1e-4, 1e9, "between")
    expected = [4 * value + 6.0 for value in range(12)]
    found = launch(summed, 4, link=Topology(2, inter, two_level=True))
    assert all(values == expected for values, _, _ in found)
    assert sum(sent for _, sent, _ in found) == 2 * 3 * 48  # the bytes of one ring
    assert {messages for _, _, messages in found} == {4}  # in its 2(N-1) = 6 rounds each rank would send 6
    assert Topology(2, inter, seats=(0, 2, 1, 3)).neighbours([0, 1, 2, 3]) == 1  # they lie apart: one ring
    assert Topology(2, inter).neighbours([0, 1, 2, 3]) == 2
    with pytest.raises(ValueError, match="every seat"):
        Topology(2, inter, seats=(0, 0, 1, 2))


def test_scaling_counts_what_leaves_a_node():
    rows = {n: scaling.predicted("weak", n, machine(8, 4, cards_per_ring=1), trainer.Host()) for n in (1, 4, 8, 16)}
    assert rows[4].crossing == 0 < rows[8].crossing and rows[1].bytes == 0
    assert rows[8].bytes / rows[4].bytes == pytest.approx((7 / 8) / (3 / 4), rel=1e-3)
    assert rows[8].seconds > 2 * rows[4].seconds and rows[8].two_level < rows[8].seconds
    assert "times as long" in scaling.cliff(list(rows.values()))
    assert len(command.table(list(rows.values()))) == 5


def test_the_cliffs_sentence_is_of_the_rows():
    """8 MB of gradients: a ring of 8 sends 2 · 7/8 of them over each link, a rank in two levels a quarter across."""
    inside = scaling.Row("weak", 4, 1, 2.0, 2.0, 12e6, 0, 1.0)
    beyond = scaling.Row("weak", 8, 2, 7.0, 3.0, 14e6, int(14e6), 0.3)
    text = scaling.cliff([inside, beyond, replace(inside, mode="strong", seconds=9.0)])
    for part in (
        "sends 1.17 times as many bytes (12.00 and 14.00 MB)",
        "14.00 MB now leave each node, on links 4 times slower",
        "the ring's 14 rounds",
        "the step takes 3.5 times as long",
        "sends 2.00 MB across at once: 1.5 times.",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "1,x"], "not a list of whole numbers"),
        (["--ranks", "6"], "do not fill nodes of 4"),
        (["--ranks", "0"], "0 ranks"),
        (["--ranks", ""], "at least one"),
        (["--extend", "128"], "cannot share 32 microbatches"),
        (["--figure", "/no/such/folder/x.png"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys):
    assert run(["scaling", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and sentence in lines[0]
