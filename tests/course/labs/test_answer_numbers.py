"""Every number of the design labs' model answers: computed a second time, given by its problem, or tested elsewhere."""

import math
import re

import answer_tables_serving
import answer_tables_training
import pytest
from card_numbers import Said, equal, numbers, without_names

from course.lab20_design_training import receipts as training
from course.lab21_design_serving import receipts as serving
from course.shared.cases import Cases

LABS = ((training.CASES, answer_tables_training), (serving.CASES, answer_tables_serving))
HOME = {problem: (cases, tables) for cases, tables in LABS for problem in cases}
MOVES = ("size", "choose", "check", "risk", "measure", "weak", "why")
NAMED = [(problem, name) for problem, (_, tables) in HOME.items() for name in tables.COMPUTED[problem]]
# bits of a type, axes with their size, models
TYPES = re.compile(r"(?<![.\d])\d+-bit\b|(?<![.\d])\d+ bits\b|\b(?:TP|PP|DP|CP) \d+|GPT-3")
LINK = re.compile(r"\(https?:[^)]*\)")


def test_every_problem_and_every_name_is_there():
    for problem, (cases, tables) in HOME.items():
        assert set(tables.COMPUTED[problem]) == set(cases.answer(problem).numbers), problem
        assert set(tables.LITERAL) == set(cases)


@pytest.mark.parametrize(("problem", "name"), NAMED)
def test_a_number_is_what_another_computation_gives(problem, name):
    cases, tables = HOME[problem]
    expected, text = tables.COMPUTED[problem][name], cases.answer(problem).numbers[name]
    if isinstance(expected, str):
        return
    if name in ("best", "layout") and text.startswith("dp"):
        assert placed(text) == expected, text
        return
    wanted = expected if isinstance(expected, tuple) else (expected,)
    said = numbers(text.replace("e+", "e").replace("ktokens", "kFLOP").replace("Mtokens", "MFLOP"))
    assert len(said) == len(wanted), text
    for number, value in zip(said, wanted, strict=True):
        assert near(in_gib(number, text), value), f"{text} should be {value:.6g}"


def near(said: Said, expected: float) -> bool:
    """Within the digits that are printed, and 0.4 %."""
    return abs(said.value - expected) <= 1.02 * said.step + 0.004 * abs(expected)


def in_gib(said: Said, text: str) -> Said:
    """Tables give GiB as they are."""
    return Said(said.text, said.value / 1e9, said.step / 1e9) if "GiB" in text else said


def placed(layout: str) -> tuple[int, int]:
    """(GPUs, sequences of a step) of a layout as it is printed."""
    sizes = {axis: int(size) for axis, size in re.findall(r"\b(dp|tp|cp|pp) (\d+)", layout)}
    microbatches, sequences = map(int, re.search(r"(\d+) x (\d+) sequences", layout).groups())
    return math.prod(sizes.values()), sizes["dp"] * microbatches * sequences


def literals(cases: Cases, problem: str) -> list[tuple[str, Said]]:
    """(text, number) of what texts hold without a computation behind it."""
    words, asked = cases._texts[problem], cases.decisions(problem).values()
    texts = [words[move] for move in MOVES] + [f"{question} {reply}" for question, reply in words["follow"]]
    texts += [bound for bounds in words["bounds"].values() for bound in bounds]
    texts += [text for decision in asked for text in (decision.because, *decision.slips.values())]
    plain = [TYPES.sub("∎", re.sub(r"\{\w+\}", "∎", LINK.sub(" ", text))) for text in texts]
    return [(text, said) for text in plain for said in numbers(without_names(text))]


@pytest.mark.parametrize("problem", HOME)
def test_numbers_in_words_are_given_or_checked(problem):
    cases, tables = HOME[problem]
    answer, decisions = cases.answer(problem), cases.decisions(problem).values()
    given = [answer.title, answer.clarify, *(decision.question for decision in decisions), *answer.numbers.values()]
    known = [number.value for text in given for number in numbers(without_names(text.replace("e+", "e")))]
    known += [decision.value for decision in decisions]
    lost = [
        f"{said.text} in {text!r}"
        for text, said in literals(cases, problem)
        if not any(equal(said, value) or equal(said, 100 * value) for value in known)
        and not any(near(said, value) for value in tables.LITERAL[problem])
    ]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("problem", HOME)
def test_a_literal_that_is_listed_is_said(problem):
    cases, tables = HOME[problem]
    said = [number for _, number in literals(cases, problem)]
    missing = [value for value in tables.LITERAL[problem] if not any(near(number, value) for number in said)]
    assert not missing


def value_of(problem: str, name: str) -> float:
    return numbers(HOME[problem][0].answer(problem).numbers[name].replace("ktok", "kFLOP").replace("Mtok", "MFLOP"))[
        0
    ].value


def test_the_planner_s_numbers_agree_with_each_other():
    def of(name):
        return value_of("seventy_on_64", name)

    assert of("tokens") == pytest.approx(512 * 8192 / of("seconds"), rel=2e-3)
    assert of("days") == pytest.approx(15e12 / of("tokens") / 86400, rel=2e-3)
    assert of("gpus") == pytest.approx(64 * of("days") / 90, rel=2e-3)
    flops = answer_tables_training.FLOPS70
    assert of("mfu") == pytest.approx(flops * of("tokens") / (64 * 989e12), abs=6e-3)
    assert of("flat_seconds") > of("quoted_seconds") > of("seconds") > 512 * 8192 * flops / (64 * 989e12 * 0.59)


def test_the_405b_s_numbers_agree_with_each_other():
    tokens, seconds = value_of("four_hundred_on_16k", "tokens"), value_of("four_hundred_on_16k", "seconds")
    assert tokens == pytest.approx(2048 * 8192 / seconds, rel=3e-3)
    share = answer_tables_training.FLOPS405 * tokens / (16384 * 989e12)
    assert value_of("four_hundred_on_16k", "mfu") == pytest.approx(share, abs=6e-3)


def test_the_numbers_of_gpt_3_agree_with_each_other():
    hfu, mfu, days = (value_of("gpt3_on_1024", name) for name in ("hfu", "mfu", "days"))
    assert mfu / hfu == pytest.approx(6 / 8, abs=0.02)
    speed = 300e9 / HOME["gpt3_on_1024"][0].decisions("gpt3_on_1024")["days"].value / 86400
    assert speed == pytest.approx(104_529, rel=1e-4), "the reason of the decision quotes it"
    assert days == pytest.approx(300e9 * 6 * 175e9 / (1024 * 312e12 * mfu) / 86400, rel=0.03)


def test_numbers_of_the_slower_step_and_of_scaling_agree_with_each_other():
    one, two, grew = (value_of("slower_on_two_nodes", name) for name in ("one", "two", "grew"))
    assert grew == pytest.approx(two / one - 1, abs=6e-3)
    assert two > value_of("slower_on_two_nodes", "tp") + (one - 0.73) / 2
    assert value_of("slower_on_two_nodes", "moved") == pytest.approx(one / 2 * 1.1, rel=0.15)
    strong, worth, idle = (value_of("scaling", name) for name in ("strong", "worth", "idle"))
    assert worth == pytest.approx(1024 * strong, abs=6) and worth + idle == pytest.approx(1024, abs=1)


def test_numbers_of_the_input_agree_with_each_other():
    speed, workers, text = (value_of("starving_input", name) for name in ("speed", "workers", "text"))
    flops = 6 * 7.5e9 + 3 * 32 * 4 * 4096 * 8193 / 2  # of a token of 8B
    assert 0.35 < speed * flops / (8 * 989e12) < 0.59
    assert workers == pytest.approx(speed / 1e6, abs=5e-3) and text == pytest.approx(4 * speed, rel=2e-3)
    assert value_of("starving_input", "stored") == text
