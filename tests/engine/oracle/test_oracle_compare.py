"""The oracle rejects replicas that are wrong in the usual ways; its command."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from course.shared.faults.strategy import PlantedStrategy
from course.shared.faults.training import MEAN_OF_MEANS
from minillm.__main__ import run
from minillm.equivalence import CASES, ParallelConfig, compare, oracle
from minillm.train.strategies.hybrid import Hybrid, make_strategy
from minillm.train.strategies.single_device import SingleDevice


class NotDivided(Hybrid):
    def loss_divisor(self, weight):
        return self.sum(weight)


class LastMicrobatchOnly(Hybrid):
    def accumulating(self, last):
        if last:
            for parameter in self.module.parameters():
                parameter.grad = None
        return super().accumulating(last)


class LocalNorm(Hybrid):
    def grad_norm(self, parameters):
        return SingleDevice.grad_norm(self, parameters)


def wrong(group, layout):
    """All of replicas, but for the norm, which is of ZeRO's shards; layout.zero says which."""
    form = (NotDivided, LocalNorm, PlantedStrategy((MEAN_OF_MEANS,)), LastMicrobatchOnly)[layout.zero]
    return form(group, replace(layout, zero=1 if form is LocalNorm else 0))


def test_wrong_layouts_are_found():
    cases = {"unequal": CASES["unequal"], "clipped": CASES["clipped"]}
    rows = {
        row.layout: row for row in compare([ParallelConfig(2, kind, 2) for kind in range(4)], cases, strategy=wrong)
    }
    found = {layout.removeprefix("dp 2, "): row.worst_gradient for layout, row in rows.items()}
    assert not any(row.ok for row in rows.values())
    assert found["zero 0, accumulate 2, unequal"] == pytest.approx(0.5)  # averaged once too often
    assert found["zero 2, accumulate 2, unequal"] > 0.01 and found["zero 3, accumulate 2, clipped"] > 0.01
    local = rows["dp 2, zero 1, accumulate 2, clipped"]  # gradients right, norm and clipping wrong
    assert local.worst_gradient < 1e-12 and local.grad_norm > 0.01 and local.worst_weight > 1e-6


def drifting(group, layout):
    form = make_strategy(group, layout)
    wrap = form.wrap

    def apart(model, master=False):
        module = wrap(model, master)
        model.norm.weight.data.add_(1e-13 * group.rank)
        return module

    form.wrap = apart
    return form


def test_a_bit_of_difference_between_ranks_is_found():
    (row,) = compare(ParallelConfig(2), {"plain": CASES["plain"]}, steps=1, strategy=drifting)
    assert not row.identical and not row.ok and row.worst_gradient < 1e-10


@pytest.mark.full
def test_command(tmp_path, capsys):
    path = tmp_path / "oracle.json"
    argv = ["oracle", "--dp", "1", "--zero", "0,3", "--accumulate", "2", "--cases", "size 1,tied", "--json", str(path)]
    assert run(argv) == 0
    saved = json.loads(path.read_text())
    assert "4 entries, none off" in capsys.readouterr().out
    wanted = {"layout", "worst_gradient", "worst_weight", "grad_norm", "parameter", "ok"}
    assert len(saved["rows"]) == 4 and all(row["ok"] and wanted <= row.keys() for row in saved["rows"])
    assert saved["provenance"]["command"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--zero", "4"], "zero 4 is not in 0 .. 3"),
        (["--dp", "0"], "dp 0 is not in 1 .. 65536"),
        (["--dp", "two"], "--dp two is not a list of whole numbers"),
        (["--cases", "odd"], "--cases odd: choose from plain, tied"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    assert run(["oracle", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


class _Stop(Exception):
    pass


def test_model_and_batch_are_on_the_device_of_the_group():
    """On a node with a GPU per rank both have to be there, and the group's messages are."""
    seen = []

    class Watched(SingleDevice):
        def build(self, config, **how):
            seen.append(how["device"])
            return super().build(config, **how)

        def forward_backward(self, module, microbatches, *_):
            seen.extend(x.device for each in microbatches for x in each if x is not None)
            raise _Stop

    group = SimpleNamespace(device=torch.device("meta"), rank=0)
    with pytest.raises(_Stop):
        oracle._step(group, Watched(), ParallelConfig(), "plain", CASES["plain"], 0, 0.1, 1)
    assert len(seen) > 2 and {torch.device(device).type for device in seen} == {"meta"}
