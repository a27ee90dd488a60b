"""`generate`: one prompt streams; a file of prompts runs through LLM; a bad line is named and nothing runs."""

import json
from dataclasses import replace

import pytest
import torch

from minillm.__main__ import run
from minillm.cli import generate as command_module
from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer, folder = Tokenizer.load(), tmp_path_factory.mktemp("model")
    model = Transformer(ModelConfig(tokenizer.vocab_size, 32, 64, 1, 2, max_seq_len=64, tie_embeddings=True))
    save_hf(model.bfloat16(), folder)
    tokenizer.save(folder)
    return folder


def test_command_streams(folder, capsys, monkeypatch):
    pieces = []
    echo = command_module.typer.echo
    monkeypatch.setattr(command_module.typer, "echo", lambda text, nl=True: (pieces.append(text), echo(text, nl=nl)))
    assert run(["generate", "def ", "--max-new-tokens", "20", "--model", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def ") and len(pieces) == 22  # the prompt, each token, the end
    assert run(["generate", "--max-new-tokens", "3", "--temperature", "1", "--model", str(folder)]) == 0


@pytest.mark.parametrize("prompt", ["def ", "class  ", "import os", ""])
@pytest.mark.parametrize("heat", ["0", "0.9"])
def test_the_text_is_the_same_with_and_without_speculation(folder, capsys, prompt, heat):
    """A prompt that ends in spaces is mended on both paths; n-grams change no draw."""
    options = [prompt, "--max-new-tokens", "20", "--model", str(folder), "--temperature", heat, "--seed", "3"]
    assert run(["generate", *options]) == 0
    plain = capsys.readouterr().out
    assert run(["generate", *options, "--speculate", "ngram"]) == 0
    assert capsys.readouterr().out == plain and plain.startswith(prompt.rstrip(" "))


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_keys_and_values_in_8_bits(folder, tmp_path, capsys, kv):
    """One prompt and a file of them go through an engine with such a cache."""
    llm = LLM(load_hf(folder, dtype=torch.float32), tokenizer=Tokenizer.load(folder), kv_dtype=kv)
    [output] = llm.generate(["class A"], SamplingParams(max_tokens=8))
    options = ["--max-new-tokens", "8", "--temperature", "0", "--kv", kv]
    assert run(["generate", "class A", *options, "--model", str(folder)]) == 0
    assert capsys.readouterr().out == f"class A{output.answers[0].text}\n"
    assert batch(folder, tmp_path, "class A\n", *options) == 0
    assert f"class A{output.answers[0].text}" in capsys.readouterr().out


def test_a_first_sample_is_drawn_from_a_fixed_seed(folder, capsys):
    """Greedy text of a small model repeats itself; what is drawn by default is the same each time."""
    texts = []
    for options in ([], [], ["--temperature", "0.8", "--seed", "0"], ["--seed", "1"], ["--temperature", "0"]):
        assert run(["generate", "def ", "--max-new-tokens", "20", "--model", str(folder), *options]) == 0
        texts.append(capsys.readouterr().out)
    first, again, said, other, greedy = texts
    assert first == again == said and len({first, other, greedy}) == 3


def batch(folder, tmp_path, text, *options, name="prompts.txt"):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return run(["generate", "--batch", str(file), "--model", str(folder), "--temperature", "0", *options])


def naive(folder, prompt, count):
    model, tokenizer = load_hf(folder, dtype=torch.float32), Tokenizer.load(folder)
    return list(generate(model, tokenizer.encode(prompt), count, stop=tokenizer.eos_id))


def test_a_file_of_prompts_gives_the_answers_in_its_order(folder, tmp_path, capsys):
    prompts = ["def hello(name):", "class A:", "import os, sys", "    indented\u2028line "]
    out_file = tmp_path / "out.json"
    options = ["--max-new-tokens", "7", "--json", str(out_file)]
    assert batch(folder, tmp_path, "\r\n".join(prompts) + "\r\n", *options) == 0
    out, err = capsys.readouterr()
    places = [out.index(f"--- line {number} (7 tokens, length)\n{prompt}") for number, prompt in enumerate(prompts, 1)]
    assert places == sorted(places) and out.count("---") >= 4
    assert err.startswith("4 prompts, 28 tokens in ") and err.count("\n") == 1
    found = json.loads(out_file.read_text())
    assert found["provenance"]["versions"]["torch"] and found["summary"]["tokens"] == 28
    for number, (prompt, row) in enumerate(zip(prompts, found["rows"], strict=True), 1):
        assert row["line"] == number and [a["ids"] for a in row["answers"]] == [naive(folder, prompt, 7)]
        assert 0 <= row["queue_s"] < row["ttft_s"] < row["end_to_end_s"] and row["tpot_s"] > 0
        assert row["error"] is None and row["computed"] == len(row["prompt"]) + 6


def test_json_lines_say_what_each_wants(folder, tmp_path, capsys):
    lines = [
        {"prompt": "def a", "max_tokens": 3, "logprobs": 1},
        {"prompt": [5, 6, 7], "temperature": 0.9, "top_p": 0.8, "n": 2, "seed": 4},
        {"prompt": "def a"},
    ]
    out_file = tmp_path / "out.json"
    text = "\n".join(map(json.dumps, lines))
    assert batch(folder, tmp_path, text, "--max-new-tokens", "5", "--seed", "9", "--json", str(out_file)) == 0
    out = capsys.readouterr().out
    assert "--- line 2, answer 2 (5 tokens, length)" in out and "--- line 1 (3 tokens, length)" in out
    rows = json.loads(out_file.read_text())["rows"]
    llm = LLM(load_hf(folder, dtype=torch.float32), tokenizer=Tokenizer.load(folder))
    wanted = SamplingParams(max_tokens=5, seed=9)
    each = [replace(wanted, **{k: v for k, v in line.items() if k != "prompt"}) for line in lines]
    for row, output in zip(rows, llm.generate([line["prompt"] for line in lines], each), strict=True):
        assert [(a["ids"], a["text"]) for a in row["answers"]] == [(a.ids, a.text) for a in output.answers]
    assert len(rows[0]["answers"][0]["logprobs"]) == 3 and "logprobs" not in rows[2]["answers"][0]


def test_one_token_has_no_time_per_token(folder, tmp_path):
    assert batch(folder, tmp_path, "def a", "--max-new-tokens", "1", "--json", str(tmp_path / "out.json")) == 0
    found = json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found["rows"][0]["tpot_s"] is None and found["summary"]["tpot"]["p50"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "prompts.jsonl is empty: write one prompt per line"),
        ('{"prompt": "a"}\n\n{"prompt": "b"}', "line 2: it is empty: write a prompt or delete the line"),
        ('{"prompt": "a"}\n{"prompt": }', "line 2: it is not a JSON object"),
        ('{"prompt": "a"}\n[1, 2]', "line 2: it is not a JSON object"),
        ('{"text": "a"}', "line 1: unknown field 'text'"),
        ('{"prompt": "a", "max_token": 3}', "line 1: unknown field 'max_token'; did you mean 'max_tokens'?"),
        ('{"max_tokens": 3}', 'line 1: it has no "prompt"'),
        ('{"prompt": 7}', 'line 1: it has no "prompt"'),
        ('{"prompt": ""}', "line 1: a prompt of 0 tokens does not fit: use 1 to 63"),
        ('{"prompt": [1, "x"]}', "line 1: the prompt [1, 'x'] must be a text or a list of token ids"),
        ('{"prompt": [1, 99999]}', "line 1: token id 99999 is outside 0 .. 4095"),
        ('{"prompt": "a"}\n{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens 0 must be a whole number"),
        ('{"prompt": "a", "temperature": -1}', "line 1: temperature -1 must be at least 0"),
        ('{"prompt": "a", "temperature": NaN}', "line 1: temperature nan must be at least 0"),
        ('{"prompt": "a", "top_p": 1.5}', "line 1: top_p 1.5 must be above 0 and at most 1"),
        ('{"prompt": "a", "stop": 5}', "line 1: stop 5 must be a text or a list of texts"),
        ('{"prompt": "a", "n": 65}', "line 1: n 65 is more than max_num_seqs 64"),
        ('{"prompt": "' + "word " * 99 + '"}', "line 1: a prompt of "),
        (b'{"prompt": "\xff"}', "is not UTF-8 text (byte 12): save it as UTF-8"),
        ("{" * 100_000, "line 1: it is not a JSON object"),
    ],
)
def test_a_bad_line_is_named_and_nothing_runs(folder, tmp_path, capsys, text, message):
    assert batch(folder, tmp_path, text, name="prompts.jsonl") == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and err.startswith("minillm: ") and not out


def test_options_that_do_not_go_together(folder, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    for options, message in (
        (["x", "--json", str(file)], "--json writes the answers and times of a file of prompts: give one with --batch"),
        (["x", "--batch", str(file)], "there is a prompt and --batch"),
        (["--batch", str(file)], "prompts.txt cannot be read (No such file or directory)"),
        (["--seed", "-1", "--batch", __file__], "line 1: seed -1 must be a whole number of at least 0"),
    ):
        assert run(["generate", *options, "--model", str(folder)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device tpu cannot be used ("),
        (["--device", "meta"], "--device meta cannot be used ("),
        (["--temperature", "inf"], "--temperature inf is not a finite number"),
        (["--seed", "-1"], "seed -1 must be a whole number of at least 0"),
        (["--seed", str(2**63)], "seed 9223372036854775808 must be below 2**63"),
        (["--speculate", "ngram", "--seed", str(2**63)], "must be below 2**63"),
        (["--k", "3"], "--k 3 is a number of draft tokens: add --speculate NAME, which proposes them"),
        (["--kv", "int4"], "--kv int4 is unknown: use one of int8, fp8"),
        (["--max-num-seqs", "4"], "--max-num-seqs 4 is of a file of prompts: give one with --batch FILE"),
    ],
)
def test_what_one_prompt_cannot_have(folder, capsys, options, message):
    assert run(["generate", "def ", *options, "--model", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("temperature", ["1e-320", "1e-7", "1e35", "1e300"])
def test_the_coldest_and_the_hottest_temperature(folder, capsys, temperature):
    assert run(["generate", "def ", "--max-new-tokens", "3", "--temperature", temperature, "--model", str(folder)]) == 0
    drawn = capsys.readouterr().out
    assert run(["generate", "def ", "--max-new-tokens", "3", "--temperature", "0", "--model", str(folder)]) == 0
    assert (drawn == capsys.readouterr().out) == (float(temperature) < 1)


def test_a_json_file_that_cannot_be_written_is_refused_before_the_work(folder, tmp_path, capsys):
    for target in (tmp_path / "none" / "out.json", tmp_path):
        assert batch(folder, tmp_path, "def a", "--json", str(target)) == 2
        out, err = capsys.readouterr()
        assert f"--json {target} cannot be written (" in err and err.count("\n") == 1 and not out
    kept = tmp_path / "kept.json"
    kept.write_text("mine")
    for target in (kept, tmp_path / "new.json"):
        assert batch(folder, tmp_path, "", "--json", str(target)) == 2
    assert kept.read_text() == "mine" and not (tmp_path / "new.json").exists()


def test_a_file_of_prompts_takes_no_more_blocks_than_the_memory_holds(folder, tmp_path, capsys, monkeypatch):
    """40 prompts want 160 blocks; the memory holds 9 of them, so most prompts wait."""
    engines, make = [], command_module.LLM
    monkeypatch.setattr(command_module, "LLM", lambda *args, **how: engines.append(make(*args, **how)) or engines[-1])
    ram = type("Memory", (), {"available": 9.5 / 0.3 * 16 * 2 * 32 * 4, "total": 64e9})
    monkeypatch.setattr("minillm.serve.run.memory.psutil.virtual_memory", lambda: ram)
    options = ["--max-new-tokens", "40", "--max-num-seqs", "8", "--token-budget", "100"]
    assert batch(folder, tmp_path, "class A\n" * 40, *options) == 0
    assert capsys.readouterr().out.count("--- line") == 40
    assert engines[0].pool.total == 9
    assert (engines[0].scheduler.max_num_seqs, engines[0].scheduler.token_budget) == (8, 100)


def test_a_failed_request_is_shown_and_the_exit_status_says_so(folder, tmp_path, capsys, monkeypatch):
    def broken(*args, **options):
        model = load_hf(*args, **options)
        with torch.no_grad():
            model.embedding.weight[5] = float("nan")
        return model

    monkeypatch.setattr("minillm.serve.load.load_hf", broken)
    lines = '{"prompt": [5], "max_tokens": 3}'
    assert batch(folder, tmp_path, lines, "--json", str(tmp_path / "out.json")) == 1
    assert "--- line 1 (failed: its logits are not finite" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert "summary" not in found and "not finite" in found["rows"][0]["error"]
