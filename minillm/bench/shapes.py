"""Shapes of published models with random weights, for benchmarks of speed: what is computed does not matter for it.

Sizes are those of the models' config.json: https://huggingface.co/meta-llama/Llama-3.1-8B,
https://huggingface.co/Qwen/Qwen3-8B, https://huggingface.co/meta-llama/Llama-3.2-1B. A `tiny` one of each family has
the same proportions, for a CPU.
"""

import os

import torch

from minillm.model import ModelConfig, Transformer, load_hf

CONTEXT = 8192
_LLAMA = {"rope_theta": 500_000.0, "norm_eps": 1e-5, "max_seq_len": CONTEXT}
_QWEN3 = {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "max_seq_len": CONTEXT, "qk_norm": True}
SHAPES = {  # vocabulary, hidden, intermediate, layers, heads, kv heads
    "llama-8b": ModelConfig(128_256, 4096, 14_336, 32, 32, 8, **_LLAMA),
    "qwen3-8b": ModelConfig(151_936, 4096, 12_288, 36, 32, 8, head_dim=128, **_QWEN3),
    "llama-1b": ModelConfig(128_256, 2048, 8192, 16, 32, 8, tie_embeddings=True, **_LLAMA),
    "tiny-llama": ModelConfig(512, 64, 224, 2, 4, 2, **_LLAMA),
    "tiny-qwen3": ModelConfig(512, 64, 192, 2, 4, 2, head_dim=32, **_QWEN3),
}
SPREAD = 0.02  # standard deviation of the weights


def model_of(source: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The model in a Hugging Face folder, or a random one of SHAPES. ValueError if it is neither."""
    if source in SHAPES:
        return random_model(SHAPES[source], device, dtype)
    if not os.path.isfile(os.path.join(source, "config.json")):
        raise ValueError(f"--model {source} is no folder with a config.json, and none of {', '.join(SHAPES)}")
    return load_hf(source, device=device, dtype=dtype)


@torch.no_grad()
def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Drawn on the device, which takes a second where `seed=0`, the same on every device, takes minutes."""
    model = Transformer(config, seed=None, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, SPREAD, generator=generator)
    return model
