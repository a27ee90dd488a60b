"""The oracle over expert-parallel ranks: tokens that travel give one process's gradients, and mistakes are found."""

import json

import pytest

from minillm.__main__ import run
from minillm.equivalence import EVEN_EXPERT_CASES, EXPERT_CASES, ParallelConfig, compare
from minillm.model import ModelConfig
from minillm.train.strategies.hybrid import Hybrid


def off(rows):
    return [row for row in rows if not row.ok]


def test_two_ranks_of_experts_equal_one_process():
    rows = compare(ParallelConfig(dp=2, ep=2), steps=1)
    assert len(rows) == len(EXPERT_CASES) and not off(rows), off(rows)


def test_two_nodes_of_experts_equal_one_process():
    """One corner of each kind; all of them with `test_products_of_axes_over_nodes`."""
    corners = {name: EXPERT_CASES[name] for name in ("shared", "capacity", "few tokens")}
    rows = compare(ParallelConfig(dp=4, ep=4, ep_nodes=2), corners, steps=1)
    assert len(rows) == len(corners) and not off(rows), off(rows)


@pytest.mark.slow
def test_products_of_axes_over_nodes_equal_one_process():
    nodes = {"ep": 4, "ep_nodes": 2}
    layouts = [ParallelConfig(dp=4, zero=zero, accumulate=2, **nodes) for zero in range(4)]
    layouts += [ParallelConfig(dp=4, ep=4, ep_nodes=4), ParallelConfig(dp=4, ep=2, ep_nodes=2, dp_replicate=2, zero=3)]
    layouts += [ParallelConfig(dp=2, ep=2, ep_nodes=2, **axis) for axis in ({"tp": 2, "sequence": True}, {"cp": 2})]
    layouts += [
        ParallelConfig(dp=2, ep=2, ep_nodes=2, pp=2, accumulate=2, schedule=name) for name in ("1f1b", "dualpipe")
    ]
    rows = compare(layouts, steps=2)
    assert len(rows) == len(layouts) * len(EXPERT_CASES) and not off(rows), off(rows)


@pytest.mark.slow
def test_products_of_axes_equal_one_process():
    layouts = [ParallelConfig(dp=4, ep=ep, zero=zero) for ep in (2, 4) for zero in range(4)]
    layouts += [ParallelConfig(dp=2, ep=2, tp=2, zero=zero) for zero in (0, 1, 3)]
    layouts += [ParallelConfig(dp=2, ep=2, pp=2, accumulate=2, zero=zero) for zero in (0, 2, 3)]
    layouts += [ParallelConfig(dp=2, ep=2, pp=2, accumulate=2, schedule=name) for name in ("zero_bubble", "dualpipe")]
    layouts += [ParallelConfig(dp=2, ep=2, zero=zero, accumulate=3) for zero in range(4)]
    layouts += [ParallelConfig(dp=2, ep=2, tp=2, pp=2, accumulate=2)]
    layouts += [ParallelConfig(dp=4, ep=2, dp_replicate=2, zero=zero, accumulate=2) for zero in (1, 3)]
    rows = compare(layouts, {name: EXPERT_CASES[name] for name in ("shared", "capacity", "few tokens")}, steps=2)
    sequence = [ParallelConfig(dp=2, ep=2, tp=2, sequence=True, zero=zero, accumulate=2) for zero in (0, 3)]
    rows += compare(sequence, steps=2)
    rows += compare(ParallelConfig(dp=4, ep=4), steps=1)
    rows += compare(ParallelConfig(dp=4, ep=2, pp=2, zero=1), {"capacity": EXPERT_CASES["capacity"]}, steps=1)
    rows += compare([ParallelConfig(dp=2, ep=2, cp=2, zero=zero) for zero in (0, 1, 3)], steps=2)
    rows += compare(ParallelConfig(dp=2, ep=2, cp=2, pad=True), {"shared": EXPERT_CASES["shared"]}, steps=2)  # padding
    count = 3 * len(layouts) + 6 * len(EXPERT_CASES) + 2
    assert len(rows) == count and not off(rows), off(rows)


# Routers that see whole sequences: losses and drops, experts that choose.
WHOLE = {name: EVEN_EXPERT_CASES[name] for name in ("capacity", "experts choose")}


def test_routers_over_cut_sequences():
    rows = compare([ParallelConfig(cp=2, context=context) for context in ("zigzag", "gather")], WHOLE, steps=2)
    assert len(rows) == 4 and not off(rows), off(rows)


@pytest.mark.slow
def test_routers_over_cut_sequences_and_every_other_axis():
    layouts = [ParallelConfig(cp=4, context="hybrid"), ParallelConfig(cp=2, tp=2, sequence=True)]
    layouts += [ParallelConfig(cp=2, pp=2, accumulate=2), ParallelConfig(dp=2, ep=2, cp=2, zero=3, accumulate=2)]
    rows = compare(layouts, WHOLE, steps=2)
    assert len(rows) == 8 and not off(rows), off(rows)


class DoublesExperts(Hybrid):
    """Experts' gradients are averaged over the ranks that have the same experts alone."""

    def finish_backward(self):
        super().finish_backward()
        for name, parameter in self.model.named_parameters():
            if name in self._apart and parameter.grad is not None:
                parameter.grad.mul_(self.layout.ep)


class MixesExperts(Hybrid):
    """Experts' gradients are averaged over all ranks that share the batch, whose experts are others."""

    @property
    def _apart(self):
        return {}


@pytest.mark.parametrize(
    ("mistake", "ep"), [(DoublesExperts, 2), pytest.param(MixesExperts, 2, marks=pytest.mark.slow)]
)
def test_usual_mistakes_are_found(mistake, ep):
    """Gradients that are ep times too large: https://github.com/pytorch/pytorch/issues/160285."""
    cases = {"experts": EXPERT_CASES["experts"]}
    (row,) = compare(ParallelConfig(dp=ep, ep=ep), cases, steps=1, strategy=mistake)
    assert not row.ok and ".experts." in row.parameter and row.worst_gradient > 0.4
    if mistake is DoublesExperts:
        assert row.worst_gradient == pytest.approx(ep - 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dp": 4, "ep": 3}, "ep 3 does not divide dp 4"),
        ({"dp": 4, "ep": 4, "zero": 1, "dp_replicate": 2}, "ep 4 does not divide the 2 ranks of dp 4"),
        ({"ep": 0}, "ep 0 is not in 1"),
        ({"dp": 4, "ep": 4, "ep_nodes": 3}, "ep_nodes 3 does not divide ep 4"),
        ({"dp": 4, "ep_nodes": 2}, "ep_nodes 2 does not divide ep 1"),
    ],
)
def test_layouts_that_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        ParallelConfig(**fields)


def test_models_that_cannot_be_spread_so():
    experts, dropping = EXPERT_CASES["experts"].config, EXPERT_CASES["capacity"].config
    for layout, config, said in (
        (ParallelConfig(dp=2, ep=2), ModelConfig(37, 8, 8, 1, 2), "ep 2 spreads experts, but this model has none"),
        (ParallelConfig(dp=3, ep=3), experts, "8 experts do not divide over 3 expert-parallel ranks"),
        (ParallelConfig(cp=2, pad=True), dropping, "and capacities would count the padding of 7 tokens to 8"),
    ):
        with pytest.raises(ValueError, match=said):
            layout.check(config, 7)


@pytest.mark.slow
def test_by_the_command(tmp_path, capsys):
    file = tmp_path / "found.json"
    arguments = ["--dp", "2", "--ep", "2", "--zero", "0,1", "--accumulate", "1", "--cases", "capacity,one expert"]
    assert run(["oracle", *arguments, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["ok"] for row in rows] == [True] * 4 and "ep 2, capacity" in rows[0]["layout"]
    assert run(["oracle", *arguments, "--zero", "0", "--ep-nodes", "2", "--json", str(file)]) == 0
    assert "ep 2 on 2 nodes, capacity" in json.loads(file.read_text())["rows"][0]["layout"]
    even = ["--dp", "2", "--ep", "2", "--cp", "2", "--context", "zigzag", "--zero", "0", "--cases", "capacity"]
    assert run(["oracle", *even, "--accumulate", "1", "--json", str(file)]) == 0
    assert len(json.loads(file.read_text())["rows"]) == 1
    assert run(["oracle", "--dp", "2", "--ep", "3"]) == 2
    assert "ep 3 does not divide dp 2" in capsys.readouterr().err
