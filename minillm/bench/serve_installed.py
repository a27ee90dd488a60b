"""Engines that `bench serve` compares only where they are installed, and what it says where they are not."""

import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from minillm.bench.load import Arrival
from minillm.bench.serve_peers import Limits, Served
from minillm.model import Transformer, save_hf
from minillm.serve.requests.summary import spread


class VLLM:
    """vLLM offline, with the blocks, seats and budget of ours. Token times are those that it reports itself.

    folder: weights and config.json. limits: num_blocks None leaves their number to vLLM. options: of vLLM's own.
    """

    title, threads = "vLLM", 1

    def __init__(self, folder: str, limits: Limits, max_seq_len: int, **options: Any):
        from vllm import LLM

        self.engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=max_seq_len,
            block_size=limits.block_size,
            num_gpu_blocks_override=limits.num_blocks,
            max_num_batched_tokens=max(limits.token_budget, limits.max_num_seqs),
            max_num_seqs=limits.max_num_seqs,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            disable_log_stats=False,
            **options,
        )

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        from vllm import SamplingParams

        wanted = [
            SamplingParams(temperature=0, max_tokens=each.params.max_tokens, ignore_eos=True, detokenize=False)
            for each in arrivals
        ]
        self.engine.reset_prefix_cache()
        start = time.perf_counter()
        outputs = self.engine.generate([{"prompt_token_ids": each.prompt} for each in arrivals], wanted, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        times = [output.metrics for output in outputs]
        gaps = [
            (each.last_token_ts - each.first_token_ts) / (len(answer) - 1)
            for each, answer in zip(times, answers, strict=True)
            if len(answer) > 1
        ]
        return Served(answers, seconds, spread([each.first_token_latency for each in times]), spread(gaps))


class NanoVLLM:
    """nano-vllm (https://github.com/GeeeekExplorer/nano-vllm), which reads Qwen3 checkpoints.

    It refuses greedy sampling, so it draws at a temperature that leaves nothing to chance, and reports no times of
    single tokens: of its answers only the useful tokens per second are compared.
    """

    title, threads = "nano-vllm", 1
    temperature = 1e-4

    def __init__(self, folder: str, sequences: int, max_seq_len: int):
        from nanovllm import LLM

        self.engine = LLM(
            folder, enforce_eager=False, tensor_parallel_size=1, max_model_len=max_seq_len, max_num_seqs=sequences
        )

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        from nanovllm import SamplingParams

        wanted = [
            SamplingParams(temperature=self.temperature, max_tokens=each.params.max_tokens, ignore_eos=True)
            for each in arrivals
        ]
        start = time.perf_counter()
        outputs = self.engine.generate([list(each.prompt) for each in arrivals], wanted, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Served([list(output["token_ids"]) for output in outputs], seconds, spread([seconds]), spread([]))


def unavailable() -> dict[str, str]:
    """Why each engine cannot be compared here; "" if it can."""
    no_gpu = "" if torch.cuda.is_available() else "there is no CUDA GPU"
    modules = {"transformers": "transformers", "vLLM": "vllm", "nano-vllm": "nanovllm"}
    found = {}
    for name, module in modules.items():
        needs_gpu = "" if name == "transformers" else no_gpu
        found[name] = needs_gpu if find_spec(module) is not None else "it is not installed"
    return found


def installed(model: Transformer, limits: Limits) -> list[VLLM]:
    """The peers of `bench serve` that can run here."""
    if unavailable()["vLLM"]:
        return []
    with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
        save_hf(model, folder)
        return [VLLM(folder, limits, model.config.max_seq_len, dtype="float32")]


def missing() -> list[str]:
    """A sentence for each engine that was not compared, with what it would take."""
    said = []
    if find_spec("vllm") is None:
        said.append("vLLM is not installed (`pip install vllm`, on a machine with a CUDA GPU): not compared.")
    elif not torch.cuda.is_available():
        said.append("vLLM is installed, but there is no CUDA GPU: not compared.")
    if find_spec("llama_cpp") is None:
        said.append("llama-cpp-python is not installed: not compared.")
    else:
        said.append(
            "llama-cpp-python is installed, but the converter of Hugging Face folders to GGUF is a script of "
            "llama.cpp's repository that no package brings: not compared."
        )
    if find_spec("nanovllm") is None:
        said.append("nano-vllm is not installed: not compared.")
    else:
        said.append("nano-vllm reads Qwen3 checkpoints only: with another model it is not compared.")
    return said
