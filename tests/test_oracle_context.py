"""The oracle on sequences that are cut over ranks: every variant with every other axis."""

import pytest

from minillm.__main__ import run
from minillm.equivalence import CONTEXT_CASES, ParallelConfig, compare
from minillm.parallel.context_parallel import CONTEXTS
from minillm.train.strategies.hybrid import Hybrid


def layout(**fields):
    return ParallelConfig(**{"cp": 2, "pad": True, **fields})


LAYOUTS = {
    "cp 2": [layout(context=context, accumulate=2) for context in CONTEXTS],
    "cp 4": [layout(cp=4, context=context) for context in CONTEXTS],
    "dp, zero 0 to 3": [layout(dp=2, zero=zero, accumulate=2) for zero in range(4)],
    "zero over cp alone": [layout(zero=zero, context="ulysses") for zero in range(1, 4)],
    "hsdp": [layout(dp=2, zero=zero, dp_replicate=2, context="gather") for zero in (1, 3)],
    "tp with sp": [layout(tp=2, sequence=sequence, context=context) for sequence in (0, 1) for context in CONTEXTS],
    "pp, zero 0 to 3": [layout(pp=2, accumulate=4, zero=zero, context="ring") for zero in range(4)],
    "pp, other schedules": [layout(pp=2, accumulate=4, schedule=name) for name in ("zero_bubble", "dualpipe")],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_variant_with_every_axis(name):
    rows = compare(LAYOUTS[name], steps=2)
    assert [row for row in rows if not row.ok] == []
    assert len(rows) == len(LAYOUTS[name]) * len(CONTEXT_CASES)
    assert max(row.worst_gradient for row in rows) <= 1e-10


EIGHT_RANKS = [
    *(layout(cp=4, dp=2, zero=zero, accumulate=2, context=context) for zero, context in enumerate(CONTEXTS[:4])),
    *(layout(cp=4, tp=2, sequence=True, context=context) for context in CONTEXTS),
    layout(cp=4, pp=2, accumulate=4, zero=2, context="hybrid"),
    layout(cp=4, pp=2, accumulate=4, zero=3),
    layout(cp=2, pp=2, tp=2, sequence=True, accumulate=4, zero=1, context="gather"),
]


@pytest.mark.slow
def test_four_parts_of_a_sequence_with_every_other_axis():
    cases = {name: CONTEXT_CASES[name] for name in ("tied", "windowed documents", "unequal", "padded documents")}
    rows = compare(EIGHT_RANKS, cases, steps=1)
    assert len(rows) == 4 * len(EIGHT_RANKS)
    assert [row for row in rows if not row.ok] == []


def test_corners_on_two_ranks():
    cases = {name: CONTEXT_CASES[name] for name in ("tied", "padded documents", "unequal")}
    rows = compare([layout(context=context) for context in CONTEXTS], cases, steps=1)
    assert len(rows) == 15 and all(row.ok for row in rows), [row for row in rows if not row.ok]


class OverDpOnly(Hybrid):
    """Gradients are not added up over cp, as if ranks with the same rows had nothing to tell each other."""

    def __init__(self, group, layout):
        super().__init__(group, layout)
        self.replicas = self.shard_group = self.mesh.dp


class PositionsFromZero(Hybrid):
    """RoPE turns this rank's keys as if its part began the sequence."""

    def build(self, config, **how):
        model = super().build(config, **how)
        model.positions_of = lambda count: self.context.positions(count * 2) - self.context.positions(count * 2)[0]
        return model


class CountsOwnTokens(Hybrid):
    """The mean over a rank's own tokens."""

    def loss_divisor(self, weight):
        return weight.clamp(min=1)


class NoDocuments(Hybrid):
    def forward_backward(self, module, microbatches, *how):
        return super().forward_backward(module, [each._replace(documents=None) for each in microbatches], *how)


@pytest.mark.parametrize("wrong", [OverDpOnly, PositionsFromZero, CountsOwnTokens, NoDocuments])
def test_wrong_layouts_are_found(wrong):
    (row,) = compare(layout(), {"documents": CONTEXT_CASES["documents"]}, steps=1, strategy=wrong)
    assert not row.ok and row.worst_gradient > 1e-3


def test_command(capsys):
    arguments = ["oracle", "--dp", "1", "--zero", "0", "--accumulate", "1", "--cp", "2", "--cases", "padded"]
    assert run([*arguments, "--context", "zigzag,ulysses"]) == 0
    out = capsys.readouterr().out
    assert "cp 2 zigzag, padded" in out and "cp 2 ulysses, padded" in out and "2 entries, none off" in out
    assert run([*arguments, "--context", "spiral"]) == 2
    assert "--context spiral: choose from ring, zigzag" in capsys.readouterr().err
