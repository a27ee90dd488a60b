"""The planner held to minillm's own trainer: bytes of every axis exactly, peak memory; time is the command's affair."""

import os

import pytest
import torch

from minillm.__main__ import run
from minillm.bench import placement, planner, scaling
from minillm.comm import Link, Topology, launch
from minillm.measure import ledger
from minillm.predict import comms
from minillm.predict.planner import traffic, trainer, trainer_memory
from minillm.predict.planner.clusters import Cluster, Device
from minillm.predict.planner.layout import AXES, Layout
from minillm.train.parallel_config import ParallelConfig

HERE = Device("here", 1e9, 1e12, 1e10, 4e6, 1.0, 1.0)


def machine(ranks: int, per_node: int, **how) -> Cluster:
    return Cluster(HERE, ranks, per_node, network=1e6, latency=(1e-3, 4e-3), link_efficiency=1.0, **how)


def check(ranks: int, chosen: list[ParallelConfig]) -> None:
    """Runs them once, without timing them."""
    by_rank = launch(planner.measure, ranks, chosen, 0, timeout=planner.PATIENCE_S)
    for layout, found in zip(chosen, zip(*by_rank, strict=True), strict=True):
        row = planner.row(layout, ranks, found, 0.0)
        assert row.exact, f"{layout}: predicted {row.bytes}, sent {row.measured_bytes}"
        assert abs(row.full) <= planner.MEMORY, f"{layout}: {row.full:+.1%} of {row.measured_peak} bytes"


long = pytest.mark.skipif(os.environ.get("MINILLM_PROOF") != "all", reason="a minute; MINILLM_PROOF=all runs it")


def test_two_ranks_send_and_hold_what_is_predicted():
    check(2, planner.layouts(2)[2::2])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=long)])
def test_every_layout_sends_and_holds_what_is_predicted(ranks):
    check(ranks, planner.layouts(ranks))


def test_thirty_layouts_are_checked():
    assert sum(len(planner.layouts(ranks)) for ranks in (2, 4, 8)) >= 30


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


@pytest.mark.parametrize("change", [{"pp": 3}, {"tp": 8}, {"cp": 64}, {"recompute": "full"}, {"chunks": 2, "pp": 2}])
def test_what_the_formulas_do_not_cover_is_refused(change):
    with pytest.raises(ValueError, match=r"use|not predicted|does not divide"):
        traffic.bytes_by_axis(planner.MODEL, Layout(**change), planner.SEQ)
    with pytest.raises(ValueError, match=r"use|not predicted|does not divide"):
        trainer_memory.memory(planner.MODEL, Layout(**change), planner.SEQ)


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
    assert len(scaling.table(list(rows.values()))) == 5


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
