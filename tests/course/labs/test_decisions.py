"""The rubric of design decisions: right numbers pass, wrong ones are told their mistake."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from course.kit import course
from course.lab20_design_training import experiments_limits
from course.lab20_design_training import receipts as training
from course.lab21_design_serving import experiments_cold
from course.lab21_design_serving import receipts as serving
from course.shared.decisions import MOVES, Decision, decide, judge, shown
from course.shared.units import in_unit
from minillm.predict.planner import published

pytestmark = pytest.mark.drawn(2)

ROOT = Path(__file__).parents[3]
LABS = {"20_design_training": training.CASES, "21_design_serving": serving.CASES}
PROBLEMS = [(lab, name) for lab, cases in LABS.items() for name in cases]
BYTES = Decision("bytes", 1.27e12, "B", "because", gpus=64)
FLOPS = Decision("FLOPs", 3.9e25, "FLOP", "because")
SHARE = Decision("share", 0.17, "", "because", tolerance=0.05)
SECONDS = Decision("seconds", 817.0, "s", "because")
HOURS = Decision("GPU-hours", 817.0, "GPU-hours", "because")
STAGE = Decision("the lowest ZeRO stage that fits", 3, "", "because", tolerance=0.01)
GPUS = Decision("GPUs", 176, "GPUs", "because", tolerance=0.35)
OWN = Decision("bytes", 18e9, "B", "because", slips={2 / 18: "the weights alone"})

WRONG = [  # decision, number, what the sentence must say
    (BYTES, 8 * 1.27e12, "bits"),
    (BYTES, 1.27e12 / 8, "divided by 8"),
    (BYTES, 64 * 1.27e12, "all 64 GPUs together"),
    (BYTES, 1.27e12 / 64, "one of the 64 GPUs"),
    (BYTES, 2 * 1.27e12, "Twice"),
    (BYTES, 1.27e12 / 2, "Half"),
    (BYTES, 1.27e15, "thousand times too large"),
    (BYTES, 1.27e9, "thousand times too small"),
    (BYTES, 1.27e18, "million times too large"),
    (BYTES, 1.27e6, "million times too small"),
    (BYTES, 3.1 * 1.27e12, "3.1 times too large"),
    (BYTES, 1.27e12 / 5, "5 times too small"),
    (BYTES, 0, "above 0"),
    (BYTES, -1.27e12, "above 0"),
    (BYTES, math.nan, "above 0"),
    (BYTES, math.inf, "above 0"),
    (BYTES, "1.27 TFLOP", "in B"),
    (BYTES, "1.27e21", "giga"),
    (BYTES, "1,27e12", "comma"),
    (BYTES, 1.27, "tera"),
    (BYTES, "10.16 TB", "bits"),
    (HOURS, 817 * 3600.0, "GPU-seconds"),
    (BYTES, None, "no number"),
    (BYTES, [1.27e12], "no number"),
    (FLOPS, 3.9e25 / 2, "two operations"),
    (FLOPS, 3.9e25 / 3, "backward takes twice"),
    (FLOPS, 3.9e25 * 3, "includes a backward"),
    (FLOPS, 3.9e22, "thousand times too small"),
    (SHARE, 17, "percent"),
    (SHARE, 0.2, "1.18 times too large"),
    (SHARE, 0.00017, "thousand times too small"),
    (SECONDS, 817e3, "milliseconds"),
    (SECONDS, 817 / 60, "minutes"),
    (SECONDS, 817 / 3600, "hours"),
    (SECONDS, 400, "2.04 times too small"),
    (STAGE, 2, "Your number is too small."),
    (GPUS, 64, "2.75 times too small; accepted is 115 GPUs to 237 GPUs."),
    (OWN, 2e9, "the weights alone"),
    (OWN, 2.05e9, "the weights alone"),
    (OWN, 36e9, "Twice"),
]


@pytest.mark.parametrize(("decision", "number", "sentence"), WRONG, ids=str)
def test_a_wrong_number_is_told_its_mistake(decision, number, sentence):
    verdict = judge(decision, number)
    assert verdict.kind != "right" and sentence in verdict.sentence
    assert not decide(decision, number).good


def test_right_numbers_pass_and_gib_are_noticed():
    assert judge(BYTES, 1.27e12).sentence == "Right."
    assert "within 10%" in judge(BYTES, 1.4e12).sentence
    assert "GiB" in judge(BYTES, 1.27e12 / 1.0737).sentence


SAID = [  # as somebody says it, the unit asked for, what it is
    ("1.27 TB", "B", 1.27e12), ("10.5 gb", "B", 10.5e9), ("80 Gb", "B", 10e9), ("3 GiB", "B", 3 * 2**30),
    ("10.5GB", "B", 10.5e9), ("4 bytes", "B", 4), ("100 Gb/s", "B/s", 12.5e9), ("50 GB/s", "B/s", 50e9),
    ("41 %", "", 0.41), ("70B", "", 70e9), ("70 billion", "", 70e9), ("0.41", "", 0.41), ("3 x", "", 3),
    ("25 ms", "s", 0.025), ("2 min", "s", 120), ("3 hours", "s", 10800), ("48 h", "days", 2), ("3.5", "days", 3.5),
    ("1,076", "s", 1076), ("12k tokens/s", "tokens/s", 12e3), ("3 GWh", "MWh", 3000), ("5 TFLOP", "FLOP", 5e12),
    ("1.2 million GPU-hours", "GPU-hours", 1.2e6), ("20k", "tokens", 20e3), (12, "s", 12), ("1e9", "B", 1e9),
    ("220 µs", "s", 220e-6), ("220 us", "s", 220e-6), ("46 rounds", "", 46), ("8.5 bit", "bits", 8.5),
    ("206 FLOP/B", "", 206), ("295 FLOPs/byte", "", 295), ("126 steps", "", 126), ("85.5 hrs", "h", 85.5),
    ("$207,360", "dollars", 207360), ("about $0.21M", "dollars", 210e3), ("0.21M USD", "dollars", 210e3),
    ("127 t/s", "tokens/s", 127), ("127 tps", "tokens/s", 127),
]  # fmt: skip


@pytest.mark.parametrize(("said", "unit", "number"), SAID)
def test_numbers_are_taken_with_their_unit(said, unit, number):
    assert in_unit(said, unit) == pytest.approx(number)


@pytest.mark.parametrize(
    ("said", "unit"),
    [
        ("5 apples", "s"),
        ("", "s"),
        ("1,5", "s"),
        ("abc", "B"),
        ("5 GB", "s"),
        ("5 s", "B"),
        ("1.2.3", "B"),
        ("5 GB/s", "B"),
        ("$5", "B"),
    ],
)
def test_another_unit_is_refused_and_never_guessed(said, unit):
    with pytest.raises(ValueError, match=r"no number|cannot be read"):
        in_unit(said, unit)


def test_another_convention_is_right_too():
    both = replace(SHARE, also=(0.2,))
    assert judge(both, 0.2).kind == "right" and "of 0.2000, which is right too" in judge(both, 0.205).sentence
    assert "0.1615 to 0.1785 or 0.1900 to 0.2100" in judge(both, 0.3).sentence
    assert "0.1615 to 0.1890." in judge(replace(SHARE, also=(0.18,)), 0.3).sentence


def test_a_number_out_of_range_is_told_the_range_and_the_reason_of_its_bound():
    decision = replace(SECONDS, below="Too few saves.", above="Too many.")
    assert judge(decision, 400).sentence.endswith("Too few saves.") and "accepted is" in judge(decision, 400).sentence
    assert judge(decision, 2000).sentence.endswith("Too many.")


@pytest.mark.parametrize(("lab", "name"), PROBLEMS)
def test_a_problem_is_walked_through_in_all_moves(lab, name):
    problem = LABS[lab].answer(name)
    text = repr(problem) + problem._repr_markdown_()
    assert "{" not in text, "a number of the answer was not filled in"
    assert all(f"*{move}.*" in text for move in MOVES.values())
    assert all(getattr(problem, move) for move in MOVES) and problem.weak and problem.why
    assert 2 <= len(problem.follow) <= 3


@pytest.mark.parametrize(("lab", "name"), PROBLEMS)
def test_the_decisions_of_a_problem_name_their_slips_and_their_bounds(lab, name):
    for decision in LABS[lab].decisions(name).values():
        assert math.isfinite(decision.value) and decision.value > 0
        assert judge(decision, decision.value).kind == "right"
        for factor, sentence in decision.slips.items():
            assert judge(decision, factor * decision.value) != judge(decision, decision.value)
            assert judge(decision, factor * decision.value).sentence == sentence
        assert decision.below and decision.above
        for factors, reason in (((0.043, 0.29, 0.0071), decision.below), ((23.0, 3.4, 141.0), decision.above)):
            assert any(reason in judge(decision, factor * decision.value).sentence for factor in factors)


@pytest.mark.parametrize(("lab", "name"), PROBLEMS)
def test_the_notebook_asks_for_every_decision_before_the_answer(lab, name):
    text = (course.home() / f"course/lab{lab}/notebook.py").read_text()
    answered = text.index(f'receipts.answer("{name}")')
    for decision in LABS[lab].decisions(name):
        assert text.index(f'receipts.decide("{name}", "{decision}"') < answered


ALSO_RIGHT = [  # right but for another convention, rounding or unit: problem, decision, what is said
    ("seventy_on_64", "days", "3139"), ("seventy_on_64", "states", "1.27e12"),
    ("money_and_energy", "days", "66.0"), ("money_and_energy", "days", "68.6"), ("money_and_energy", "days", "77"),
    ("money_and_energy", "energy", "20,770"), ("money_and_energy", "energy", "20.8 GWh"),
    ("money_and_energy", "flops", "3.8e25"), ("money_and_energy", "energy", "23 GWh"),
    ("a_straggler", "lost", "17 %"), ("a_straggler", "lost", "0.167"), ("a_hang", "lost", "2,731 GPU-hours"),
    ("a_loss_spike", "lost", "3186"), ("scaling", "busy", "25 %"), ("scaling", "busy", "0.25"),
    ("fine_tune_on_a_node", "adapters", "207 million"), ("fine_tune_on_a_node", "missing", "502 GB"),
    ("seventy_on_64", "days", "2,750"), ("seventy_on_64", "days", "3,600"),
    ("checkpoint_interval", "mtbf", "3.1 h"), ("checkpoint_interval", "interval", "13.6 min"),
    ("seven_on_8", "replica", "121 GB"), ("four_hundred_on_16k", "bubble", "10.5 %"), ("gpt3_on_1024", "days", "34"),
    ("eight_on_24gb", "tpot", "54 ms"), ("does_speculation_pay", "ridge", "295"),
    ("does_speculation_pay", "ridge", "200"), ("does_quantization_pay", "one", "3.56"),
    ("does_quantization_pay", "one", "3.76"), ("bursts", "load", "70 s"), ("bursts", "backlog", "1,950"),
    ("rag_32k", "cache", "10.5 GB"), ("rag_32k", "cache", "10.5 gb"), ("rag_32k", "cache", "9.77 GiB"),
    ("split_prefill_decode", "moved", "655 MB"), ("many_adapters", "adapter", "84 MB"), ("tail_at_85", "mean", "5.7"),
    ("tail_at_85", "tail", "29.6"), ("at_the_edge", "speed", "35"), ("chat_70b", "demand", "60k tokens/s"),
    ("chat_70b", "inside", "1,800"), ("chat_70b", "inside", "3,000"), ("chat_70b", "gpus", "128"),
]  # fmt: skip
STILL_WRONG = [  # and what a candidate is told
    ("a_straggler", "lost", "20 %", "throughput falls"), ("does_quantization_pay", "one", "4", "scales count"),
    ("money_and_energy", "days", "28", "peak"), ("money_and_energy", "days", "1650", "hours"),
    ("rag_32k", "cache", "10.5", "giga"), ("rag_32k", "cache", "5.2 GB", "numbers instead of bytes"),
    ("fine_tune_on_a_node", "adapters", "65.5e6", "MLP"), ("fine_tune_on_a_node", "adapters", "2.6e6", "one layer"),
    ("fine_tune_on_a_node", "adapters", "225e6", "8 heads of 128"),
    ("fine_tune_on_a_node", "adapters", "183.5e6", "leaves out k and v"),
    ("seventy_on_64", "days", "1590", "backward 4"), ("seventy_on_64", "days", "1550", "larger share of the peak"),
    ("a_loss_spike", "lost", "53.1", "60 once too often"), ("scaling", "busy", "256", "number of GPUs"),
    ("many_adapters", "adapter", "41.9e6", "numbers instead of bytes"), ("a_hang", "lost", "9.8e6", "GPU-seconds"),
    ("a_hang", "lost", "0.167", "All GPUs wait"), ("scaling", "busy", "1", "other axes share"),
    ("eight_on_24gb", "tpot", "0.107", "read once"), ("checkpoint_interval", "interval", "578", "under the root"),
    ("bursts", "backlog", "5200", "served meanwhile"), ("tail_at_85", "mean", "6.67", "includes the service"),
    ("four_hundred_on_16k", "bubble", "0.117", "useful time"), ("seven_on_8", "replica", "15.2 GB", "what ZeRO does"),
    ("chat_70b", "gpus", "112", "without headroom"), ("chat_70b", "gpus", "17", "nodes"),
    ("many_adapters", "adapter", "90.2 MB", "as wide as q"), ("eight_on_24gb", "tokens", "49,504", "5 % that are lost"),
]  # fmt: skip
HOME = {name: cases for cases in LABS.values() for name in cases}


@pytest.mark.parametrize(("problem", "name", "said"), ALSO_RIGHT)
def test_what_is_right_to_the_question_as_printed_is_accepted(problem, name, said):
    verdict = judge(HOME[problem].decisions(problem)[name], said)
    assert verdict.kind == "right", verdict.sentence


@pytest.mark.parametrize(("problem", "name", "said", "told"), STILL_WRONG)
def test_what_is_wrong_is_told_why(problem, name, said, told):
    verdict = judge(HOME[problem].decisions(problem)[name], said)
    assert verdict.kind != "right" and told in verdict.sentence + HOME[problem].decisions(problem)[name].because


TEXTS = [tomllib.loads((ROOT / "course" / f"lab{lab}" / "answers.toml").read_text(encoding="utf-8")) for lab in LABS]
EVERY = [(name, each) for texts in TEXTS for name in texts for each in texts[name]["bounds"]]  # decided when tested


def test_every_decision_has_its_bounds_and_none_is_left_out():
    assert [(name, each) for name in HOME for each in HOME[name].decisions(name)] == EVERY


def spellings(value, unit):
    """The same number as different candidates say it."""
    yield from (value, repr(value), f"{value:.6e}", f"{value:,.6f}" if value < 1e15 else f"{value}")
    if unit in ("B", "FLOP", "B/s"):
        yield from (f"{value / 1e9:.6f} G{unit}", f"{value / 1e12:.9f}T{unit}", f"{value / 2**30:.6f} Gi{unit}")
    if unit == "s":
        yield from (f"{value * 1e3} ms", f"{value / 60} min", f"{value / 3600} hours")
    if unit == "days":
        yield from (f"{value * 24} h", f"{value} days")
    if unit == "" and value < 1:
        yield f"{100 * value} %"
    if unit == "MWh":
        yield from (f"{value / 1e3} GWh", f"{value * 1e3} kWh")
    if unit not in ("", "s", "B", "B/s", "FLOP"):
        yield f"{value} {unit}"


@pytest.mark.parametrize(("problem", "name"), EVERY)
def test_every_decision_takes_its_number_in_any_spelling(problem, name):
    decision = HOME[problem].decisions(problem)[name]
    said = list(spellings(decision.value, decision.unit))
    assert len(said) >= 4
    for each in said:
        assert judge(decision, each).kind == "right", each
    for each in decision.also:
        assert judge(decision, each).kind == "right", each


@pytest.mark.parametrize(("problem", "name"), EVERY)
def test_every_decision_refuses_what_is_far_off_or_of_another_kind(problem, name):
    decision = HOME[problem].decisions(problem)[name]
    other = "3 apples" if decision.unit else "3 s"
    for wrong in (decision.value * 5.3, decision.value / 5.3, decision.value * 1e9, decision.value / 1e9, -1, other):
        assert judge(decision, wrong).kind != "right", wrong
    for power, word in ((9, "giga"), (-9, "giga"), (12, "tera"), (-12, "tera")):
        assert word in judge(decision, decision.value * 10.0**power).sentence


def test_two_nodes_are_as_much_slower_as_the_problem_says():
    numbers = training.CASES.answer("slower_on_two_nodes").numbers
    assert 0.4 < float(numbers["grew"].rstrip("%")) / 100 < 0.6


def test_what_lab_20_says_of_published_runs():
    tight = [found.run for found in map(published.compare, published.CHOSEN) if found.memory > found.usable]
    assert [name.split(",")[0] for name in tight] == ["NeMo 8B", "NeMo 405B", "DeepSeek-V3 671B"], "three, and whose"
    assert sum("more than the 73" in row.name for row in training.published_runs().open) == 3
    assert "PyTorch FSDP 13B, 128 GPUs, is 14.3% off" in training.judges()


@pytest.mark.parametrize("letter", experiments_limits.RUNS)
def test_five_questions_find_what_is_wrong_with_each_run(letter):
    wrong, run = experiments_limits.RUNS[letter]
    assert experiments_limits.limit(run.ledger) == wrong
    shares = run.ledger.input, run.ledger.link, run.ledger.bubble
    assert all(0 <= share < 1 for share in shares) and sum(shares) < 1 and 0 < run.ledger.reached < 1


def test_the_five_questions_are_asked_in_order():
    sound = experiments_limits.Ledger(0.9, 0.0, 0.05, 0.1, 0.5)
    assert experiments_limits.limit(sound) == "none"
    for change, found in (
        ({"memory": 1.01, "link": 0.5}, "memory"),
        ({"input": 0.3, "link": 0.2}, "input"),
        ({"bubble": 0.4, "reached": 0.2}, "bubble"),
        ({"reached": 0.2}, "kernels"),
    ):
        assert experiments_limits.limit(replace(sound, **change)) == found


@pytest.mark.full
def test_requests_are_timed_one_by_one_in_a_process_of_their_own():
    assert len(experiments_cold.in_a_new_process(3)) == 4


def test_bytes_are_quoted_with_three_digits():
    assert [shown(value, "B") for value in (0, 999, 1.234e9, 1.27e12)] == ["0 B", "999 B", "1.23 GB", "1.27 TB"]
