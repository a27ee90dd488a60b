"""The committed pair: greedy text is the target's own, drawn text is distributed as the target's.

50 prompts instead of 8, and six times the draws, with MINILLM_PROOF=all.
"""

import os
from collections import Counter

import pytest
import torch

from minillm.__main__ import run
from minillm.bench.speculate import prompts
from minillm.data import Tokenizer
from minillm.model import load_hf
from minillm.model.generate import folder_of, generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.speculate import DraftModel, NGram, on_device
from minillm.serve.speculate.verify import distribution

COUNT = 50 if os.environ.get("MINILLM_PROOF") == "all" else 8
TOP = 4


@pytest.fixture(scope="module")
def pair():
    return [load_hf(folder_of(name), dtype=torch.float32) for name in ("target", "draft")]


@pytest.fixture(scope="module")
def texts():
    tokenizer = Tokenizer.load(folder_of("target"))
    prose = prompts("prose", tokenizer, count=4)
    code = prompts("code", tokenizer, count=COUNT - len(prose))
    return [ids[:48] for ids in (*code, *prose)]


def test_greedy_text_is_the_targets_own(pair, texts):
    target, draft = pair
    expected = [list(generate(target, text, 24)) for text in texts]
    for proposer, k in ((DraftModel(draft), 3), (NGram(), 6)):
        llm = LLM(target, proposer=proposer, k=k)
        outputs = llm.generate(texts, SamplingParams(max_tokens=24))
        assert [output.answers[0].ids for output in outputs] == expected
        assert sum(output.accepted for output in outputs) > 0.1 * sum(output.drafted for output in outputs) > 0


def drawn(target, proposer, text, params, samples):
    """Counter of the first three tokens of so many samples; the second and third are guessed and checked."""
    llm, found = LLM(target, proposer=proposer, k=1, num_blocks=200), Counter()
    for start in range(0, samples, 64):
        wanted = SamplingParams(**params, n=64, seed=start, max_tokens=3)
        found += Counter(tuple(answer.ids) for answer in llm.generate([text], wanted)[0].answers)
    return found


@torch.no_grad()
def exact(target, text, params):
    """{three tokens: probability}."""
    params, shares = SamplingParams(**params), {(): 1.0}
    for _ in range(3):
        beginnings = list(shares)
        logits = target(torch.tensor([[*text, *tokens] for tokens in beginnings]))[:, -1].float()
        rows = [distribution(row, params, text) for row in logits]
        shares = {
            (*tokens, int(token)): shares[tokens] * float(row[token])
            for tokens, row in zip(beginnings, rows, strict=True)
            for token in row.nonzero().flatten()
        }
    return shares


def distance(found, shares, samples):
    every = found.keys() | shares.keys()
    return sum(abs(found[tokens] / samples - shares.get(tokens, 0.0)) for tokens in every) / 2


def noise(shares, samples, generator):
    """(mean, standard deviation) of the distance of as many draws from the distribution itself."""
    cells, found = torch.tensor(list(shares.values())), []
    for _ in range(30):
        draws = torch.multinomial(cells, samples, replacement=True, generator=generator)
        counts = torch.bincount(draws, minlength=len(cells)) / samples
        found.append(float((counts - cells / cells.sum()).abs().sum() / 2))
    found = torch.tensor(found)
    return float(found.mean()), float(found.std())


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drawn_text_is_distributed_as_the_targets(pair, texts, temperature):
    target, draft = pair
    samples, params = 32 * COUNT, {"temperature": temperature, "top_k": TOP}
    for text, proposer in zip(texts, (DraftModel(draft), NGram(shortest=1)), strict=False):
        shares = exact(target, text, params)
        mean, deviation = noise(shares, samples, torch.Generator().manual_seed(0))
        tokens = drawn(target, proposer, text, params, samples)
        found = distance(tokens, shares, samples)
        assert tokens.keys() <= shares.keys() and found < mean + 4 * deviation, (found, mean, deviation)


@pytest.mark.full
def test_the_measure_sees_guesses_that_are_not_checked(pair, texts, monkeypatch):
    target, draft = pair
    samples, params = 256, {"temperature": 1.0, "top_k": TOP}
    judge = on_device.verdicts

    def blind(*given):
        return [verdict._replace(accepted=True) for verdict in judge(*given)]

    monkeypatch.setattr("minillm.serve.speculate.speculation.verdicts", blind)
    shares = exact(target, texts[1], params)
    mean, deviation = noise(shares, samples, torch.Generator().manual_seed(0))
    found = distance(drawn(target, DraftModel(draft), texts[1], params, samples), shares, samples)
    assert found > mean + 5 * deviation, (found, mean, deviation)


def test_generate_speculate_writes_the_same_text(capsys):
    greedy = ["generate", "def main(", "--max-new-tokens", "12", "--temperature", "0"]
    assert run(greedy) == 0
    plain = capsys.readouterr().out
    for name in ("ngram", "draft"):
        assert run([*greedy, "--speculate", name]) == 0
        out, err = capsys.readouterr()
        assert out == plain and "12 tokens in" in err
    assert run([*greedy, "--speculate", "ngram", "--k", "0"]) == 0
    assert capsys.readouterr().out == plain
    for options, message in (
        (["--speculate", "oracle"], "no proposer 'oracle': use one of draft, ngram"),
        (["--speculate", "ngram", "--k", "some"], "--k some must be a whole number or 'adaptive'"),
        (["--speculate", "ngram", "--k", "511"], "k 511 guesses do not fit: use 1 to 510"),
    ):
        assert run(["generate", "x", *options]) == 2
        assert message in capsys.readouterr().err
