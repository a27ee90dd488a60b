"""The oracle finds the usual mistakes with sequences that are cut over ranks."""

import pytest

from course.shared.faults import training as faults
from course.shared.faults.strategy import PlantedStrategy
from minillm.__main__ import run
from minillm.equivalence import CONTEXT_CASES, ParallelConfig, compare
from minillm.train.strategies.hybrid import Hybrid


class PositionsFromZero(Hybrid):
    """RoPE turns this rank's keys as if its part began the sequence."""

    def build(self, config, **how):
        model = super().build(config, **how)
        model.positions_of = lambda count, device: (
            self.context.positions(count * 2) - self.context.positions(count * 2)[0]
        )
        return model


class NoDocuments(Hybrid):
    def forward_backward(self, module, microbatches, *how):
        return super().forward_backward(module, [each._replace(documents=None) for each in microbatches], *how)


@pytest.mark.parametrize(
    "wrong",
    [
        PlantedStrategy((faults.CONTEXT_NOT_REDUCED,)),
        PlantedStrategy((faults.MEAN_OF_MEANS,)),
        PositionsFromZero,
        NoDocuments,
    ],
    ids=["not reduced", "mean of means", "positions from zero", "no documents"],
)
def test_wrong_layouts_are_found(wrong):
    (row,) = compare(ParallelConfig(cp=2, pad=True), {"documents": CONTEXT_CASES["documents"]}, steps=1, strategy=wrong)
    assert not row.ok and row.worst_gradient > 1e-3


def test_command(capsys):
    arguments = ["oracle", "--dp", "1", "--zero", "0", "--accumulate", "1", "--cp", "2", "--cases", "padded"]
    assert run([*arguments, "--context", "zigzag,ulysses"]) == 0
    out = capsys.readouterr().out
    assert "cp 2 zigzag, padded" in out and "cp 2 ulysses, padded" in out and "2 entries, none off" in out
    assert run([*arguments, "--context", "spiral"]) == 2
    assert "--context spiral: choose from ring, zigzag" in capsys.readouterr().err
