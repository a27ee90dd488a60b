"""The oracle finds the usual mistakes with experts on several ranks."""

import json

import pytest

from course.shared.faults.strategy import PlantedStrategy
from course.shared.faults.training import EXPERTS_DOUBLED
from minillm.__main__ import run
from minillm.equivalence import EXPERT_CASES, ParallelConfig, compare
from minillm.model import ModelConfig
from minillm.train.strategies.hybrid import Hybrid

DOUBLED = PlantedStrategy((EXPERTS_DOUBLED,))


class MixesExperts(Hybrid):
    """Experts' gradients are averaged over all ranks that share the batch, whose experts are others."""

    @property
    def _gradient_groups(self):
        return {}


@pytest.mark.parametrize(("mistake", "ep"), [(DOUBLED, 2), pytest.param(MixesExperts, 2, marks=pytest.mark.full)])
def test_usual_mistakes_are_found(mistake, ep):
    cases = {"experts": EXPERT_CASES["experts"]}
    (row,) = compare(ParallelConfig(dp=ep, ep=ep), cases, steps=1, strategy=mistake)
    assert not row.ok and ".experts." in row.parameter and row.worst_gradient > 0.4
    if mistake is DOUBLED:
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


@pytest.mark.full
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
