"""Lab 16's numbers agree: what its text says with the formulas, planted outliers with the model that they are in."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from course.kit.answers import answers_of
from course.lab16_quantization import experiments, formulas, receipts
from course.lab16_quantization import experiments_breaks as breaks
from course.lab16_quantization import figures as pictures
from course.lab16_quantization import receipts_speed as speed
from course.lab16_quantization.checks_methods import by_inverting
from minillm.predict.serving import quantization as predict
from minillm.quantize import Int
from minillm.quantize.gptq import gptq
from minillm.quantize.kv import KV_FORMATS, rounded_rows
from tests.course.labs.lab_text import numbers_of

ANSWERS, said = answers_of("16_quantization"), numbers_of("16_quantization")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_design_of_one_card_has_the_numbers_of_its_answer():
    plans = {plan.name: plan for plan in formulas.plans()}
    small = plans["4 bits, 8 bits"]
    assert plans["16 bits, 16 bits"].sequences == plans["8 bits, 8 bits"].sequences == 0
    assert said(r"16 bits \((\d+) GB\) and in 8 bits \((\d+) GB\)") == tuple(
        round(plans[name].weights / 1e9) for name in ("16 bits, 16 bits", "8 bits, 16 bits")
    )
    took, left = said(r"they take ([\d.]+) GB, and the cache gets ([\d.]+) GB")
    assert (took, left) == (round(small.weights / 1e9, 1), round(small.cache / 1e9, 1))
    assert said(r"keys and values are (\d+) kB in 16 bits") == (round(plans["4 bits, 16 bits"].per_token / 1e3),)
    assert said(r"are (\d+) kB: five") == (round(small.per_token / 1e3),)
    assert (plans["4 bits, 16 bits"].sequences, small.sequences) == (2, 5)
    milliseconds, tokens = said(r"five full caches: ([\d.]+) ms at 3.35 TB/s, (\d+) tokens")
    assert milliseconds == pytest.approx(small.step * 1e3, abs=0.05) and tokens == int(1 / small.step)
    read = small.step * formulas.H100_8B.bandwidth
    assert said(r"caches are (\d+) % of") == (round(100 * 5 * 32768 * small.per_token / read),)


def test_design_of_day_and_night_has_the_numbers_of_its_answer():
    day = [(2048, 1)] * 8
    four, eight = said(r"4-bit weights make the step ([\d.]+) times shorter, 8 bits ([\d.]+) times")
    for told, cost in ((four, formulas.FOUR), (eight, formulas.EIGHT)):
        assert told == pytest.approx(formulas.PLAIN.step(day) / cost.step(day), abs=0.05)
    night, *others = [formulas.prompt_seconds(cost, 2048) for cost in (formulas.PLAIN, formulas.FOUR, formulas.EIGHT)]
    said("4-bit weights gain nothing, 8 bits for weights and inputs almost halve the time")
    assert night == others[0] and 1.9 < night / others[1] < 2


def test_8_bits_gain_the_same_at_every_batch_of_short_contexts():
    """The head stays in 16 bits, in its bytes and in its products."""
    gains = [formulas.PLAIN.step([(0, 1)] * batch) / formulas.EIGHT.step([(0, 1)] * batch) for batch in (1, 512, 4096)]
    assert gains == pytest.approx([1 / (1 - formulas.LAYERS_8B / formulas.PLAIN.parameters / 2)] * 3, rel=0.01)


def test_limits_of_the_speedup_are_those_that_the_interview_names():
    full, none = said(r"full factor holds up to (\d+) sequences, and from (\d+) on it is 1")
    bits = predict.bits_per_weight(4, 128)
    assert full == int(predict.batch_of_full_speedup(bits, *speed.H100))
    assert none == math.ceil(predict.batch_without_speedup(16, *speed.H100))


def test_the_head_in_16_bits_gives_the_other_pair_of_numbers():
    kept, knee = said(r"output head in 16 bits, as most 4-bit models do: ([\d.]+) times, up to (\d+) sequences")
    assert kept == pytest.approx(formulas.PLAIN.step([(0, 1)]) / formulas.FOUR.step([(0, 1)]), abs=0.005)
    assert knee == int(formulas.knee(formulas.FOUR))


@pytest.mark.parametrize("cost", [formulas.PLAIN, formulas.FOUR, formulas.EIGHT])
@pytest.mark.parametrize("context", [0, 64])
def test_knee_is_where_compute_takes_over(cost, context):
    before, after = int(formulas.knee(cost, context)), int(formulas.knee(cost, context)) + 1
    memory = [(cost.weight_bytes + cost.kv_bytes * count * (context + 1)) / cost.bandwidth for count in (before, after)]
    times = [cost.step([(context, 1)] * count) for count in (before, after)]
    assert times[0] == pytest.approx(memory[0]) and times[1] > memory[1] * (1 + 1e-9)


def test_knees_are_on_the_grid_of_the_figure():
    [curve, *_] = pictures.speedup_by_batch(4.125, 16, 0).axes[0].lines
    assert {91, 92, 295, 296} <= set(curve.get_xdata())


def test_what_a_bit_gains_in_smaller_groups_is_what_the_text_says():
    points = experiments.noise_by_group((256, 128, 64, 32))["int4"]
    gains = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    (bit,) = said(r"from 128 to 64 about as much as a bit of the codes, ([\d.]+) dB, from 64 to 32 half of it")
    assert gains[0] > gains[1] == pytest.approx(bit, abs=0.5) and gains[2] == pytest.approx(bit / 2, abs=0.5)


def test_planted_outliers_change_nothing_but_the_rounding():
    ids = experiments.held_out()[0][:2, :64]
    plain, model = experiments.target(), experiments.planted()
    with torch.no_grad():
        assert torch.allclose(model(ids), plain(ids), atol=2e-3)
    loud = {name: m.weight for name, m in model.blocks.named_modules() if type(m) is nn.Linear}["0.attention.q_proj"]
    quiet = experiments.layers()["0.attention.q_proj"]
    assert torch.allclose(loud[:, :: experiments.EVERY] * experiments.LOUDER, quiet[:, :: experiments.EVERY])
    assert torch.equal(loud[:, 1], quiet[:, 1])


def test_answers_round_as_the_package_does():
    weight = torch.randn(6, 64, generator=generator())
    format = Int(bits=4, group=16)
    assert torch.equal(ANSWERS.round_int4(weight, 16), format.nearest(weight, format.grid(weight)))
    keys = torch.randn(5, 3, 8, generator=generator(1))
    codes, scale = ANSWERS.quantize_kv(keys)
    assert torch.allclose(codes * scale[..., None], rounded_rows(KV_FORMATS["int8"], keys), atol=1e-6)


def test_columns_by_cholesky_by_inverting_and_by_the_package_are_the_same():
    weight = torch.randn(4, 32, generator=generator(2))
    x = torch.randn(200, 32, generator=generator(3)) @ torch.randn(32, 32, generator=generator(4))
    format = Int(bits=8, scale_dtype=torch.float32)
    codes, grid = gptq(weight, x.T @ x, format, by_activation=False)
    ours = format.decode(codes, grid.spread(32))
    gram = (x.T @ x).double()
    gram.diagonal().add_(0.01 * gram.diagonal().mean())

    def nearest(column, j):
        return format.decode(format.encode(column[:, None].float(), grid), grid)[:, 0].double()

    upper = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    by_columns = ANSWERS.gptq_columns(weight.double(), upper, nearest)
    assert torch.allclose(by_columns, by_inverting(weight.double(), gram, nearest), atol=1e-9)
    assert torch.allclose(by_columns.float(), ours, atol=1e-4)


def test_programs_have_the_bugs_that_they_are_said_to_have():
    for name, (weight, rounded) in breaks.all_programs().items():
        assert ANSWERS.verdict(weight, rounded, 64) == breaks.BUGS[name]
    assert breaks.all_programs()["A"][0].equal(breaks.all_programs()["A"][0])
    weight = torch.randn(64, 64, generator=generator(5))
    shift = breaks.zero_off_by_one(weight, 32) - breaks.nearest(weight, Int(bits=4, group=32, symmetric=False))
    steps = Int(bits=4, group=32, symmetric=False).grid(weight).scale
    assert torch.allclose(shift.unflatten(1, (-1, 32)).mean(-1), -steps, atol=1e-5)


def test_bits_of_what_is_left_out_are_those_of_the_tensors():
    weight = torch.randn(64, 96)
    values, places = ANSWERS.two_of_four(weight)
    bits = {name: bits for name, bits, _ in formulas.WAYS}
    assert bits["2:4, by size"] == (16 * values.numel() + 2 * places.numel()) / weight.numel()
    rank = formulas.half_rank(weight)
    assert 16 * rank * sum(weight.shape) / weight.numel() == pytest.approx(
        bits["rank for half the numbers, SVD"], rel=0.1
    )


def test_a_model_is_no_distance_from_itself_and_int8_less_than_int4():
    assert experiments.divergence(experiments.target()) == pytest.approx(0, abs=1e-6)
    int8, int4 = (experiments.divergence(experiments.in_format(name)[0]) for name in ("int8", "int4, groups of 128"))
    assert 0 < int8 < int4 < 0.05


def test_compressed_tensors_reads_the_bytes_of_the_first_exercise():
    pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    assert receipts.peer().ok and receipts.peer().rows


def test_pictures_of_parameters():
    assert "4.5 bits per weight" in pictures.grid_of_a_row(4, 32, 3.0).axes[0].texts[-1].get_text()
    shown = [each.get_text() for each in pictures.speedup_by_batch(4.125, 16, 0).axes[0].texts]
    expected = formulas.PLAIN.step([(0, 1)] * 16) / formulas.FOUR.step([(0, 1)] * 16)
    assert f"batch 16: {expected:.2f} times" in shown
