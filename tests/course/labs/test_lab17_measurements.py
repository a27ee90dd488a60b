"""Lab 17's numbers agree: what its text says with the formulas, what its programs log with their bugs."""

import random

import pytest
import torch

from course.kit.answers import answers_of
from course.lab17_adapters import experiments, formulas, receipts
from course.lab17_adapters import experiments_breaks as breaks
from course.lab17_adapters import experiments_serving as serving
from course.lab17_adapters import figures as pictures
from course.lab17_adapters.codes import Codes
from course.lab17_adapters.experiments import FAR, NEAR, BatchCost, Tuned
from minillm.adapters.store import digest_of
from minillm.predict.planner.architectures import architecture
from minillm.predict.training.adapters import LAYERS, Adapters
from tests.course.labs.lab_text import numbers_of

ANSWERS, said = answers_of("17_adapters"), numbers_of("17_adapters")


def test_design_of_one_node_has_the_numbers_of_its_answer():
    plain, lora, qlora = formulas.fine_tunes()
    model = architecture("llama-3-70b")
    assert said(r"all weights with Adam take ([\d.]+) GB on each card") == (round(plain.states / 1e9, 1),)
    assert plain.left < 0 < qlora.left
    assert said(r"sharded \(ZeRO-3\) takes ([\d.]+) GB and leaves ([\d.]+) GB") == (
        round(lora.states / 1e9, 1),
        round(lora.left / 1e9, 1),
    )
    assert said(r"about ([\d,]+) tokens on each card at ([\d.]+) MB") == (
        round(lora.left / formulas.token_bytes(), -2),
        round(formulas.token_bytes() / 1e6, 1),
    )
    assert said(r"gathering (\d+) GB of weights") == (round(2 * model.parameters / 1e9),)
    assert said(r"QLoRA takes ([\d.]+) GB") == (round(qlora.states / 1e9, 1),)
    (_, _, alone) = formulas.fine_tunes(cards=1)
    assert alone.left > 0, "QLoRA would train on a single card"


def test_design_of_1000_tenants_has_the_numbers_of_its_answer():
    found = formulas.tenancy()
    one, all_, fit, away, rate = said(
        r"one adapter is ([\d.]+) MB, all of them ([\d.]+) GB: (\d+) fit into 10 GB "
        r".*? ([\d.]+) ms away over PCIe at (\d+)"
    )
    assert (one, all_, fit) == (round(found.adapter / 1e6, 1), round(found.all / 1e9, 1), found.fit)
    assert away == round(found.adapter / (rate * 1e9) * 1e3, 1)
    different, step, base, merged, turn, weights = said(
        r"64 requests have (\d+) different adapters, and a step takes ([\d.]+) ms instead of ([\d.]+); (\d+) merged "
        r"models in turn would take (\d+) ms, were there room for their (\d+) GB"
    )
    assert weights == round(different * 2 * architecture("llama-3-8b").parameters / 1e9)
    assert different == merged == round(found.different)
    assert (step, base, turn) == (
        round(found.step * 1e3, 1),
        round(found.base_step * 1e3, 1),
        round(found.merged * 1e3),
    )


def test_different_adapters_are_as_many_as_drawn():
    draw = random.Random(0)
    drawn = [len({draw.randrange(50) for _ in range(40)}) for _ in range(4000)]
    assert formulas.different_adapters(50, 40) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


def test_adapters_save_about_a_third_of_the_flops():
    for rank, layers in ((1, ("q_proj",)), (4, ("down_proj",)), (16, LAYERS), (64, LAYERS)):
        share = formulas.step_share(formulas.of_model("llama-3-8b", rank, layers), 1024)
        assert 0.65 < share < 0.75


def test_activations_shrink_as_the_text_says():
    all_layers, two = experiments.activation_shares()
    assert round(1 / (1 - all_layers)) == 7 and round(1 / (1 - two)) == 3
    _, lora, qlora = experiments.step_bytes()
    assert round(5 * lora.predicted["activations"] / lora.total) == 2
    assert qlora.predicted["activations"] > qlora.total / 2


def test_six_of_eight_requests_continue_on_blocks_of_another_adapter():
    owner, foreign = serving.prompts()[0][0], 0
    for each in serving.served(forgets=True)[0]:
        foreign += each.hit > 0 and each.adapter != owner
    assert foreign == 6


def test_programs_show_their_own_bug_and_no_other():
    for dtype in (torch.float32, torch.bfloat16):
        for bug in breaks.VERDICTS:
            for seed in range(5):
                random.seed(seed)
                torch.manual_seed(seed)
                assert ANSWERS.verdict(breaks.run(bug, dtype, 4)) == bug, (dtype, bug, seed)
    first, second = (breaks.all_programs()["B"] for _ in range(2))
    assert torch.equal(first.merged, second.merged) and first.requests == second.requests


def test_the_key_of_the_exercise_tells_apart_what_the_store_does():
    from minillm.adapters.peft_folder import read_peft

    with serving.folders() as folders:
        adapters = [read_peft(folder) for folder in (*folders.values(), folders["red"])]
    for of in (digest_of, lambda each: ANSWERS.adapter_key((each.config.scale, each.matrices))):
        keys = [of(each) for each in adapters]
        assert keys[0] == keys[3] and len(set(keys)) == 3


def test_codes_decode_to_new_tensors_of_the_same_values():
    codes = Codes(torch.randn(3, 64))
    one, other = codes.weight(), codes.weight()
    assert torch.equal(one, other) and one.data_ptr() != other.data_ptr() and codes.nbytes < one.nbytes / 6


def test_the_two_texts_are_as_far_as_they_are_said_to_be():
    near, far = (experiments.windows(task)[1] for task in (NEAR, FAR))
    assert len(near) >= experiments.HELD_OUT and len(far) >= experiments.HELD_OUT
    model = experiments.target()
    assert experiments._loss(model, near) < experiments._loss(model, far)


@pytest.mark.full
def test_a_larger_rank_gains_more_far_from_the_base():
    found = [experiments.tune(task, rank) for task in (NEAR, FAR) for rank in (8, 64)]
    assert receipts.last_ranks(found).ok
    assert all(each.after < each.before for each in found)
    config = experiments.target().config
    assert [each.numbers for each in found[:2]] == [Adapters(config, rank, LAYERS).parameters for rank in (8, 64)]


def test_every_figure_is_drawn():
    tuned = [Tuned(task, rank, 10, 5.0, 4.0 - (rank is None), 0.1) for task in (NEAR, FAR) for rank in (1, 8, 64, None)]
    costs = [BatchCost(n, 1e-3, n * 1e-3, 9e-4) for n in (1, 4, 16)]
    for figure in (
        pictures.draw_rank(tuned),
        pictures.draw_costs(costs),
        pictures.draw_memory(experiments.step_bytes()),
    ):
        assert figure.axes
    for model in pictures.NAMES:
        for cards in (1, 16):
            assert pictures.states_on_a_card(model, 256, cards).axes
