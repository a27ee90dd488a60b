"""What an engine on one GPU of several has to get right, shown without a GPU."""

import asyncio
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.serve import LLM, AsyncLLM, SamplingParams

CONFIG = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=48, init_std=0.2)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_part_of_a_model_is_refused(rank):
    group = SimpleNamespace(rank=rank, world_size=2, device=torch.device("cpu"))
    part = tensor_parallel(Transformer(CONFIG, seed=3), CONFIG, group)
    with pytest.raises(ValueError, match="1 of 2 key and value heads, 25 of 50 embedding rows"):
        LLM(part)


def test_a_context_parallel_model_is_refused():
    model = Transformer(CONFIG, seed=3)
    model.positions_of = lambda seq: torch.arange(seq)
    with pytest.raises(ValueError, match="one rank's part of a split"):
        LLM(model)


@pytest.fixture
def current_gpu(monkeypatch):
    """The GPU that is current in each thread, 0 in a new one."""
    gpus = threading.local()

    @contextmanager
    def device(wanted):
        before, gpus.index = getattr(gpus, "index", 0), wanted.index
        yield
        gpus.index = before

    monkeypatch.setattr(torch.cuda, "device", device)
    return lambda: getattr(gpus, "index", 0)


def on_second_gpu(llm, current_gpu):
    """An engine that says its model is on cuda:1; returns where its passes are launched."""
    weight = SimpleNamespace(device=torch.device("cuda", 1))
    llm.model = SimpleNamespace(embedding=SimpleNamespace(weight=weight))
    launched, forward = [], llm.runner._forward

    def noting(*given):
        launched.append((threading.current_thread().name, current_gpu()))
        return forward(*given)

    llm.runner._forward = noting
    return launched


def test_steps_run_on_the_model_s_gpu(current_gpu):
    llm = LLM(Transformer(CONFIG, seed=3))
    launched = on_second_gpu(llm, current_gpu)
    llm.generate(PROMPTS, SamplingParams(max_tokens=3))
    assert {gpu for _, gpu in launched} == {1} and current_gpu() == 0


def test_so_do_those_of_another_thread(current_gpu):
    llm = LLM(Transformer(CONFIG, seed=3))
    launched = on_second_gpu(llm, current_gpu)

    async def serve():
        async with AsyncLLM(llm) as server:
            await server.generate(PROMPTS[0], SamplingParams(max_tokens=3))

    asyncio.run(serve())
    assert set(launched) == {("minillm engine", 1)}


class Reads(TorchDispatchMode):
    """Counts what the host reads of a tensor: on a GPU each is a wait."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [1, 6])
def test_the_plain_decoder_waits_once_a_token(layers, monkeypatch):
    monkeypatch.setattr("minillm.model.transformer.check_tokens", lambda *_: None)  # on a GPU it reads no values
    model = Transformer(ModelConfig(50, 32, 64, layers, 4, 2, max_seq_len=48, init_std=0.2), seed=3)
    with Reads() as reads:
        tokens = list(generate(model, PROMPTS[0], 10))
    assert len(tokens) == 10 and reads.count == 10
