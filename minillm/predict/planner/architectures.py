"""Models as a planner sees them: parameters and FLOPs per layer, dense or with experts, ordinary or latent attention.

    dense layer    attention 2·h·(q + kv) [+ latent projections]   MLP 3·h·f gated (SwiGLU), 2·h·f plain (GeLU)
    expert layer   router h·E, E experts of 3·h·f_e, shared experts of the same size; a token activates top_k + shared
    FLOPs          6 per active matmul parameter and token in training, and 12·q per key a query meets

h hidden size, q = heads · head_dim, kv = 2 · kv heads · head_dim, f intermediate size, E experts. Biases and norms are
left out, which is less than 0.1 % of any model here.
"""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys come from low-rank vectors, and only those are cached.

    DeepSeek-AI 2024, "DeepSeek-V2", §2.1 (https://arxiv.org/abs/2405.04434).
    """

    query_rank: int
    kv_rank: int
    plain_dim: int  # of a head's key, without position
    rope_dim: int  # of the key shared by all heads, with position
    value_dim: int


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer. experts 0: dense. dense_layers: first layers of an expert model without
    experts. gated: three matrices per MLP instead of two."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool = False
    gated: bool = True
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    latent: LatentAttention | None = None
    source: str = ""

    @property
    def expert_layers(self) -> int:
        return self.num_layers - self.dense_layers if self.experts else 0

    @property
    def query_width(self) -> int:
        """Elements of a token's queries over all heads."""
        if self.latent:
            return self.num_heads * (self.latent.plain_dim + self.latent.rope_dim)
        return self.num_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Elements of a token's attention output over all heads."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        h, latent = self.hidden_size, self.latent
        if latent is None:
            return 2 * h * self.query_width + 2 * h * self.num_kv_heads * self.head_dim
        queries = h * latent.query_rank + latent.query_rank * self.query_width
        keys_and_values = self.num_heads * (latent.plain_dim + latent.value_dim)
        cached = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * keys_and_values
        return queries + cached + self.value_width * h

    def _mlp(self, intermediate: int) -> int:
        return (3 if self.gated else 2) * self.hidden_size * intermediate

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts of one expert layer, which expert parallelism spreads."""
        return self.experts * self._mlp(self.expert_intermediate)

    @property
    def active_expert_parameters(self) -> int:
        """Parameters of the routed experts that one token activates in one layer."""
        return self.top_k * self._mlp(self.expert_intermediate)

    @property
    def mean_mlp_parameters(self) -> float:
        """Parameters of a layer's MLP, router and shared experts, without routed experts: the mean over layers."""
        beside = self.shared_experts * self._mlp(self.expert_intermediate) + self.hidden_size * self.experts
        dense = self.num_layers - self.expert_layers
        return (dense * self._mlp(self.intermediate_size) + self.expert_layers * beside) / self.num_layers

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def dense_parameters(self) -> int:
        """All parameters but those of routed experts."""
        tables = self.table * (1 if self.tie_embeddings else 2)
        return round(self.num_layers * (self.attention_parameters + self.mean_mlp_parameters)) + tables

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_layers * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token activates. As usual, the embedding's look-up table counts."""
        return self.dense_parameters + self.expert_layers * self.active_expert_parameters

    @property
    def active_layer(self) -> float:
        """Parameters of one layer that multiply a token: the mean over layers."""
        routed = self.expert_layers * self.active_expert_parameters / self.num_layers
        return self.attention_parameters + self.mean_mlp_parameters + routed

    def attention_flops(self, context: float) -> float:
        """FLOPs of one layer's attention, forward, per token: scores and values, 2 each per key and element."""
        return 2 * (self.query_width + self.value_width) * context

    def training_flops(self, context: float) -> float:
        """Model FLOPs of one token's forward and backward pass: what MFU counts. context: keys per query."""
        forward = 2 * (self.num_layers * self.active_layer + self.table)
        return 3 * (forward + self.num_layers * self.attention_flops(context))

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Bytes that one token adds to the cache, over all layers."""
        if self.latent:
            return self.num_layers * (self.latent.kv_rank + self.latent.rope_dim) * itemsize
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def from_shape(name: str, shape) -> Architecture:
    """The architecture of a dense `minillm.model.ModelConfig`."""
    return Architecture(
        name,
        shape.vocab_size,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_layers,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.tie_embeddings,
    )


def _gpt(name: str, hidden: int, layers: int, heads: int, source: str, vocab: int = 51200) -> Architecture:
    return Architecture(
        name, vocab, hidden, 4 * hidden, layers, heads, heads, hidden // heads, True, gated=False, source=source
    )


_MEGATRON = "Korthikanti et al. 2022, table 3: https://arxiv.org/abs/2205.05198"
_SC21 = "Narayanan et al. 2021, table 1: https://arxiv.org/abs/2104.04473"
_NEMOTRON = "Parmar et al. 2024: https://arxiv.org/abs/2402.16819, and 2024: https://arxiv.org/abs/2406.11704"
_GPT3 = "Brown et al. 2020, table 2.1: https://arxiv.org/abs/2005.14165"
_LLAMA2 = "Touvron et al. 2023: https://arxiv.org/abs/2307.09288"
_FMS = "Foundation Model Stack, Llama 2 34B: https://github.com/foundation-model-stack/fms-fsdp"
_LLAMA3 = "Llama Team 2024, table 3: https://arxiv.org/abs/2407.21783"
_DEEPSEEK = "DeepSeek-AI 2024, §4.2: https://arxiv.org/abs/2412.19437"

ARCHITECTURES = {
    each.name: each
    for each in (
        _gpt("gpt-3-175b", 12288, 96, 96, _GPT3),
        _gpt("megatron-1.7b", 2304, 24, 24, _SC21),
        _gpt("megatron-3.6b", 3072, 30, 32, _SC21),
        _gpt("megatron-7.5b", 4096, 36, 32, _SC21),
        _gpt("megatron-18b", 6144, 40, 48, _SC21),
        _gpt("megatron-39b", 8192, 48, 64, _SC21),
        _gpt("megatron-76b", 10240, 60, 80, _SC21),
        _gpt("megatron-146b", 12288, 80, 96, _SC21),
        _gpt("megatron-310b", 16384, 96, 128, _SC21),
        _gpt("megascale-175b", 12288, 96, 128, "Jiang et al. 2024, table 1: https://arxiv.org/abs/2402.15627", 64000),
        Architecture("nemotron-4-15b", 256000, 6144, 24576, 32, 48, 8, 128, gated=False, source=_NEMOTRON),
        Architecture("nemotron-4-340b", 256000, 18432, 73728, 96, 96, 8, 192, gated=False, source=_NEMOTRON),
        _gpt("megatron-22b", 6144, 48, 64, _MEGATRON),
        _gpt("megatron-530b", 20480, 105, 128, _MEGATRON),
        _gpt("megatron-1t", 25600, 128, 160, _MEGATRON),
        _gpt("bloom-176b", 14336, 70, 112, "BigScience 2022: https://arxiv.org/abs/2211.05100", 250880),
        _gpt("opt-175b", 12288, 96, 96, "Zhang et al. 2022: https://arxiv.org/abs/2205.01068", 50272),
        Architecture("llama-2-7b", 32000, 4096, 11008, 32, 32, 32, 128, source=_LLAMA2),
        Architecture("llama-2-13b", 32000, 5120, 13824, 40, 40, 40, 128, source=_LLAMA2),
        Architecture("llama-2-34b", 32000, 8192, 22016, 48, 64, 8, 128, source=_FMS),
        Architecture("llama-2-70b", 32000, 8192, 28672, 80, 64, 8, 128, source=_LLAMA2),
        Architecture("llama-3-8b", 128256, 4096, 14336, 32, 32, 8, 128, source=_LLAMA3),
        Architecture("llama-3-70b", 128256, 8192, 28672, 80, 64, 8, 128, source=_LLAMA3),
        Architecture("llama-3-405b", 128256, 16384, 53248, 126, 128, 8, 128, source=_LLAMA3),
        Architecture(
            "mistral-7b",
            32000,
            4096,
            14336,
            32,
            32,
            8,
            128,
            source="Jiang et al. 2023: https://arxiv.org/abs/2310.06825",
        ),
        Architecture(
            "mixtral-8x7b",
            32000,
            4096,
            14336,
            32,
            32,
            8,
            128,
            experts=8,
            top_k=2,
            expert_intermediate=14336,
            source="Jiang et al. 2024: https://arxiv.org/abs/2401.04088",
        ),
        Architecture(
            "deepseek-v3",
            129280,
            7168,
            18432,
            61,
            128,
            128,
            128,
            experts=256,
            top_k=8,
            expert_intermediate=2048,
            shared_experts=1,
            dense_layers=3,
            latent=LatentAttention(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128),
            source=_DEEPSEEK,
        ),
    )
}


def architecture(name: str) -> Architecture:
    """A model of the table by name; ValueError names those that are near, and where all are listed."""
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name.lower(), ARCHITECTURES, n=3, cutoff=0.3)
        nearest = f" (the nearest: {', '.join(near)})" if near else ""
        raise ValueError(
            f"no model {name!r} in the planner's table{nearest}: `python -m minillm plan --help` lists all, or name a "
            "folder with a config.json."
        )
    return ARCHITECTURES[name]
