"""Hugging Face model folders in and out: config.json and names here, the tensor files in `weights`.

A folder is read strictly: every tensor the model needs must be there in its shape and none may be left over, because a
tensor that is silently skipped gives a model that only seems to work.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

import torch

from minillm.model import weights
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.transformer import Transformer

CONFIG = "config.json"
ARCHITECTURES = {  # model_type: class; all are settings of ModelConfig
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def load_hf(
    folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Transformer:
    """The model in a Hugging Face folder; dtype None keeps the one its embedding is stored in.

    ValueError, naming the tensor or the key: config.json missing, invalid or of an unknown architecture; safetensors
    missing or truncated; a tensor missing, unexpected or of another shape.
    """
    folder = Path(folder)
    config, stored = read_config(folder), weights.read(folder)
    if config.tie_embeddings and _has_other_head(stored):
        config = replace(config, tie_embeddings=False)
    shapes = {hf_name(name): list(p.shape) for name, p in Transformer(config, device="meta").named_parameters()}
    if missing := sorted(shapes.keys() - stored.keys()):
        raise ValueError(f"{folder} lacks tensor {missing[0]}{_more(missing)}: its checkpoint is not complete.")
    if extra := sorted(name for name in stored.keys() - shapes.keys() if not _derived(name, config)):
        raise ValueError(f"{folder} holds tensor {extra[0]}{_more(extra)}, for which its {CONFIG} has no place.")
    for name, shape in shapes.items():
        if (found := stored[name].get_slice(name).get_shape()) != shape:
            raise ValueError(f"tensor {name} in {folder} has shape {found}, its {CONFIG} asks for {shape}.")
    embedding = hf_name("embedding.weight")
    dtype = dtype or stored[embedding].get_tensor(embedding).dtype
    if not dtype.is_floating_point:
        raise ValueError(f"tensor {embedding} in {folder} is {dtype}: quantised checkpoints are not supported.")
    model = Transformer(config, seed=None, device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[hf_name(name)].get_tensor(hf_name(name)))
    return model


def save_hf(model: Transformer, folder: str | Path, *, max_shard_bytes: int | None = None) -> None:
    """Writes config.json and safetensors that `load_hf` and transformers read: all of it or nothing (`weights.write`).

    max_shard_bytes: start another file when one would hold more (a larger tensor has its own); None = one file.
    ValueError if the folder holds a checkpoint of another configuration, OSError if the disk refuses; in both cases
    what was there still loads. Other files in the folder, and other keys in its config.json, are kept.
    """
    folder = Path(folder)
    raw = config_to_hf(model.config, next(model.parameters()).dtype)
    check_folder(folder, model.config)
    if (folder / CONFIG).exists():
        raw = json.loads((folder / CONFIG).read_text()) | raw
    tensors = {hf_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    weights.write(tensors, folder, max_shard_bytes=max_shard_bytes, beside={CONFIG: raw})


def check_folder(folder: Path, config: ModelConfig) -> None:
    """ValueError if `folder` holds a checkpoint of another configuration."""
    if (folder / CONFIG).exists() and (previous := read_config(folder)) != config:
        name = next(f.name for f in fields(previous) if getattr(previous, f.name) != getattr(config, f.name))
        raise ValueError(
            f"{folder} holds a checkpoint of another model ({name} {getattr(previous, name)}, "
            f"not {getattr(config, name)}): save to another folder."
        )


def read_config(folder: str | Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder; ValueError as in `load_hf`."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {folder} is not a Hugging Face model folder.")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error
    try:
        return config_from_hf(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def config_from_hf(raw: dict) -> ModelConfig:
    """config.json as a `ModelConfig`, of transformers 5 (rope_parameters) or older (rope_theta, rope_scaling)."""
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"architecture {kind!r} is not supported: use one of {', '.join(ARCHITECTURES)}.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported: the MLP is SwiGLU, 'silu'.")
    for option in ("attention_bias", "mlp_bias"):
        if raw.get(option):
            raise ValueError(f"{option} is not supported: the output projection and the MLP have no biases.")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in (*required, "max_position_embeddings"):
        if raw.get(key) is None:
            raise ValueError(f"key {key!r} is missing.")
    vocab_size, hidden_size, intermediate_size, num_layers, num_heads = (raw[key] for key in required)
    theta, scaling = _rope_from_hf(raw)
    return ModelConfig(
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads=raw.get("num_key_value_heads"),
        head_dim=raw.get("head_dim") or (128 if kind == "qwen3" else None),
        max_seq_len=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
        sliding_window=_window_from_hf(raw),
        init_std=raw.get("initializer_range", 0.02),
    )


def config_to_hf(config: ModelConfig, dtype: torch.dtype) -> dict:
    """config.json for the plainest architecture that has these options; read by old and new transformers."""
    if config.qk_norm and config.qkv_bias:
        raise ValueError("qk_norm together with qkv_bias is no Hugging Face architecture: set one of them to False.")
    plain = config.sliding_window is None and config.hidden_size % config.num_heads == 0  # what Llama insists on
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama" if plain else "mistral"
    rope = _rope_to_hf(config)
    raw = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "sliding_window": config.sliding_window,
    }
    if kind.startswith("qwen"):
        sliding = config.sliding_window is not None
        raw |= {"use_sliding_window": sliding, "max_window_layers": 0 if sliding else config.num_layers}
        raw["layer_types"] = ["sliding_attention" if sliding else "full_attention"] * config.num_layers
    return raw


def hf_name(name: str) -> str:
    """'blocks.3.attention.q_proj.weight' -> 'model.layers.3.self_attn.q_proj.weight'; one to one."""
    top = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    parts = {"attention": "self_attn", "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    first, *rest = name.split(".")
    if first != "blocks":
        return ".".join((top[first], *rest))
    layer, part, *rest = rest
    return ".".join(("model.layers", layer, parts.get(part, part), *rest))


def _rope_from_hf(raw: dict) -> tuple[float, RopeScaling | None]:
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: every dimension of a head is rotated.")
    if kind == "default":
        return theta, None
    keys = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if missing := [key for key in keys if key not in rope]:
        raise ValueError(f"rope key {missing[0]!r} is missing, which rope type {kind!r} needs.")
    outside = raw.get("original_max_position_embeddings", raw["max_position_embeddings"])
    original = rope.get("original_max_position_embeddings", outside)
    values = [rope[key] for key in keys]
    return theta, RopeScaling(kind, *values, **({"original_max_seq_len": original} if kind == "llama3" else {}))


def _rope_to_hf(config: ModelConfig) -> dict:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def _window_from_hf(raw: dict) -> int | None:
    """Mistral slides in all layers; Qwen in those from max_window_layers on, and only when told to; Llama never."""
    kind, layers = raw["model_type"], raw["num_hidden_layers"]
    if kind == "mistral":
        return raw.get("sliding_window", 4096)
    if kind == "llama" or not raw.get("use_sliding_window", False):
        return None
    first = raw.get("max_window_layers", 28)
    types = raw.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(set(types)) > 1:
        raise ValueError("a sliding window in some layers only is not supported: set it for all or for none.")
    return raw.get("sliding_window", 4096) if types[0] == "sliding_attention" else None


def _has_other_head(stored: dict) -> bool:
    """Is a head stored that is not the embedding? It then counts, as in transformers, whatever the config says."""
    head, embedding = hf_name("head.weight"), hf_name("embedding.weight")
    if head not in stored or embedding not in stored:
        return False
    return not torch.equal(stored[head].get_tensor(head), stored[embedding].get_tensor(embedding))


def _derived(name: str, config: ModelConfig) -> bool:
    """Tensors old checkpoints carry although they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == hf_name("head.weight"))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
