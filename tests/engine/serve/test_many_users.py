"""Many users of one engine: threads, interleaved streams, names, seeds; nothing is lost, left behind or shared."""

import threading

import numpy as np
import pytest
import torch

from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.run.memory import block_bytes, default_num_blocks

CONFIG = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=48, init_std=0.2)
MODEL = Transformer(CONFIG, seed=3)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [11, 12, 13, 14]]


def naive(prompt, count):
    return list(generate(MODEL, prompt, count))


def test_generate_from_many_threads_loses_and_leaves_nothing():
    llm, wrong = LLM(MODEL, block_size=4, num_blocks=40, max_num_seqs=8), []
    kept = llm.add([9, 9], SamplingParams(max_tokens=4), request_id="left for step")

    def user(number):
        for round_ in range(5):
            prompts = [PROMPTS[(number + round_ + i) % 4] for i in range(2)]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=4 + number))
            wrong.extend(
                prompt
                for prompt, output in zip(prompts, outputs, strict=True)
                if output.prompt != prompt or output.answers[0].ids != naive(prompt, 4 + number)
            )

    threads = [threading.Thread(target=user, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and llm.unfinished == 0 and llm.pool.used == 0
    assert [output.request_id for output in llm.step()] == [kept] and llm.step() == []


def test_interleaved_streams_leave_nothing():
    llm = LLM(MODEL, block_size=4, num_blocks=40)
    streams = [llm.stream(prompt, SamplingParams(max_tokens=6)) for prompt in PROMPTS[:2]]
    found = [[], []]
    for _ in range(12):
        for mine, stream in zip(found, streams, strict=True):
            mine += [token.id for delta in [next(stream, None)] if delta for token in delta.tokens]
    assert found == [naive(prompt, 6) for prompt in PROMPTS[:2]]
    assert llm.step() == [] and llm.unfinished == 0


def test_automatic_names_never_collide():
    llm = LLM(MODEL)
    llm.add([1], request_id="request-1")
    names = [llm.add([2]) for _ in range(3)]
    assert len({"request-1", *names}) == 4
    outputs = []
    while llm.unfinished:
        outputs += llm.step()
    assert len({output.request_id for output in outputs}) == 4


def test_a_stream_is_checked_where_it_is_asked_for():
    llm = LLM(MODEL)
    with pytest.raises(ValueError, match="a prompt of 0 tokens does not fit"):
        llm.stream([])
    abandoned = llm.stream([1, 2])
    abandoned.close()
    assert llm.unfinished == 0 and llm.step() == []


def test_samples_draw_independently_of_other_seeds():
    llm = LLM(MODEL, num_blocks=200)
    params = [SamplingParams(max_tokens=12, temperature=1.5, n=4, seed=seed) for seed in range(4)]
    outputs = llm.generate([PROMPTS[0]] * 4, params)
    assert len({tuple(answer.ids) for output in outputs for answer in output.answers}) == 16
    [again] = llm.generate([PROMPTS[0]], params[2])
    assert [answer.ids for answer in again.answers] == [answer.ids for answer in outputs[2].answers]


def test_without_a_seed_answers_differ_and_the_seed_is_told():
    llm = LLM(MODEL, num_blocks=200)
    params = SamplingParams(max_tokens=12, temperature=1.5)
    first, second = llm.generate([PROMPTS[0]] * 2, params)
    assert first.answers[0].ids != second.answers[0].ids
    [again] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12, temperature=1.5, seed=first.seed))
    assert again.answers[0].ids == first.answers[0].ids


def test_numpy_numbers_are_numbers():
    params = SamplingParams(max_tokens=np.int64(3), top_p=np.float32(1.0), stop_tokens=np.array([49]), seed=np.int32(1))
    assert params == SamplingParams(max_tokens=3, stop_tokens=(49,), seed=1) and type(params.max_tokens) is int
    llm = LLM(MODEL)
    prompts = [list(np.array(PROMPTS[0])), np.array(PROMPTS[0]), torch.tensor(PROMPTS[0]), tuple(PROMPTS[0])]
    for output in llm.generate(prompts, params):
        assert output.prompt == PROMPTS[0] and all(type(token) is int for token in output.prompt)
    with pytest.raises(ValueError, match="must be a text or a list of token ids"):
        llm.add([1.5])


def test_streamed_text_is_the_answers_and_never_shows_a_stop():
    tokenizer = Tokenizer.load()
    config = ModelConfig(tokenizer.vocab_size, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
    llm = LLM(Transformer(config, seed=1), tokenizer=tokenizer)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    text = llm.generate(["def hello"], params)[0].answers[0].text
    for length in (1, 3, 8, 20):  # stops within a token and across several
        stop = text[30 : 30 + length]
        for stops in ([stop], [stop + "\x00", stop], [text[30:45] + "\x00"]):
            asked = SamplingParams(max_tokens=24, ignore_eos=True, stop=stops)
            [whole] = llm.generate(["def hello"], asked)
            shown = ""
            for delta in llm.stream("def hello", asked):
                shown += delta.text
                assert whole.answers[0].text.startswith(shown), "text beyond the stop was shown"
            assert shown == whole.answers[0].text


def test_half_a_character_is_never_shown():
    tokenizer = Tokenizer.load()
    config = ModelConfig(tokenizer.vocab_size, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
    model, text = Transformer(config, seed=1), "äöü€🙂"
    ids, right = tokenizer.encode(text), model.head_logits
    wanted = iter(ids)

    def head_logits(x, weight):
        logits = torch.zeros_like(right(x, weight))
        logits[..., next(wanted)] = 9.0
        return logits

    model.head_logits = head_logits
    deltas = list(
        LLM(model, tokenizer=tokenizer).stream([5], SamplingParams(max_tokens=len(tokenizer.encode("äöü€🙂"))))
    )
    assert "".join(delta.text for delta in deltas) == "äöü€🙂" and len(deltas) > 5
    assert all("\ufffd" not in delta.text for delta in deltas)


def test_the_pool_is_sized_by_memory_and_not_by_the_context(monkeypatch):
    """Llama-3.1-8B's 16 sequences of full length would be 275 GB."""
    config = ModelConfig(128256, 4096, 14336, 32, 32, 8, max_seq_len=131072)
    model = Transformer(config, device="meta", dtype=torch.bfloat16)
    model.embedding.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))  # on the CPU, of no size
    size = block_bytes(config, 16, torch.bfloat16)
    assert 16 * 131072 // 16 * size == 274_877_906_944
    memory = type("Memory", (), {"available": 64e9})
    monkeypatch.setattr("minillm.serve.run.memory.psutil.virtual_memory", lambda: memory)
    assert default_num_blocks(model, 16) == int(0.3 * 64e9 // size)
    assert default_num_blocks(model, 16, 0.5) == int(0.5 * 64e9 // size)
    assert default_num_blocks(MODEL, 16) == 64 * 3  # no more than max_num_seqs sequences can fill
    memory.available = 1e6
    with pytest.raises(ValueError, match="no memory is left for keys and values"):
        default_num_blocks(model, 16)
    with pytest.raises(ValueError, match="gpu_memory_utilization 1\\.5 must be above 0 and at most 1"):
        LLM(MODEL, gpu_memory_utilization=1.5)
