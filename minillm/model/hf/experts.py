"""Mixtures of experts in Hugging Face's config.json and in its names of tensors.

A checkpoint holds every expert's matrices as tensors of their own; here an expert's are a place in a stacked parameter.

    blocks.0.mlp.experts.gate_up_proj[3, 0]    mixtral        model.layers.0.block_sparse_moe.experts.3.w1.weight
                                               the others     model.layers.0.mlp.experts.3.gate_proj.weight
"""

from collections.abc import Iterator
from typing import Any

from minillm.model.config import ModelConfig, MoEConfig

TRAINING = {"output_router_logits": False, "router_aux_loss_coef": None, "router_jitter_noise": 0.0}
EXPERTS = TRAINING | {"num_experts": None, "num_experts_per_tok": 8, "norm_topk_prob": False}
MIXTRAL = TRAINING | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8}
MIXTRAL |= {"rms_norm_eps": 1e-5, "sliding_window": None}
QWEN3_MOE = EXPERTS | {"num_local_experts": 128, "moe_intermediate_size": 768, "attention_bias": False}
QWEN3_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": None}
QWEN3_MOE |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": None}
OLMOE = EXPERTS | {"num_local_experts": 64, "attention_bias": False, "clip_qkv": None, "rms_norm_eps": 1e-5}
KINDS = ("mixtral", "qwen3_moe", "olmoe")
PROJECTIONS = {"mixtral": ("w1", "w3", "w2")}  # gate, up, down
HERE = (("gate_up_proj", 0), ("gate_up_proj", 1), ("down_proj", None))


def read_experts(values: dict, kind: str) -> MoEConfig | None:
    """The experts of a config.json; None for a dense family. ValueError for what is not supported.

    Loss factors and noise, which only training uses, are not read: each training run sets its own.
    """
    if kind not in KINDS:
        return None
    if values.get("clip_qkv") is not None:
        raise ValueError(f"clip_qkv {values['clip_qkv']!r} is not supported: queries, keys and values are not clipped.")
    count = values.get("num_experts")
    return MoEConfig(
        values["num_local_experts"] if count is None else count,
        values["num_experts_per_tok"],
        intermediate_size=values.get("moe_intermediate_size"),
        normalize=bool(values.get("norm_topk_prob", True)),
        dense_layers=_dense_layers(values),
    )


def write_experts(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The keys of config.json for a configuration that has experts; nothing for one that has none."""
    moe = config.moe
    if moe is None or kind not in KINDS:
        return {}
    raw = {"num_experts_per_tok": moe.top_k, "intermediate_size": config.intermediate_size}
    if kind == "mixtral":
        return raw | {"num_local_experts": moe.num_experts}
    raw |= {"num_experts": moe.num_experts, "norm_topk_prob": moe.normalize}
    if kind == "qwen3_moe":
        raw |= {"moe_intermediate_size": moe.intermediate_size, "decoder_sparse_step": 1}
        raw |= {"mlp_only_layers": list(moe.dense_layers)}
    return raw


def kind_of(config: ModelConfig) -> str:
    """The model_type to save a configuration with experts as."""
    if not config.qk_norm:
        return "mixtral"
    return "olmoe" if config.qk_norm_over_heads else "qwen3_moe"


def expert_tensors(config: ModelConfig, kind: str, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(what stands for "experts" in the stored name, place in the parameter) of each tensor in a stacked parameter."""
    stored = PROJECTIONS.get(kind, ("gate_proj", "up_proj", "down_proj"))
    for expert in range(config.moe.num_experts):
        for projection, (parameter, half) in zip(stored, HERE, strict=True):
            if name.endswith(parameter):
                yield f"experts.{expert}.{projection}.weight", (expert,) if half is None else (expert, half)


def _dense_layers(values: dict) -> tuple[int, ...]:
    step, without = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or ()
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"decoder_sparse_step {step!r} must be a whole number of at least 1.")
    if not isinstance(without, list | tuple):
        raise ValueError(f"mlp_only_layers {without!r} must be numbers of layers.")
    layers = range(values["num_hidden_layers"])
    return tuple(layer for layer in layers if layer in without or (layer + 1) % step)
