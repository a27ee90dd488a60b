"""Families of Hugging Face models as settings of `ModelConfig`: config.json in and out, and the names of tensors.

Every key that a family's config.json may hold is listed with the value it has when it is missing (transformers'
defaults). A key that is not listed is refused, because it may change what the model computes. docs/models.md has the
table of families and how each is tested.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm.model.config import ACTIVATIONS, ModelConfig
from minillm.model.hf.experts import MIXTRAL, OLMOE, QWEN3_MOE, expert_tensors, kind_of, read_experts, write_experts
from minillm.model.hf.rope import read_rope, write_rope

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
COMMON = dict.fromkeys((*REQUIRED, "max_position_embeddings", "num_key_value_heads", "head_dim"))
COMMON |= {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu"}
COMMON |= dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"))
COMMON |= {"partial_rotary_factor": None}
HARMLESS = frozenset(
    """
    model_type architectures dtype torch_dtype transformers_version use_cache auto_map tokenizer_class pretraining_tp
    attention_dropout resid_pdrop embd_pdrop cache_implementation sliding_window_size bos_token_id eos_token_id
    pad_token_id sep_token_id decoder_start_token_id id2label label2id num_labels problem_type return_dict
    output_attentions output_hidden_states chunk_size_feed_forward keys_to_ignore_at_inference
    """.split()  # noqa: SIM905
)
OUR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "sliding_window": 4096, "layer_types": None}
GEMMA |= {"tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256}
GEMMA |= {"final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": None}
GEMMA_SETTINGS = {"norm_placement": "both", "norm_offset": 1.0}


@dataclass(frozen=True)
class Family:
    """architecture: its class in transformers. keys: what its config.json may hold beyond COMMON, and other defaults.
    settings: options that all of its models share."""

    architecture: str
    keys: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


FAMILIES = {  # by model_type
    "llama": Family("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", QWEN, {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", QWEN | {"head_dim": 128, "attention_bias": False}, {"qk_norm": True}),
    "gemma2": Family(
        "Gemma2ForCausalLM", GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}, GEMMA_SETTINGS
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        GEMMA | {"rope_local_base_freq": None, "sliding_window_pattern": 6},
        GEMMA_SETTINGS | {"qk_norm": True},
    ),
    "phi3": Family(
        "Phi3ForCausalLM", {"sliding_window": None, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"attention_bias": False, "rms_norm_eps": 1e-5},
        {"norm_placement": "post", "qk_norm": True, "qk_norm_over_heads": True},
    ),
    "mixtral": Family("MixtralForCausalLM", MIXTRAL),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", QWEN3_MOE, {"qk_norm": True}),
    "olmoe": Family("OlmoeForCausalLM", OLMOE, {"qk_norm": True, "qk_norm_over_heads": True}),
}


class Piece(NamedTuple):
    """A place in a parameter: all of it, or one expert's matrix."""

    name: str
    index: tuple[int, ...] = ()

    def of(self, parameters: dict[str, Tensor]) -> Tensor:
        return parameters[self.name][self.index]


def config_from_hf(raw: dict, max_seq_len: int | None = None) -> ModelConfig:
    """config.json as a `ModelConfig`, of transformers 5 (rope_parameters) or older (rope_theta, rope_scaling).

    max_seq_len: the context; None = max_position_embeddings, but for longrope the context of its short factors.
    ValueError, naming the key, for what this transformer does not compute.
    """
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"architecture {kind!r} is not supported: use one of {', '.join(FAMILIES)}.")
    family = FAMILIES[kind]
    _check_keys(raw, kind)
    values = COMMON | family.keys | raw
    for key in (*REQUIRED, "max_position_embeddings"):
        if values[key] is None:
            raise ValueError(f"key {key!r} is missing.")
    window, full_attention_layers = _windows(values, kind)
    rope = read_rope(values, kind, max_seq_len)
    if kind == "gemma3_text" and not full_attention_layers:
        raise ValueError("layer_types without a full-attention layer are not supported for gemma3_text.")
    if len(full_attention_layers) == values["num_hidden_layers"]:
        full_attention_layers, rope = (), rope | {"sliding_rope_theta": None}
    vocab_size, hidden_size, intermediate_size, num_layers, num_heads = (values[key] for key in REQUIRED)
    options = family.settings | rope
    if values.get("attention_bias"):
        options |= {"qkv_bias": True, "output_bias": True}
    if kind.startswith("gemma"):
        scalar = values["query_pre_attn_scalar"]
        options |= {
            "attention_scale": None if scalar == values["head_dim"] else scalar**-0.5,
            "attention_soft_cap": values["attn_logit_softcapping"],
            "logit_soft_cap": values["final_logit_softcapping"],
            "embedding_scale": hidden_size**0.5,
        }
    return ModelConfig(
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        norm_eps=values["rms_norm_eps"],
        tie_embeddings=bool(values["tie_word_embeddings"]),
        init_std=values["initializer_range"],
        mlp_bias=bool(values.get("mlp_bias")),
        activation=OUR_ACTIVATIONS[_activation(values, kind)],
        sliding_window=window,
        full_attention_layers=full_attention_layers,
        moe=read_experts(values, kind),
        **options,
    )


def config_to_hf(config: ModelConfig, dtype: torch.dtype) -> dict:
    """config.json for the plainest architecture that has these options; read by old and new transformers.

    ValueError if no family has all of them: what is read back would be another model.
    """
    kind = family_of(config)
    family = FAMILIES[kind]
    raw = {
        "architectures": [family.architecture],
        "model_type": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        **write_rope(config, kind),
        **write_experts(config, kind),
    }
    if "sliding_window" in family.keys:
        raw["sliding_window"] = config.sliding_window
    if "attention_bias" in family.keys:
        raw["attention_bias"] = config.output_bias
    if "mlp_bias" in family.keys:
        raw["mlp_bias"] = config.mlp_bias
    if "layer_types" in family.keys:
        sliding = config.sliding_window is not None or config.sliding_rope_theta is not None
        full = config.full_attention_layers if sliding else range(config.num_layers)
        raw["layer_types"] = [
            "full_attention" if layer in full else "sliding_attention" for layer in range(config.num_layers)
        ]
    if kind.startswith("qwen"):
        raw |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": config.num_layers}
    if kind.startswith("gemma"):
        scale = config.attention_scale
        raw |= {
            "hidden_activation": ACTIVATIONS[config.activation],
            "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
            "attn_logit_softcapping": config.attention_soft_cap,
            "final_logit_softcapping": config.logit_soft_cap,
        }
    again = with_choices(config_from_hf(raw), config)
    for each in fields(config):
        if (found := getattr(again, each.name)) != (value := getattr(config, each.name)):
            raise ValueError(
                f"{each.name} {value!r} together with the rest of this configuration is not a Hugging Face "
                f"architecture that minillm knows ({kind} has {found!r}): it cannot be saved in that format."
            )
    return raw


def with_choices(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """`config` with those options of `other` that a checkpoint does not fix: the max_seq_len if RoPE
    follows it, and what concerns experts in training alone (their losses and their capacity)."""
    if config.rope_scaling is not None and config.rope_scaling.follows_max_seq_len:
        config = replace(config, max_seq_len=other.max_seq_len)
    if config.moe is None or other.moe is None:
        return config
    chosen = {name: getattr(other.moe, name) for name in ("balance_loss", "z_loss", "capacity_factor")}
    if other.moe.choice != config.moe.choice:  # then the capacity says what is computed
        return config
    return replace(config, moe=replace(config.moe, **chosen))


def family_of(config: ModelConfig) -> str:
    """The model_type to save a configuration as."""
    if config.moe is not None:
        return kind_of(config)
    if config.norm_placement == "post":
        return "olmo2"
    if config.norm_placement == "both":
        return "gemma3_text" if config.qk_norm else "gemma2"
    if config.rotary_dim is not None:
        return "phi3"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.output_bias:
        return "qwen2"
    plain = config.sliding_window is None and config.hidden_size % config.num_heads == 0  # what Llama insists on
    return "llama" if plain else "mistral"


def hf_name(name: str, *, norms_after: bool = False) -> str:
    """'blocks.3.attention.q_proj.weight' -> 'model.layers.3.self_attn.q_proj.weight'; one to one.

    norms_after: for models with norms after their branches, where post_attention_layernorm is what it says.
    """
    top = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    parts = {"attention": "self_attn", "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if norms_after:
        parts |= {"attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
        parts |= {"mlp_post_norm": "post_feedforward_layernorm"}
    first, *rest = name.split(".")
    if first != "blocks":
        return ".".join((top[first], *rest))
    layer, part, *rest = rest
    return ".".join(("model.layers", layer, parts.get(part, part), *rest))


def stored_tensors(config: ModelConfig, kind: str, names: Iterable[str]) -> dict[str, list[Piece]]:
    """Stored tensor -> the pieces of parameters that it holds, one after the other along the first axis.

    It is one whole parameter, but for several in Phi-3 and a single expert's part in a mixture of experts.
    """
    found: dict[str, list[Piece]] = {}
    for name in names:
        stored = hf_name(name, norms_after=config.norm_placement != "pre")
        if kind == "phi3":
            for fused, each in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
                for part in each:
                    stored = stored.replace(f".{part}_proj.", f".{fused}.")
        stored = stored.replace(".mlp.router.", ".mlp.gate.")
        before, experts, _ = stored.partition("experts.")
        held = expert_tensors(config, kind, name) if experts else [("", ())]
        for after, index in held:
            each = before + after if experts else stored
            if kind == "mixtral":
                each = each.replace(".mlp.", ".block_sparse_moe.")
            found.setdefault(each, []).append(Piece(name, index))
    return found


def _check_keys(raw: dict, kind: str) -> None:
    known = COMMON.keys() | FAMILIES[kind].keys.keys() | HARMLESS
    for key, value in raw.items():
        if key == "quantization_config" and value:
            if not isinstance(value, dict):
                raise ValueError(f"quantization_config {value!r} is not an object: download the folder again.")
            method = value.get("quant_method")
            if method not in ("compressed-tensors", "gptq", "awq"):
                raise ValueError(
                    f"quantized checkpoints are not supported in the layout of {method!r}: load one in that of "
                    "compressed-tensors, gptq or awq, or the weights as they were trained."
                )
            continue  # the layout is read with the weights
        if value is None or key in known or key.startswith("_"):
            continue
        raise ValueError(
            f"key {key!r} ({value!r}) is not known for {kind} and may change what the model computes: if it does not, "
            "delete it."
        )
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: attention is causal.")


def _activation(values: dict, kind: str) -> str:
    """The key's value, if it is the family's: the MLP is gated, so that a plain one would have other weights."""
    key = "hidden_activation" if "hidden_activation" in FAMILIES[kind].keys else "hidden_act"
    if values[key] not in OUR_ACTIVATIONS:
        raise ValueError(f"{key} {values[key]!r} is not supported: use one of {', '.join(OUR_ACTIVATIONS)}.")
    return values[key]


def _windows(values: dict, kind: str) -> tuple[int | None, tuple[int, ...]]:
    """(sliding window, layers without it). Llama has none; Mistral and Phi-3 slide in all layers, others in some."""
    layers, types, window = values["num_hidden_layers"], values.get("layer_types"), values.get("sliding_window")
    if "use_sliding_window" in FAMILIES[kind].keys and not values["use_sliding_window"]:
        window = None
    if kind == "qwen3_moe":
        full = ()  # transformers has the window in all layers
    elif kind in ("gemma2", "gemma3_text"):
        every = values.get("_sliding_window_pattern", values.get("sliding_window_pattern", 2))
        full = [layer for layer in range(layers) if (layer + 1) % every == 0]
    else:
        full = range(min(values.get("max_window_layers", 0), layers))
    if types is not None:
        if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"layer_types {types!r} must be full_attention or sliding_attention, for {layers} layers.")
        full = [layer for layer, name in enumerate(types) if name == "full_attention"]
    if len(full) == layers:
        window = None
    return window, () if window is None and kind != "gemma3_text" else tuple(full)
