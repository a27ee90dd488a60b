"""Lab 25's numbers agree: what its text says with the formulas, and what it measures with what it says it measures."""

from collections import Counter

import pytest
import torch
from torch import nn

from course.kit import checks, exercises
from course.kit.answers import answers_of
from course.lab25_kernels import experiments, formulas, launches, receipts
from course.lab25_kernels import experiments_breaks as breaks
from course.lab25_kernels.experiments_recorded import Recorded, Toy
from course.lab25_kernels.tried import Case
from course.shared.kernels import INSTALLED
from minillm.predict import kernels
from tests.course.labs.lab_text import numbers_of

ANSWERS, said = answers_of("25_kernels"), numbers_of("25_kernels")


def test_the_first_answer_is_arithmetic():
    array = 2 * 2**26
    assert said(r"An array is (\d+) MB") == (round(array / 1e6),)
    bytes_, slow = said(r"move five of them, (\d+) MB, ([\d.]+) ms at")
    assert bytes_ == round(5 * array / 1e6) and slow == round(5e3 * array / formulas.BANDWIDTH, 2)
    assert said(r"moves three, ([\d.]+) ms") == (round(3e3 * array / formulas.BANDWIDTH, 2),)
    assert said(r"four and two arrays, ([\d.]+) and ([\d.]+) ms") == (
        round(4e3 * array / formulas.BANDWIDTH, 2),
        round(2e3 * array / formulas.BANDWIDTH, 2),
    )


def test_the_design_answer_is_arithmetic():
    assert said(r"caches are read in ([\d.]+) ms") == (round(1e3 * formulas.bytes_s(8, 1024, True), 1),)
    a_layer, launched, host, assumed = said(
        r"launches (\d+) kernels a layer, (\d+) with the head alone, (\d+) ms at (\d+) µs"
    )
    assert (a_layer, launched) == (launches.of_a_layer(), formulas.launches(False))
    assert assumed == 1e6 * formulas.LAUNCH_S and host == round(1e3 * launched * formulas.LAUNCH_S)
    assert said(r"brings that to ([\d.]+) ms") == (round(1e3 * formulas.launches(True) * formulas.LAUNCH_S, 1),)


def test_bytes_of_a_step_are_those_of_the_weights_and_the_cache():
    """Another count: 7.505 billion weights that are read, keys and values of 131,072 B a token."""
    step = formulas.step(4, 1000, fused=True)
    assert sum(k.read for k in step) == pytest.approx(2 * 7.505e9 + 4 * 1000 * 131_072, rel=2e-3)
    first = formulas.first_batch_without_waiting(1024, fused=False)
    host = formulas.launches(False) * formulas.LAUNCH_S
    assert formulas.bytes_s(first, 1024, False) >= host > formulas.bytes_s(first - 1, 1024, False)


def test_a_replay_reads_the_recorded_arrays_whatever_the_names_mean():
    model = Toy.drawn()
    graph = Recorded(2, model)
    graph.tokens.copy_(torch.tensor([3, 4]))
    graph.slots.copy_(torch.tensor([7, 8]))
    static = graph.logits
    graph.replay()
    assert torch.equal(static, model.rows[[3, 4]] + model.keys[[3, 4], None])
    graph.tokens = torch.tensor([5, 6])
    graph.replay()
    assert torch.equal(static, model.rows[[3, 4]] + model.keys[[3, 4], None]) and graph.replays == 2


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_bugs_hide_on_some_inputs_and_show_on_others():
    x = (torch.arange(128) % 9).view(2, 64).half() / 8
    for name in breaks.BUGS:
        sums, seen = breaks.program(name)(x)
        assert torch.allclose(sums, x.float().sum(1), rtol=1e-3), name
        assert not seen.outside and not seen.races, name  # one tile a row: no tail, and no second program
    for width in (2049, 2050, 4096, 4099):  # one number after the other: no width above 2,048 is summed by luck
        ones = torch.ones(1, width).half()
        assert [float(breaks.program(name)(ones)[0]) for name in "BEF"] == [width, 2048, width]


@pytest.mark.full
@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "exercise", ["bias-relu", "softmax-rows", "norm-kernels", "matmul-tiles", "between-products", "paged-decode"]
)
def test_the_lab_s_kernels_agree_with_float64_in_100_cases(exercise, monkeypatch):
    """Each launch of a check is a case: sizes, strides and dtypes are drawn anew, surroundings are not numbers, and the
    bytes of each tensor are counted."""
    known, cases, launch = exercises.find(exercise), Counter(), Case.launch

    def counted(self, kernel, *arguments, **constants):
        cases[kernel.__name__] += 1
        return launch(self, kernel, *arguments, **constants)

    monkeypatch.setattr(Case, "launch", counted)
    for seed in range(100):
        assert (outcome := checks.verify(known, known.reference, seed)).status == "passed", outcome
        if min(cases.values()) >= 100:
            break
    assert min(cases.values()) >= 100 and len(cases) == (2 if isinstance(known.reference, tuple) else 1)


def test_graphs_are_counted():
    class Twice(nn.Module):
        def forward(self, x):
            y = x + 1
            return y * 2 if y.sum().item() > 0 else y

    assert experiments.graphs_by_call(Twice(), [torch.ones(3, 2)] * 2) == [2, 2]
    assert experiments.graphs_by_call(nn.Linear(2, 2), [torch.ones(3, 2), torch.ones(5, 2)]) == [1, 1]


def test_without_a_compiler_times_are_left_out_and_said(monkeypatch):
    monkeypatch.setattr(experiments, "missing_compiler", lambda: "no compiler.")
    found = experiments.fusion(4096, repeats=1)
    assert found.compiled == {} and set(found.roof) == {"same", "row"}
    assert "no compiler." in receipts.fusion(found).title
    assert experiments.losing().missing and experiments.compile_and_read(ANSWERS.block).missing
    assert "no compiler." in receipts.compiled(experiments.compile_and_read(ANSWERS.block)).title


def test_without_triton_receipts_say_so(monkeypatch):
    monkeypatch.setattr(receipts, "INSTALLED", False)
    for made in (receipts.traced_bias(), receipts.verdicts(), receipts.programs(None)):
        assert "pip install triton" in made.title
    assert not any("bytes" in row.name and row.kind == "measured" for row in receipts.tiles().rows)


def test_fusing_more_operations_saves_more():
    chain = [kernels.elementwise(10, 1, 4)] * 5
    assert kernels.fused(chain, 40, name="chain").bytes == 2 * 40
