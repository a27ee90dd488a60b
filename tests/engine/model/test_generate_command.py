"""`generate` on a checkpoint of another family: dtype, defaults of generation_config.json, end tokens, chats."""

import json
from dataclasses import replace

import pytest
import torch

from minillm.__main__ import run
from minillm.cli import generate as command
from minillm.data import Tokenizer
from minillm.model import ModelConfig, RopeScaling, Transformer, load_hf, save_hf
from minillm.model.generate import generate
from minillm.model.hf.generation_config import GenerationDefaults, read_generation_config
from minillm.serve import SamplingParams
from minillm.serve.speculate import NGram

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token + '\n' }}{% endfor %}bot:"


@pytest.fixture
def folder(tmp_path):
    """A small Gemma 2: windows, soft caps, and a longrope to choose a context for."""
    tokenizer = Tokenizer.load()
    scaling = RopeScaling("longrope", 2.0, original_max_seq_len=64, short_factors=(1,) * 4, long_factors=(1, 2, 3, 4))
    config = ModelConfig(tokenizer.vocab_size, 16, 24, 2, 2, head_dim=8, max_seq_len=64, rope_scaling=scaling)
    config = replace(config, norm_placement="both", norm_offset=1.0, embedding_scale=4.0, activation="gelu_tanh")
    config = replace(config, sliding_window=5, full_attention_layers=(1,), attention_soft_cap=2.0, logit_soft_cap=9.0)
    save_hf(Transformer(replace(config, tie_embeddings=True, init_std=0.3)).bfloat16(), tmp_path)
    tokenizer.save(tmp_path)
    return tmp_path


def configure(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_generation_config(folder):
    assert read_generation_config(folder) == GenerationDefaults((), {"temperature": 0.0})
    configure(
        folder, eos_token_id=[3, 5], do_sample=True, temperature=0.6, top_k=20, top_p=0.9, _from_model_config=True
    )
    found = read_generation_config(folder)
    assert found == GenerationDefaults((3, 5), {"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    ours = {"eos_token_id": 3, "temperature": 0.6, "repetition_penalty": 1.1, "top_k": 0}
    configure(folder, **ours, no_repeat_ngram_size=3, output_attentions=False)
    found = read_generation_config(folder)  # not sampled: what transformers ignores is ignored
    assert found == GenerationDefaults(
        (3,), {"temperature": 0.0, "repetition_penalty": 1.1}, unused=("no_repeat_ngram_size",)
    )
    configure(folder, eos_token_id="</s>")
    with pytest.raises(ValueError, match="must be a token id or a list"):
        read_generation_config(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        read_generation_config(folder)


def test_end_tokens_of_config_json(folder):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": [7, 8]}))
    assert read_generation_config(folder).eos_ids == (7, 8)


def test_each_of_several_end_tokens_ends_the_text(folder, capsys):
    tokenizer, model = Tokenizer.load(folder), load_hf(folder, dtype=torch.float32)
    ids = list(generate(model, tokenizer.encode("def f"), 12))
    end = next(place for place in range(2, 12) if ids[place] not in ids[:place])
    assert list(generate(model, tokenizer.encode("def f"), 12, stop=[4000, ids[end]])) == ids[:end]
    configure(folder, eos_token_id=[4000, ids[end]])
    expected = "def f" + tokenizer.decode(ids[:end]) + "\n"
    for options in ([], ["--speculate", "ngram"]):
        assert (
            run(["generate", "def f", "--max-new-tokens", "12", "--temperature", "0", "--model", str(folder), *options])
            == 0
        )
        assert capsys.readouterr().out == expected


def test_defaults_come_from_the_checkpoint_and_the_command_line_wins(folder, capsys):
    def text(*options):
        assert run(["generate", "def f", "--max-new-tokens", "8", "--model", str(folder), *options]) == 0
        return capsys.readouterr()

    greedy = text("--temperature", "0").out
    configure(folder, do_sample=True, temperature=5.0, top_k=50, typical_p=0.5)
    sampled = text("--seed", "1")
    assert sampled.out != greedy and sampled.err == "generation_config.json: typical_p not supported, left out\n"
    assert text("--temperature", "0").out == greedy
    configure(folder, do_sample=True, temperature=5.0, top_k=1)
    assert text("--seed", "1").out == greedy


def test_dtype_and_context(folder, monkeypatch, capsys):
    loaded = []
    monkeypatch.setattr(
        "minillm.serve.load.load_hf", lambda *args, **options: loaded.append(load_hf(*args, **options)) or loaded[-1]
    )
    for options in ([], ["--dtype", "auto"], ["--dtype", "float16"], ["--max-seq-len", "128"]):
        assert run(["generate", "def f", "--max-new-tokens", "2", "--model", str(folder), *options]) == 0
    dtypes = [model.embedding.weight.dtype for model in loaded]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    assert [model.config.max_seq_len for model in loaded] == [64, 64, 64, 128]
    assert not torch.equal(loaded[0].rope.frequencies, loaded[3].rope.frequencies)
    capsys.readouterr()
    for options, message in (
        (["--dtype", "int8"], "--dtype int8 is unknown: use one of float32, bfloat16, float16, auto"),
        (["--max-seq-len", "129"], "max_seq_len 129 is above max_position_embeddings 128"),
        (["--system", "x"], "--system is a message of a chat: add --chat"),
        (["--chat"], "this tokenizer has no chat template"),
    ):
        assert run(["generate", "def f", "--model", str(folder), *options]) == 2
        out, err = capsys.readouterr()
        assert message in err and err.count("\n") == 1 and not out


def test_chat(folder, tmp_path, capsys):
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, model = Tokenizer.load(folder), load_hf(folder, dtype=torch.float32)
    said = "hi <|endoftext|>"
    ids = [
        *tokenizer.encode("system: Be brief."),
        0,
        *tokenizer.encode(f"\nuser: {said}"),
        0,
        *tokenizer.encode("\nbot:"),
    ]
    assert tokenizer.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": said}]) == ids
    expected = tokenizer.decode(generate(model, ids, 5, stop=0), skip_special=True)
    options = ["--chat", "--system", "Be brief.", "--max-new-tokens", "5", "--temperature", "0", "--model", str(folder)]
    assert run(["generate", said, *options]) == 0
    assert capsys.readouterr().out == f"{said}\n{expected}\n"
    file = tmp_path / "prompts.txt"
    file.write_text(said)
    assert run(["generate", "--batch", str(file), *options]) == 0
    assert capsys.readouterr().out.endswith(f"bot:{expected}\n")


@pytest.mark.parametrize("options, rows", [({}, 1), ({"k": 3}, 4), ({"k": "adaptive"}, 9)])
def test_the_blocks_of_a_batch_leave_room_for_the_logits_of_drafts(folder, monkeypatch, options, rows):
    asked, model = [], load_hf(folder)

    def fits(*_, rows_of_each=1, **__):
        asked.append(rows_of_each)
        return 64

    monkeypatch.setattr(command, "default_num_blocks", fits)
    options |= {"proposer": NGram()} if options else {}
    llm = command.engine(model, Tokenizer.load(folder), [(3, SamplingParams())], **options)
    assert asked == [rows] and llm.pool.total == 3
