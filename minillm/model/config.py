"""The shape of one decoder-only transformer, checked once, when it is made.

A configuration is a frozen value: two equal configurations build equal models, and everything that needs a shape
(the model, the closed forms in `minillm.predict.model`, a tensor-parallel plan) reads it from here.
No torch is needed to make one.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are stretched to reach beyond the context a model was first trained on.

    kind "linear": every frequency is divided by `factor` (Chen et al. 2023, position interpolation).
    kind "llama3": only those of long wavelengths, above original_max_seq_len / low_freq_factor, are; wavelengths below
    original_max_seq_len / high_freq_factor stay, and between them the two are blended (Llama 3.1).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self):
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"RoPE scaling {self.kind!r} is not supported: use 'linear' or 'llama3'.")
        if self.factor < 1:
            raise ValueError(f"RoPE scaling factor {self.factor} would shrink the context: use a factor of at least 1.")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RoPE low_freq_factor {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor {self.high_freq_factor}."
            )
        if self.original_max_seq_len < 1:
            raise ValueError(f"RoPE original_max_seq_len {self.original_max_seq_len} must be at least 1.")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a Llama-shaped model; Llama 2/3, Mistral, Qwen2.5 and Qwen3 are settings of it.

    num_kv_heads: heads of keys and values; None = num_heads (multi-head attention), 1 = multi-query, between = grouped.
    head_dim: None = hidden_size / num_heads; Qwen3 sets it apart from that.
    max_seq_len: the context; positions run from 0 to max_seq_len - 1.
    sliding_window: a query sees its own position and the sliding_window - 1 before it; None = all before it.
    init_std: standard deviation of initial weights; init_std / √(2 layers) for those that write into the residual.
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
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} must be above 0.")


def _check_size(name: str, value: int | None) -> None:
    optional = name in ("head_dim", "sliding_window")
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} {value!r} must be a whole number of at least 1{', or None' if optional else ''}.")
