"""The shape of one decoder-only transformer, checked once, when it is made.

A configuration is a frozen value: two equal configurations build equal models, and everything that needs a shape
(the model, the closed forms in `minillm.predict.model`, a tensor-parallel plan) reads it from here.
No torch is needed to make one.
"""

import math
from dataclasses import dataclass, fields, replace

ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # -> their names in Hugging Face's config.json
NORM_PLACEMENTS = ("pre", "post", "both")
SCORES = ("softmax", "sigmoid")
CHOICES = ("token", "expert")


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are stretched to reach beyond the context a model was first trained on.

    kind "linear": every frequency is divided by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595).
    kind "llama3": only those of long wavelengths, above original_max_seq_len / low_freq_factor, are; wavelengths below
    original_max_seq_len / high_freq_factor stay, and between them the two are blended (Llama 3.1).
    kind "yarn": the same idea, blended between planes that turn beta_fast and beta_slow times over the original
    context, to whole planes if `truncate` (Peng et al. 2023, https://arxiv.org/abs/2309.00071).
    kind "longrope": plane i is divided by short_factors[i], or by long_factors[i] if max_seq_len is above
    original_max_seq_len (Ding et al. 2024, https://arxiv.org/abs/2402.13753).
    kind "dynamic": rope_theta grows with max_seq_len / original_max_seq_len, and stays as it is up to 1.
    attention_factor: cosines and sines are multiplied by it (yarn and longrope).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self):
        for name in ("short_factors", "long_factors"):  # lists, when it was read from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"RoPE scaling {self.kind!r} is not supported: use one of {', '.join(ROPE_KINDS)}.")
        if self.factor < 1:
            raise ValueError(f"RoPE scaling factor {self.factor} would shrink the context: use a factor of at least 1.")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RoPE low_freq_factor {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor {self.high_freq_factor}."
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"RoPE beta_slow {self.beta_slow} must be above 0 and below beta_fast {self.beta_fast}.")
        if self.original_max_seq_len < 1:
            raise ValueError(f"RoPE original_max_seq_len {self.original_max_seq_len} must be at least 1.")
        if not self.attention_factor > 0 or not all(f > 0 for f in (*self.short_factors, *self.long_factors)):
            raise ValueError("RoPE attention_factor, short_factors and long_factors must be above 0.")

    @property
    def follows_max_seq_len(self) -> bool:
        """Whether the frequencies depend on the model's max_seq_len: keys rotated for one then do not fit another."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the MLP; `minillm.model.moe` computes it.

    top_k: experts that a token goes to, of num_experts. intermediate_size: of one expert; None = the model's.
    scores: "softmax" over all experts, or "sigmoid" of each alone (DeepSeek-V3). normalize: the scores of the chosen
    experts are divided by their sum. weight_scale: what the weights are multiplied by then (DeepSeek-V3 has 2.5).
    choice: "token", each token takes its top_k experts; "expert", each expert takes its best tokens of a sequence (Zhou
    et al. 2022), which sees the future and so cannot generate.
    capacity_factor: an expert takes at most ⌈capacity_factor · seq · top_k / num_experts⌉ tokens of a sequence while
    the model is trained and drops the rest; None = dropless. Experts that choose take that many (None counts as 1).
    shared_experts: experts that every token goes to, beside those it chooses.
    balance_loss, z_loss: factors of the load-balancing loss (Fedus et al. 2021, §2.2) and of the router z-loss (Zoph et
    al. 2022, §3.1), each a mean over tokens and a sum over layers.
    bias_update_rate: step of the biases that balance without a loss (DeepSeek-V3, §2.1.2); None = there are none.
    dense_layers: layers that keep their MLP.
    """

    num_experts: int
    top_k: int
    intermediate_size: int | None = None
    scores: str = "softmax"
    normalize: bool = True
    weight_scale: float = 1.0
    choice: str = "token"
    capacity_factor: float | None = None
    shared_experts: int = 0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_update_rate: float | None = None
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "dense_layers", tuple(sorted(set(self.dense_layers))))
        for name, least in {"num_experts": 1, "top_k": 1, "shared_experts": 0}.items():
            _check_size(name, getattr(self, name), least)
        if self.intermediate_size is not None:
            _check_size("intermediate_size", self.intermediate_size)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} is more than num_experts {self.num_experts}: lower one, raise the other."
            )
        for name, known in (("scores", SCORES), ("choice", CHOICES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not supported: use one of {', '.join(known)}.")
        for name in ("balance_loss", "z_loss"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)} must be at least 0; 0 switches it off.")
        for name in ("capacity_factor", "bias_update_rate", "weight_scale"):
            value, optional = getattr(self, name), name != "weight_scale"
            if not (optional and value is None) and not 0 < value < float("inf"):
                raise ValueError(f"{name} {value} must be above 0{', or None to do without' if optional else ''}.")
        if self.choice == "expert" and (self.balance_loss or self.bias_update_rate):
            raise ValueError(
                "experts that choose are balanced by construction: leave balance_loss and bias_update_rate."
            )
        if not all(isinstance(layer, int) and layer >= 0 for layer in self.dense_layers):
            raise ValueError(f"dense_layers {self.dense_layers} must be numbers of layers, from 0.")

    def capacity(self, seq: int) -> int | None:
        """Tokens of a sequence of `seq` that an expert takes at most; None = all."""
        if self.capacity_factor is None and self.choice == "token":
            return None
        return min(seq, math.ceil((self.capacity_factor or 1.0) * seq * self.top_k / self.num_experts))

    @property
    def counts_tokens(self) -> bool:
        """Whether a sequence's length matters to its routers, in training: to losses, drops or experts that choose."""
        return bool(self.balance_loss or self.z_loss or self.capacity_factor) or self.choice == "expert"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer. The defaults are Llama's; docs/models.md has the other families.

    num_kv_heads: heads of keys and values; None = num_heads (multi-head attention), 1 = multi-query, between = grouped.
    head_dim: None = hidden_size / num_heads; Qwen3 and Gemma set it apart from that.
    max_seq_len: the context; positions run from 0 to max_seq_len - 1.
    sliding_window: a query sees its own position and the sliding_window - 1 before it; None = all before it.
    init_std: standard deviation of initial weights; init_std / √(2 layers) for those that write into the residual.

    qk_norm: queries and keys are normalised, each head alone; with qk_norm_over_heads all heads of a token together.
    full_attention_layers: layers without the sliding window.
    sliding_rope_theta: rope_theta, without scaling, of all other layers; None = as in full_attention_layers.
    rotary_dim: dimensions of a head that are rotated, the first ones; None = all.
    attention_scale: what scores are multiplied by; None = 1 / √head_dim.
    attention_soft_cap, logit_soft_cap: scores and logits become cap · tanh(x / cap); None = they stay.
    embedding_scale: what embeddings are multiplied by. activation: of the gate in the MLP, "silu" or "gelu_tanh".
    norm_placement: "pre", a norm before each branch; "post", one after it, before the sum; "both".
    norm_offset: added to the weight of every norm (Gemma stores weights around 0 and has 1 here).
    moe: experts in place of the MLP; None = dense.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    sliding_window: int | None = None
    init_std: float = 0.02
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm_over_heads: bool = False
    full_attention_layers: tuple[int, ...] = ()
    sliding_rope_theta: float | None = None
    rotary_dim: int | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    activation: str = "silu"
    norm_placement: str = "pre"
    norm_offset: float = 0.0
    moe: MoEConfig | None = None

    def __post_init__(self):
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        for field in fields(self):
            if field.type in (int, int | None):
                _check_size(field.name, getattr(self, field.name))
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}: "
                    "change one of them or set head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, but RoPE rotates pairs: make it even.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}: "
                "every kv head serves equally many query heads."
            )
        for name in ("rope_theta", "norm_eps", "init_std", "embedding_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} must be above 0.")
        for name in ("sliding_rope_theta", "attention_scale", "attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} must be above 0, or None.")
        for name, known in (("activation", ACTIVATIONS), ("norm_placement", NORM_PLACEMENTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not supported: use one of {', '.join(known)}.")
        self._check_rotation()
        self._check_experts()
        if not all(isinstance(layer, int) and layer >= 0 for layer in self.full_attention_layers):
            raise ValueError(f"full_attention_layers {self.full_attention_layers} must be numbers of layers, from 0.")
        layers = tuple(sorted({layer for layer in self.full_attention_layers if layer < self.num_layers}))
        object.__setattr__(self, "full_attention_layers", layers)  # so that a model of the first layers can be made

    def _check_experts(self) -> None:
        """Fills in what follows from the model, so that equal models are equal."""
        if self.moe is None:
            return
        if self.mlp_bias:
            raise ValueError("mlp_bias together with moe is not supported: experts have no biases.")
        dense = tuple(layer for layer in self.moe.dense_layers if layer < self.num_layers)
        size = self.moe.intermediate_size or self.intermediate_size
        object.__setattr__(self, "moe", replace(self.moe, intermediate_size=size, dense_layers=dense))

    def _check_rotation(self) -> None:
        if self.rotary_dim == self.head_dim:
            object.__setattr__(self, "rotary_dim", None)  # one way to say it, so that equal models are equal
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise ValueError(f"rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}.")
        scaling = self.rope_scaling
        if scaling is None:
            return
        if self.sliding_rope_theta is not None and scaling.kind in ("yarn", "longrope"):
            raise ValueError(f"RoPE scaling {scaling.kind!r} together with sliding_rope_theta is not supported.")
        planes = (self.rotary_dim or self.head_dim) // 2
        if scaling.kind == "dynamic" and planes < 2:
            raise ValueError("RoPE scaling 'dynamic' needs at least 4 rotated dimensions: use another kind.")
        if scaling.kind == "longrope" and {len(scaling.short_factors), len(scaling.long_factors)} != {planes}:
            raise ValueError(
                f"RoPE scaling has {len(scaling.short_factors)} short and {len(scaling.long_factors)} long factors: "
                f"give one of each for the {planes} pairs of dimensions that are rotated."
            )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None = it sees all."""
        return None if layer in self.full_attention_layers else self.sliding_window

    @property
    def window_of_all_layers(self) -> int | None:
        """The sliding window if every layer has it: older keys and values are of no use. None = some layer sees all."""
        return None if self.full_attention_layers else self.sliding_window


def check_generates(config: ModelConfig) -> None:
    """ValueError for a model that has to see whole sequences."""
    if config.moe is not None and config.moe.choice == "expert":
        raise ValueError(
            "experts that choose their tokens see whole sequences, so this model cannot generate token by token: "
            'train it with choice="token".'
        )


def refuse_beyond(config: ModelConfig, what: str, names: tuple[str, ...]) -> None:
    """ValueError if the configuration uses one of these options, which `what` does not cover."""
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    for name in names:
        if (value := getattr(config, name)) != defaults[name]:
            raise ValueError(f"{what} does not cover {name} {value!r}: run this model without it.")


def _check_size(name: str, value: int | None, least: int = 1) -> None:
    optional = name in ("head_dim", "sliding_window", "rotary_dim")
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{name} {value!r} must be a whole number of at least {least}{', or None' if optional else ''}."
        )
