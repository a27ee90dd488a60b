"""Lab 03's measurements: the emulated clock and the transformer say what they should; nothing here looks at seconds."""

import pytest
import torch
from matplotlib.figure import Figure

from course.kit.interact import render
from course.lab03_data_parallel import experiments, formulas, rank_programs, receipts
from course.lab03_data_parallel import experiments_overlap as clock
from course.lab03_data_parallel import experiments_production as production
from course.lab03_data_parallel import figures as pictures
from minillm.comm import Link, launch

QUICK = clock.Slow(blocks=3, elements=400, seconds=0.002)


def test_model_of_known_length_predicts_itself():
    shape, link = clock.Slow(blocks=4, elements=1000, seconds=0.1), Link(0.01, 1e6)
    assert shape.backward_s == pytest.approx(0.4)
    assert shape.comm_s(link, 1) == pytest.approx([0.024] * 4)  # 2 rounds of 10 ms and 2 of 2 kB at 1 MB/s
    assert shape.comm_s(link, 3) == pytest.approx([0.032, 0.024])  # three blocks, then the one that is left
    assert shape.step_s(link, 1) == pytest.approx(0.424)
    assert shape.step_s(link, 4) == pytest.approx(formulas.naive_seconds(0.4, 0.036))


def test_every_form_reduces_every_block_and_naive_only_after_backward():
    forms = {"naive": clock.OURS["naive"], "bucketed": clock.bucketed(1, QUICK), "pairs": clock.bucketed(2, QUICK)}
    ledgers = launch(clock.steps, 2, forms, dict.fromkeys(forms, QUICK), 1)[0]
    found = clock.beside_prediction(ledgers, QUICK, clock.LINK)
    assert [led.calls["all_reduce"] for led in ledgers.values()] == [3, 3, 2]
    for form in found["forms"].values():
        assert form["bytes"] == 3 * QUICK.block_bytes and len(form["blocks"]) == 3
    last_block = {name: form["blocks"][-1][1] for name, form in found["forms"].items()}
    first_reduction = {name: form["reductions"][0][0] for name, form in found["forms"].items()}
    assert first_reduction["naive"] >= last_block["naive"]
    assert isinstance(pictures.draw_steps(found), Figure)


def test_case_is_the_same_for_everybody_who_knows_its_seed():
    case = rank_programs.TrainingCase(world_size=2, batch=3, seed=7)
    whole, shards = case.data(1)[0], [case.data(1, rank)[0] for rank in range(2)]
    assert torch.equal(whole, torch.cat(shards))
    flipped, straight = case.model(flip=True), case.model()
    assert torch.equal(flipped(whole), straight(whole))
    mean = sum(case.own(rank)["first.weight"] for rank in range(2)) / 2
    assert torch.allclose(mean, case.alone()[0][0]["first.weight"])


def test_wrong_gradients_are_told_apart():
    owns = {rank: torch.randn(4, 4, dtype=torch.float64) for rank in range(3)}
    right = sum(owns.values()) / 3
    said = {
        "the sum over the ranks, 3 times": 3 * right,
        "divided by 3 once more": right / 3,
        "this rank's own: nothing was averaged": owns[0],
        "rank 2's, not the mean": owns[2],
        "own divided by 3": owns[0] / 3,
        "is 0.5 times the mean": right / 2,
        "nor any multiple": right + 1,
        "is gone": None,
    }
    for words, found in said.items():
        assert words in rank_programs.say_gradient(found, right, owns, 0)
    assert "should be None" in rank_programs.say_gradient(right, None, {0: None}, 0)


def test_activations_peak_at_one_microbatch():
    one, several, whole = experiments.activation_peaks(batch=4, microbatches=2).values()
    assert one == several < whole


def test_views_are_figures():
    assert render(pictures.step_on_a_clock, blocks=3, blocks_per_bucket=2, ranks=4).startswith(b"\x89PNG")


def test_times_of_a_trace_are_those_of_its_spans():
    spans = [("DistributedDataParallel.forward", 1, 0, 2), ("aten::mm", 1, 0, 2), ("aten::mm", 1, 2, 5),
             ("c10d::allreduce_", 1, 4, 4.1), ("gloo:all_reduce", 2, 4, 7), ("gloo:all_reduce", 3, 6, 8),
             ("aten::mm", 1, 6.5, 7)]  # fmt: skip
    events = [{"name": name, "tid": tid, "start": start, "end": end} for name, tid, start, end in spans]
    found = production.trace_times(events)
    assert found == pytest.approx({"all-reduce": 4, "beside a matmul": 1.5, "after the last matmul": 1})
    drawn = pictures.draw_trace(events)
    assert drawn.axes[0].get_yticklabels()[0].get_text() == "main thread"


def test_a_real_trace_holds_every_matmul_and_every_bucket():
    rows = receipts.trace().rows
    assert [row.verdict for row in rows if row.predicted is not None] == ["ok"] * 3
