"""What an engine on one GPU of several has to get right, shown without a GPU: devices, threads, memory."""

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
from minillm.serve import LLM, AsyncLLM, SamplingParams, StepRecord
from minillm.serve.options import EngineOptions
from minillm.serve.run import memory, recorder

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
    llm.device = torch.device("cuda", 1)
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


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GB with 62 GB free, on which a pass takes 1 MB a token and 2 MB for a row of logits."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (62e9, 80e9))
    monkeypatch.setattr(
        memory, "_pass_bytes", lambda model, *, max_num_seqs, token_budget: 1e6 * token_budget + 2e6 * max_num_seqs
    )
    weight = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, dtype=torch.bfloat16)
    config = ModelConfig(128256, 4096, 14336, 32, 32, 8, max_seq_len=131072)
    return SimpleNamespace(config=config, embedding=SimpleNamespace(weight=weight), parameters=lambda: iter([weight]))


def test_a_gpu_s_engine_takes_256_sequences_and_8192_tokens(gpu, monkeypatch):
    assert memory.gpu_limits(gpu, {}) == {"max_num_seqs": 256, "token_budget": 8192}
    assert memory.gpu_limits(gpu, {"max_num_seqs": 1024, "policy": "latest"})["max_num_seqs"] == 1024
    assert memory.gpu_limits(gpu, {"token_budget": 64}) == {"max_num_seqs": 64, "token_budget": 64}
    assert memory.gpu_limits(Transformer(CONFIG, device="meta"), {}) == {}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11e9, 80e9))
    assert memory.gpu_limits(gpu, {}) == {"max_num_seqs": 256, "token_budget": 2048}, "a quarter of the free memory"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e9, 80e9))
    assert memory.gpu_limits(gpu, {}) == {"max_num_seqs": 256, "token_budget": 512}


def test_its_blocks_leave_room_for_a_pass_and_what_comes_later(gpu):
    size = memory.block_bytes(gpu.config, 16, torch.bfloat16)
    options = {"max_num_seqs": 256, "token_budget": 8192}
    assert memory.default_num_blocks(gpu, 16, **options) == int((0.9 * 80e9 - 18e9 - 8192e6 - 512e6) // size)
    more = {"rows_of_each": 5, "reserved_bytes": 3e9}
    assert memory.default_num_blocks(gpu, 16, **options, **more) == int((51e9 - 8192e6 - 2560e6) // size)


def test_it_pins_no_more_than_4_gib_of_the_host(gpu, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=2e12, total=2e12))
    _, blocks = memory.pool_sizes(gpu, EngineOptions(num_blocks=30_000), {"preemption": "swap"})
    assert blocks * memory.block_bytes(gpu.config, 16, torch.bfloat16) <= 4 << 30 and blocks == 2048


def test_the_largest_pass_has_logits_for_what_is_sampled_only():
    class Words(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() and result.shape[-1] == CONFIG.vocab_size:
                self.most = max(self.most, result.numel() // CONFIG.vocab_size)
            return result

    with Words() as words:
        memory.largest_pass(Transformer(CONFIG, seed=3), tokens=200, rows=8)
    assert words.most == 8


def test_records_are_bounded_whatever_a_step_s_size(monkeypatch):
    monkeypatch.setattr(recorder, "MOST_ENTRIES", 100)
    log, step = recorder.RecordLog(50), StepRecord(1, 0.0, 0.0, (("a/0", 0, 1),) * 30, *[()] * 3, *[0] * 6)
    for _ in range(10):
        log.append(step)
    assert len(log) == 3
    log.clear()
    for _ in range(60):
        log.append(StepRecord(1, 0.0, 0.0, (("a/0", 0, 1),), *[()] * 3, *[0] * 6))
    assert len(log) == 50
