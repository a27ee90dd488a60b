"""Engines that `bench serve` compares only where they are installed, and what it says where they are not."""

import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from minillm.bench.load import Arrival
from minillm.bench.serve_peers import Limits, Served
from minillm.model import Transformer, save_hf
from minillm.serve.requests.summary import spread


class VLLM:
    """vLLM offline, with the blocks, seats and budget of ours. Token times are those that it reports itself."""

    title, threads = "vLLM", 1

    def __init__(self, model: Transformer, limits: Limits):
        from vllm import LLM

        with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
            save_hf(model, folder)
            self.engine = LLM(
                model=folder,
                skip_tokenizer_init=True,
                dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
                max_model_len=model.config.max_seq_len,
                block_size=limits.block_size,
                num_gpu_blocks_override=limits.num_blocks,
                max_num_batched_tokens=max(limits.token_budget, limits.max_num_seqs),
                max_num_seqs=limits.max_num_seqs,
                enable_prefix_caching=True,
                enable_chunked_prefill=True,
                disable_log_stats=False,
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


def installed(model: Transformer, limits: Limits) -> list[VLLM]:
    """The peers that can run here."""
    return [VLLM(model, limits)] if find_spec("vllm") is not None and torch.cuda.is_available() else []


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
    said.append(
        "nano-vllm reads Qwen3 checkpoints (`save_hf` writes one of a model with qk_norm), and the model here is a "
        "Llama: not compared."
    )
    return said
