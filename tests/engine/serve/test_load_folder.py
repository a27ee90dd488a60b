"""`LLM.load(folder)`: the folder's end tokens and sampling count, as its authors mean them."""

import json

import pytest
import torch

from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer, folder = Tokenizer.load(), tmp_path_factory.mktemp("model")
    config = ModelConfig(tokenizer.vocab_size, 32, 64, 1, 2, max_seq_len=64, init_std=0.2, tie_embeddings=True)
    save_hf(Transformer(config, seed=3).bfloat16(), folder)
    tokenizer.save(folder)
    return folder


def says(folder, **generation):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return LLM.load(folder, device="cpu")


def test_every_end_token_of_the_folder_ends_an_answer(folder):
    tokens = list(generate(load_hf(folder, dtype=torch.float32), [1, 2, 3], 12))
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    llm = says(folder, eos_token_id=[int(end), 7])
    [answer] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12))[0].answers
    assert answer.ids == tokens[: tokens.index(end)] and answer.reason == "stop"
    [answer] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True))[0].answers
    assert answer.ids == tokens


def test_a_request_without_params_is_sampled_as_the_folder_says(folder):
    llm = says(folder, do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.05)
    request = llm.requests.request([1, 2, 3], None)
    assert request.params == SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.05)
    assert llm.requests.request([1, 2, 3], SamplingParams(max_tokens=3)).params == SamplingParams(max_tokens=3)
    assert llm.model.embedding.weight.dtype is torch.float32 and llm.generate(["def "])[0].answers[0].text


def test_options_go_to_the_model_and_to_the_engine(folder):
    llm = LLM.load(folder, device="cpu", dtype=torch.bfloat16, max_seq_len=32, block_size=4, max_num_seqs=3)
    assert llm.model.embedding.weight.dtype is torch.bfloat16 and llm.model.config.max_seq_len == 32
    assert llm.pool.block_size == 4 and llm.scheduler.max_num_seqs == 3
    with pytest.raises(ValueError, match="folder nowhere is not a model folder"):
        LLM.load("nowhere")
