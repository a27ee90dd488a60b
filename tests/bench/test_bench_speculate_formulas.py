"""The formulas' rows on a clock that only the models move: what a pass costs is exact, so the formulas must hold."""

from types import SimpleNamespace

import pytest
import torch

from minillm.bench import speculate
from minillm.bench.harness import Comparison
from minillm.bench.speculate_formulas import (
    Engines,
    acceptance,
    all_going,
    formula_rows,
    prompt_seconds,
    split,
    whole_answers,
    window,
)
from minillm.data import Tokenizer
from minillm.model import load_hf
from minillm.model.generate import folder_of
from minillm.predict.serving import speculation as predict
from minillm.serve import SamplingParams
from minillm.serve.speculate.registry import proposer_named

K, NEW, BATCH = 3, 32, 4
TARGET, DRAFT = (10.0, 0.25), (1.5, 0.05)  # seconds of a pass, and more for each of its tokens


@pytest.fixture(scope="module")
def world():
    target, tokenizer = load_hf(folder_of("target"), dtype=torch.float32), Tokenizer.load(folder_of("target"))
    proposer, now = proposer_named("draft", target), [0.0]

    def costs(fixed, each):
        def moves(model, inputs):
            now[0] += fixed + each * inputs[0].numel()

        return moves

    hooks = [model.register_forward_pre_hook(costs(*c)) for model, c in ((target, TARGET), (proposer.model, DRAFT))]
    engines = Engines.of(target, proposer, K, lambda: now[0])
    yield SimpleNamespace(engines=engines, texts=speculate.prompts("prose", tokenizer, BATCH), now=now)
    for hook in hooks:
        hook.remove()


def test_steps_are_timed_with_all_texts_and_all_guesses_in_them(world):
    step = world.engines.step_seconds(world.texts)
    assert step.plain == pytest.approx(TARGET[0] + TARGET[1] * BATCH)
    assert step.draft == pytest.approx(DRAFT[0] + DRAFT[1] * BATCH)
    assert step.check == pytest.approx(TARGET[0] + TARGET[1] * BATCH * (K + 1))
    one = world.engines.step_seconds(world.texts[:1])
    assert split(one.plain, step.plain, BATCH) == pytest.approx(TARGET)
    assert split(5.0, 5.0, 1) == (5.0, 0.0)
    prompt = sum(map(len, world.texts))
    assert prompt_seconds(world.engines.plain, world.texts) == pytest.approx(TARGET[0] + TARGET[1] * prompt)


def test_in_the_window_all_are_going_and_no_prompt_is_read(world):
    for llm, tokens in ((world.engines.plain, 1), (world.engines.guessing, K + 1)):
        records = window(llm, world.texts, 9)
        assert len(records) == 9 and llm.unfinished == 0 and llm.pool.used == 0
        for record in records:
            assert [entry[2] for entry in record.batch] == [tokens] * BATCH and not record.ended
            assert record.sampled >= BATCH
    longest = K * (DRAFT[0] + 2 * DRAFT[1] * BATCH) + TARGET[0] + TARGET[1] * BATCH * (K + 1)
    assert all(record.seconds <= longest + 1e-9 for record in window(world.engines.guessing, world.texts, 9))


@pytest.mark.full
def test_the_formulas_hold_while_all_go_and_to_the_end(world):
    engines, texts = world.engines, world.texts
    alphas = [acceptance(engines.guessing, text, NEW) for text in texts]
    assert all(0 < alpha < 1 for alpha in alphas) and len(set(alphas)) > 1
    step = engines.step_seconds(texts)
    c, verify = step.draft / step.plain, step.check / step.plain
    speedups = [predict.speedup(alpha, c, K, verify=verify) for alpha in alphas]
    _, speed = all_going(engines, [texts], 12)
    assert speed == pytest.approx(sum(speedups) / BATCH, rel=0.15)

    seconds = {}
    for name, llm in (("with", engines.guessing), ("without", engines.plain)):
        before = world.now[0]
        llm.generate(texts, SamplingParams(max_tokens=NEW, ignore_eos=True))
        seconds[name] = world.now[0] - before
    rates = (1 / seconds["with"], 1 / seconds["without"])
    [(measured, expected)] = whole_answers(engines, [texts], NEW, [alphas], Comparison(True, (rates,)))
    assert measured == pytest.approx(seconds["without"] / seconds["with"])
    assert measured == pytest.approx(expected, rel=0.1) and measured < 0.95 * speed  # the end costs


def test_a_wrong_result_is_said_and_nothing_is_measured(world):
    wrong = formula_rows(world.engines.plain.model, None, K, [], NEW, "x", Comparison(False, ()))
    assert [row.correct for row in wrong] == [False]
