"""One decoder-only transformer: every lab and every parallel form of minillm computes this function.

    tokens ── embedding ──┬──────────────(+)──┬─────────────(+)── … ── norm ── head ── logits
                          └ norm ─ attention ─┘└ norm ─ mlp ─┘
                          └────────── one Block ─────────────┘

Llama's shape (Touvron et al. 2023): RMSNorm before each branch, rotary positions, grouped-query attention (Ainslie et
al. 2023), SwiGLU (Shazeer 2020) or a mixture of experts that are one each (`moe`). Other families (Qwen, Gemma, Phi,
OLMo) are options of `ModelConfig`, a line each. The blocks are uniform, so a pipeline can cut between any two; the
number of heads is read from the projections' outputs, so a tensor-parallel slice runs the same code.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.attention.causal import AttentionFunction, sdpa
from minillm.model.config import ModelConfig
from minillm.model.distillation import Goals, distillation_sums
from minillm.model.elementwise import FUNCTIONS, gated, rotate_both
from minillm.model.initialise import WithoutInitialisation, draw_all, initial
from minillm.model.loss import cross_entropy_sums, linear_cross_entropy_sums, weights_of_sequences
from minillm.model.moe import MoE, RouterLosses
from minillm.model.rope import Rope, rotation_of


class Decoder(nn.Module):
    """What a whole Transformer and a pipeline's part of one have in common: the head, the loss, the initial values.

    attention: the attention function of forward passes that bring none.
    A model that is split over ranks replaces some attributes: the head's computation (`head_logits`, `head_loss`), the
    loss of logits beside a teacher's (`distil_loss`), how a parameter is drawn (`draw`), how layers that share an input
    are applied (`linears`), the positions of this rank's tokens (`positions_of`: number and device -> [seq], None =
    0 .. seq - 1), and `router_losses_of`.
    goals: what a teacher says of the next pass with targets, whose loss is then `distillation`'s; None = no teacher.
    router_losses: those of the last pass with targets and gradients; None = there are no experts.
    """

    def __init__(self, config: ModelConfig, attention: AttentionFunction):
        super().__init__()
        self.config, self.attention = config, attention
        self.head_logits, self.head_loss, self.draw = F.linear, linear_cross_entropy_sums, initial
        self.goals: Goals | None = None
        self.distil_loss = distillation_sums
        self.positions_of: Callable[[int, torch.device], Tensor] | None = None
        self.router_losses: RouterLosses | None = None
        self.router_losses_of = RouterLosses

    def logits(self, x: Tensor) -> Tensor:
        """x: [batch, seq, hidden] after the last block -> [batch, seq, vocab_size]. Tied: the embedding is the head."""
        head, cap = self._head, self.config.logit_soft_cap
        logits = self.head_logits(self.norm(x), head)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, x: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: [batch, seq, hidden] after the last block -> (Σ weight · nll, Σ weight): `linear_cross_entropy_sums`."""
        if self.goals is not None:
            return self.distil_loss(self.logits(x), targets, weights, self.goals)
        if self.config.logit_soft_cap is not None:
            return cross_entropy_sums(self.logits(x), targets, weights)
        head = self._head
        return self.head_loss(self.norm(x), head, targets, weights=weights)

    @property
    def _head(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> Self:
        """Sets every parameter to `initial(config, name, shape, seed)`, wherever it lives and whatever its dtype."""
        draw_all(self, seed)
        return self


class Transformer(Decoder):
    """`Transformer(config)(tokens)` -> logits.

    seed: initial weights (see `initial`); None leaves them unset, for a loader to fill.
    device: "meta" (or `with torch.device("meta"):`) builds shapes without memory; then `to_empty` and `initialize`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        attention: AttentionFunction = sdpa,
    ):
        super().__init__(config, attention)
        device = torch.device(device or torch.get_default_device())
        with torch.device("meta"), WithoutInitialisation():
            self.embedding = embedding(config, dtype)
            self.rope = Rope(config)
            self.blocks = nn.ModuleList(Block(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = norm(config, config.hidden_size, dtype)
            self.head = None if config.tie_embeddings else _linear(config.hidden_size, config.vocab_size, dtype)
        self.to_empty(device=device)
        if seed is not None and device.type != "meta":
            self.initialize(seed)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        attention: AttentionFunction | None = None,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens: [batch, seq] of ids -> logits [batch, seq, vocab_size].

        positions: [seq] or [batch, seq], where the tokens stand; None = 0 .. seq - 1.
        rows: [n], the places along seq whose logits are wanted, [batch, n, vocab_size]; None = all.
        targets: [batch, seq]; with them the result is (Σ weight · nll, Σ weight), see `loss`. weights: None = all 1.
        The gradient of that sum includes the losses of routers (`moe.balance`), its value does not.
        ValueError for an id outside the vocabulary or a position outside the context (see `check_tokens`).
        """
        if positions is None and self.positions_of:
            positions = self.positions_of(tokens.shape[1], tokens.device)
        check_tokens(tokens, self.config, positions)
        x = self.embedding(tokens)
        rotation = self.rope(
            torch.arange(tokens.shape[1], device=x.device) if positions is None else positions, x.dtype
        )
        more = ()
        if self.config.moe and targets is not None and torch.is_grad_enabled():
            self.router_losses = self.router_losses_of(weights_of_sequences(targets, weights, x.dtype))
            more = (self.router_losses,)
        for block in self.blocks:
            x = block(x, rotation, attention or self.attention, positions, *more)
        if rows is not None:
            x = x[:, rows]
        if targets is None:
            return self.logits(x)
        total, weight = self.loss(x, targets, weights)
        return more[0].begin_at(total) if more else total, weight


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). x: [batch, seq, hidden] in and out.

    norm_placement "post" has norm(attention(x)) and norm(mlp(x)) instead, "both" has norms on either side.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype | None = None):
        super().__init__()
        before, after = (config.norm_placement in (place, "both") for place in ("pre", "post"))
        self.attention_norm = norm(config, config.hidden_size, dtype, before)
        self.attention = Attention(config, layer, dtype)
        self.attention_post_norm = norm(config, config.hidden_size, dtype, after)
        self.mlp_norm = norm(config, config.hidden_size, dtype, before)
        self.mlp = mixture(config, layer, dtype) if config.has_experts(layer) else MLP(config, dtype)
        self.mlp_post_norm = norm(config, config.hidden_size, dtype, after)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: AttentionFunction = sdpa,
        positions: Tensor | None = None,
        losses: RouterLosses | None = None,
    ) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rotation, attention, positions))
        more = (losses,) if losses is not None and isinstance(self.mlp, MoE) else ()
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x), *more))


class Attention(nn.Module):
    """Projections around an attention function: each kv head serves num_heads / num_kv_heads query heads."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.window(layer)
        self.rotation, self.over_heads = rotation_of(config, layer), config.qk_norm_over_heads
        self.query_factor = 1.0 if config.attention_scale is None else config.attention_scale * config.head_dim**0.5
        self.options = {} if config.attention_soft_cap is None else {"soft_cap": config.attention_soft_cap}
        self.linears, self.rotate_both = apply_linears, rotate_both
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = _linear(config.hidden_size, q_size, dtype, bias=config.qkv_bias)
        self.k_proj = _linear(config.hidden_size, kv_size, dtype, bias=config.qkv_bias)
        self.v_proj = _linear(config.hidden_size, kv_size, dtype, bias=config.qkv_bias)
        self.o_proj = _linear(q_size, config.hidden_size, dtype, bias=config.output_bias)
        self.q_norm = norm(config, q_size if self.over_heads else config.head_dim, dtype, config.qk_norm)
        self.k_norm = norm(config, kv_size if self.over_heads else config.head_dim, dtype, config.qk_norm)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionFunction, positions: Tensor | None
    ) -> Tensor:
        def heads(y: Tensor) -> Tensor:  # [batch, seq, heads * head_dim] -> [batch, heads, seq, head_dim]
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        q, k, v = self.linears(x, self.q_proj, self.k_proj, self.v_proj)
        if self.over_heads:
            q, k, v = heads(self.q_norm(q)), heads(self.k_norm(k)), heads(v)
        else:
            q, k, v = self.q_norm(heads(q)), self.k_norm(heads(k)), heads(v)
        cos, sin = rotation if self.rotation is None else (each[self.rotation] for each in rotation)
        q, k = self.rotate_both(q, k, cos, sin)
        if self.query_factor != 1:  # attention functions divide by √head_dim
            q = q * self.query_factor
        y = attention(q, k, v, layer=self.layer, positions=positions, window=self.window, **self.options)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)); with activation "gelu_tanh" GeGLU."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None):
        super().__init__()
        self.linears, self.gated, bias = apply_linears, partial(gated, FUNCTIONS[config.activation]), config.mlp_bias
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size, dtype, bias)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size, dtype, bias)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size, dtype, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linears(x, self.gate_proj, self.up_proj)
        return self.down_proj(self.gated(gate, up))


def mixture(config: ModelConfig, layer: int, dtype: torch.dtype | None = None) -> MoE:
    """The experts of a layer; the shared ones are one MLP of their widths together, which computes the same."""
    width = config.moe.shared_experts * config.moe.intermediate_size
    shared = MLP(replace(config, intermediate_size=width), dtype) if width else None
    return MoE(config, layer, shared, dtype)


def apply_linears(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of several layers that read one input. Layers that are split over ranks share its communication."""
    return tuple(layer(x) for layer in layers)


class RMSNorm(nn.Module):
    """(weight + offset) · x / √(mean(x²) + eps) over the last dimension, no mean subtracted (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype | None = None, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and not self.offset:  # one fused kernel there; on the CPU torch has none and the formula is faster
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight.to(wide.dtype) + self.offset if self.offset else self.weight
        return (normalised * weight).to(x.dtype)


class ScaledEmbedding(nn.Embedding):
    """An embedding whose rows are multiplied by a constant, in the model's dtype."""

    def __init__(self, *sizes: int, scale: float, dtype: torch.dtype | None = None):
        super().__init__(*sizes, dtype=dtype)
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x * torch.full((), self.scale, dtype=x.dtype, device=x.device)


def check_tokens(tokens: Tensor, config: ModelConfig, positions: Tensor | None = None) -> None:
    """ValueError if ids leave the vocabulary or positions leave the context. Shapes are always checked (free).

    Values are checked only while they lie on the CPU (microseconds): reading them from a GPU would make every forward
    pass wait for it. For a GPU, call this on the batch before it is moved; a bad id that slips through still fails
    in the embedding, but later and as a device-side assertion.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}: the model takes [batch, seq].")
    if positions is None and tokens.shape[1] > config.max_seq_len:
        raise ValueError(
            f"a sequence of {tokens.shape[1]} tokens is longer than the context of {config.max_seq_len}: "
            "shorten it or raise max_seq_len."
        )
    if positions is not None and positions.shape not in (tokens.shape, tokens.shape[1:]):
        raise ValueError(f"positions have shape {list(positions.shape)}, tokens {list(tokens.shape)}: they must match.")
    if torch.compiler.is_compiling():
        return
    for what, values, limit in (("token id", tokens, config.vocab_size), ("position", positions, config.max_seq_len)):
        if values is not None and values.device.type == "cpu" and values.numel():
            low, high = (int(bound) for bound in values.aminmax())
            if low < 0 or high >= limit:
                name = "vocab_size" if values is tokens else "max_seq_len"
                raise ValueError(f"{what} {low if low < 0 else high} is outside 0 .. {limit - 1} ({name} {limit}).")


def embedding(config: ModelConfig, dtype: torch.dtype | None = None) -> nn.Embedding:
    sizes = config.vocab_size, config.hidden_size
    if config.embedding_scale == 1:
        return nn.Embedding(*sizes, dtype=dtype)
    return ScaledEmbedding(*sizes, scale=config.embedding_scale, dtype=dtype)


def norm(
    config: ModelConfig, size: int, dtype: torch.dtype | None = None, present: bool = True
) -> Callable[[Tensor], Tensor]:
    """A norm over `size` numbers, or nothing where the model has none: no module, whose call would take a while."""
    return RMSNorm(size, config.norm_eps, dtype, config.norm_offset) if present else unchanged


def unchanged(x: Tensor) -> Tensor:
    return x


def _linear(inputs: int, outputs: int, dtype: torch.dtype | None, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
