"""`python -m minillm quantize`, and the table of `--report` against sums written out here."""

import json
import math
import os

import pytest
import torch

from minillm.__main__ import run
from minillm.data import Tokenizer, corpus, tokenize
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from minillm.quantize import Int, Settings, nbytes, quantize, quantized_layers
from minillm.quantize.quality import compare, table

SMALL = ["--windows", "2", "--seq-len", "16"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small model and a text."""
    place = tmp_path_factory.mktemp("place")
    tokenizer = Tokenizer.load()
    config = ModelConfig(tokenizer.vocab_size, 64, 128, 2, 4, num_kv_heads=2, max_seq_len=64, init_std=0.1)
    save_hf(Transformer(config, seed=0), place / "model")
    tokenizer.save(place / "model")
    (place / "text.txt").write_text("".join(f"line {i}: def f(x): return x + {i}\n" for i in range(400)))
    return place


@pytest.fixture
def quantized_by(place, capsys, monkeypatch):
    monkeypatch.chdir(place)

    def call(*arguments):
        status = run(["quantize", "--model", "model", "--data", "text.txt", *SMALL, *arguments])
        return status, capsys.readouterr()

    return call


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_a_folder_is_written_that_generate_takes(method, quantized_by, place, capsys):
    more = ["--report"] if method == "rtn" else []
    status, said = quantized_by("--method", method, "--group", "32", "--out", f"out-{method}", *more)
    assert status == 0 and "bits a quantized weight" in said.out
    found = load_hf(place / f"out-{method}")
    assert {layer.format for layer in quantized_layers(found).values()} == {Int(bits=4, group=32)}
    assert run(["generate", "def", "--model", f"out-{method}", "--max-new-tokens", "3", "--temperature", "0"]) == 0
    assert not [name for name in os.listdir(place) if name.startswith(".")]


def test_the_report_has_a_row_for_both(quantized_by, place):
    status, said = quantized_by("--bits", "8", "--report", "--json", "rows.json")
    lines = said.out.splitlines()
    assert status == 0 and "bits/byte" in lines[-3] and lines[-2].startswith("original") and "rtn int8" in lines[-1]
    original, quantized = json.loads((place / "rows.json").read_text())["rows"]
    assert original["bytes"] > quantized["bytes"] and quantized["agreement"] > 0.9 and 0 <= quantized["kl"] < 1e-2


def test_the_rows_are_the_sums_they_say(place):
    original, quantized = load_hf(place / "model"), load_hf(place / "model")
    quantize(quantized, Settings(Int(bits=4)))
    tokens = tokenize(corpus(place / "text.txt"), Tokenizer.load(), "validation")
    rows = compare(original, quantized, tokens, "int4", windows=10**6, seq_len=32)
    nats, kl, same, count = [0.0, 0.0], 0.0, 0, 0
    ids = torch.tensor(tokens.array.astype("int64"))
    for start in range(0, len(ids) - 32, 32):
        window, targets = ids[start : start + 32], ids[start + 1 : start + 33]
        with torch.no_grad():
            p, q = (model(window[None])[0].double().softmax(-1) for model in (original, quantized))
        for place_, target in enumerate(targets):
            nats[0] -= math.log(p[place_, target])
            nats[1] -= math.log(q[place_, target])
        kl += float((p * (p / q).log()).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(targets)
    per_byte = len(tokens) / tokens.text_bytes
    for row, total in zip(rows, nats, strict=True):
        assert row.bits_per_byte == pytest.approx(total / count / math.log(2) * per_byte, rel=1e-4)
    assert rows[1].kl == pytest.approx(kl / count, rel=1e-3) and rows[1].agreement == same / count
    assert [row.bytes for row in rows] == [nbytes(original), nbytes(quantized)] and rows[0].kl is None
    assert len(table(list(rows)).splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "--bits", "3"], "bits 3 is not supported: integers have 4 or 8"),
        (["--report", "--group", "48"], "group 48 does not divide the 64 inputs of blocks.0.attention.q_proj: use 64"),
        (["--report", "--method", "hqq"], "method 'hqq' is unknown: use one of rtn"),
        (["--report", "--format", "int2"], "--format int2 is unknown: use one of int, float8, nf4"),
        (["--report", "--format", "nf4", "--asymmetric"], "--asymmetric is for integers"),
        (["--format", "nf4", "--out", "new", "--report"], "compressed-tensors has no layout for NF4"),
        (["--out", "new"], "--data text.txt is not read by --method rtn: calibrate with another, or add --report"),
        ([], "there is nothing to make: say --out FOLDER, --report or both"),
        (["--out", "model", "--method", "awq"], "model holds something already: name a new folder"),
        (["--out", "text.txt/below", "--method", "awq"], "text.txt is a file, name another folder"),
        (["--report", "--method", "awq", "--data", "empty.txt"], "tokens are too few for seq_len 16: give more text"),
        (["--report", "--skip", "blocks"], "skip blocks leaves no layer to quantize"),
        (["--out", "new", "--json", "rows.json"], "--json writes the rows of --report"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(arguments, message, quantized_by, place):
    (place / "empty.txt").write_text("\n")
    before = sorted(path.name for path in place.rglob("*"))
    status, said = quantized_by(*arguments)
    assert status == 2 and message in said.err and said.err.count("\n") == 1
    assert sorted(path.name for path in place.rglob("*")) == before


def test_what_belongs_to_the_original_alone_is_not_copied(quantized_by, place):
    (place / "model" / "training.json").write_text('{"bits_per_byte": 1.0}')
    assert quantized_by("--group", "32", "--out", "out-copied", "--report")[0] == 0
    names = set(os.listdir(place / "out-copied"))
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names and "training.json" not in names


@pytest.mark.parametrize("context", [2, 3, 9, 10])
def test_models_of_a_short_context_are_compared(context, place):
    config = ModelConfig(Tokenizer.load().vocab_size, 32, 64, 1, 2, max_seq_len=context)
    first, second = Transformer(config, seed=0), Transformer(config, seed=0)
    tokens = tokenize(corpus(str(place / "text.txt")), Tokenizer.load(), "validation")
    rows = compare(first, second, tokens, "the same", windows=2, seq_len=context)
    assert rows[1].kl == pytest.approx(0, abs=1e-6) and all(row.tokens_per_s > 0 for row in rows)
