"""What the oracle trains: models small enough to be fast, and the corners where parallel strategies have gone wrong.

CASES            replicas and ZeRO        sizes that do not divide, tied and frozen weights, ranks without a token
SPLIT_CASES      tp and pp                the same, on models with enough layers and heads to be split
CONTEXT_CASES    cp                       packed documents, windows, lengths that need padding
EXPERT_CASES     ep                       empty experts, all tokens to one, drops, router losses
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minillm.adapters import LoraConfig
from minillm.model import ModelConfig, MoEConfig
from minillm.model.loss import IGNORE
from minillm.train.parallel_config import ParallelConfig


@dataclass(frozen=True)
class Batch:
    """tokens, targets: [batch, seq] of ids, a target of -100 does not count; weights: [batch, seq], None = all 1;
    documents: [batch, seq], which packed document a token belongs to, None = one."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor | None = None
    documents: Tensor | None = None

    def __post_init__(self):
        for name in ("targets", "weights", "documents"):
            other = getattr(self, name)
            if other is not None and other.shape != self.tokens.shape:
                shapes = f"{list(other.shape)}, tokens {list(self.tokens.shape)}"
                raise ValueError(f"{name} have shape {shapes}: use one shape.")

    def to(self, device: torch.device) -> "Batch":
        parts = (self.tokens, self.targets, self.weights, self.documents)
        return Batch(*(None if part is None else part.to(device) for part in parts))

    @staticmethod
    def random(config: ModelConfig, batch: int, seq: int, *, seed: int = 0) -> "Batch":
        """Random ids, weights between 0 and 1, and about one target in five left out: no two rows count alike."""
        draw = torch.Generator().manual_seed(seed)
        tokens, targets = torch.randint(config.vocab_size, (2, batch, seq), generator=draw)
        targets[torch.rand(batch, seq, generator=draw) < 0.2] = IGNORE
        return Batch(tokens, targets, torch.rand(batch, seq, generator=draw, dtype=torch.float64))


@dataclass(frozen=True)
class Case:
    """What is trained: a model small enough for the oracle to be fast, and the batch of one step. lora: adapters, which
    alone are trained; qlora: beside NF4 codes."""

    config: ModelConfig
    batch: Batch
    frozen: tuple[str, ...] = ()
    max_grad_norm: float | None = None
    lora: LoraConfig | None = None
    qlora: bool = False


def _cases() -> dict[str, Case]:
    # 37 tokens and a hidden size of 12 divide by nothing; 13 rows are no multiple of ranks or microbatches.
    config = ModelConfig(37, 12, 17, 2, 4, 2, head_dim=4, max_seq_len=16, init_std=0.3)
    batch = Batch.random(config, 13, 7, seed=1)
    uneven = batch.targets.clone()
    uneven[: 13 // 2, 1:] = IGNORE  # the first ranks have few tokens, some microbatches none
    uneven[:2] = IGNORE
    small = ModelConfig(5, 2, 1, 1, 1, 1, max_seq_len=4, init_std=0.3)
    tied = replace(config, tie_embeddings=True, qk_norm=True)
    return {
        "plain": Case(config, batch),
        "tied": Case(tied, batch),
        "frozen": Case(config, batch, frozen=("blocks.0.*", "embedding.weight")),
        "frozen tied": Case(tied, batch, frozen=("embedding.weight", "blocks.1.mlp.*")),
        "unequal": Case(config, replace(batch, targets=uneven)),
        "size 1": Case(small, Batch.random(small, 13, 1, seed=2)),
        "clipped": Case(config, batch, max_grad_norm=0.05),
    }


CASES = _cases()


def _split_cases() -> dict[str, Case]:
    # Eight layers for eight parts, positions that divide over ranks, still 37 words and two kv heads for four ranks.
    config = ModelConfig(37, 8, 11, 8, 4, 2, head_dim=2, max_seq_len=16, init_std=0.3)
    batch = Batch.random(config, 13, 4, seed=3)
    uneven = batch.targets.clone()
    uneven[:7, 1:] = IGNORE
    uneven[:3] = IGNORE
    tied = replace(config, tie_embeddings=True, qk_norm=True, qkv_bias=True)
    return {
        "plain": Case(config, batch),
        "tied": Case(tied, batch),
        "frozen tied": Case(tied, batch, frozen=("embedding.weight", "blocks.1.mlp.*", "blocks.7.*")),
        "unequal": Case(tied, replace(batch, targets=uneven)),
        "clipped": Case(config, batch, max_grad_norm=0.05),
    }


SPLIT_CASES = _split_cases()  # the corners where models that are split over ranks go wrong


def _context_cases() -> dict[str, Case]:
    # Eight heads for four Ulysses ranks and two of tensor parallelism, two kv heads for fewer than either; 16 positions
    # divide for every variant, 13 for none.
    config = ModelConfig(37, 16, 11, 4, 8, 2, head_dim=2, max_seq_len=16, init_std=0.3)
    batch, draw = Batch.random(config, 5, 16, seed=4), torch.Generator().manual_seed(5)
    odd = Batch.random(config, 5, 13, seed=6)
    documents = torch.randint(4, (5, 16), generator=draw).sort(dim=1).values
    uneven = batch.targets.clone()
    uneven[:3, :12] = IGNORE  # the first parts of the first rows have no tokens, later ones some
    tied = replace(config, tie_embeddings=True, qk_norm=True, qkv_bias=True)
    windowed = replace(config, sliding_window=5)
    return {
        "plain": Case(config, batch),
        "tied": Case(tied, batch),
        "frozen tied": Case(tied, batch, frozen=("embedding.weight", "blocks.1.mlp.*")),
        "documents": Case(tied, replace(batch, documents=documents)),
        "windowed documents": Case(windowed, replace(batch, documents=documents)),
        "unequal": Case(tied, replace(batch, targets=uneven)),
        "padded": Case(tied, odd),
        "padded documents": Case(windowed, replace(odd, documents=documents[:, :13])),
        "clipped": Case(config, batch, max_grad_norm=0.05),
    }


CONTEXT_CASES = _context_cases()  # the corners where sequences that are cut go wrong; their layouts allow padding


def _expert_cases(seq: int) -> dict[str, Case]:
    # Eight experts for up to eight ranks; drops, losses of routers, a layer without experts, experts without tokens.
    config = ModelConfig(37, 12, 17, 2, 4, 2, head_dim=4, max_seq_len=16, init_std=0.3, moe=MoEConfig(8, 2, 6))
    batch = Batch.random(config, 13, seq, seed=7)
    alike = replace(
        batch, tokens=torch.full_like(batch.tokens, 3)
    )  # all tokens alike, so all choose one expert, and queries and keys have no gradient
    few = Batch(*(x[:3] for x in (batch.tokens, batch.targets, batch.weights)))  # with four ranks one has no tokens

    def experts(**options: Any) -> ModelConfig:
        return replace(config, moe=replace(config.moe, **options))

    sigmoid = experts(scores="sigmoid", weight_scale=2.5, shared_experts=1, dense_layers=(0,))
    capacity = experts(capacity_factor=0.75, balance_loss=0.1, z_loss=0.01)
    return {
        "experts": Case(config, batch),
        "shared": Case(replace(sigmoid, tie_embeddings=True, qk_norm=True), batch),
        "capacity": Case(capacity, batch),
        "experts choose": Case(experts(choice="expert"), batch),
        "one expert": Case(experts(top_k=1, normalize=False), alike, frozen=("*.q_proj.weight", "*.k_proj.weight")),
        "few tokens": Case(experts(shared_experts=2, capacity_factor=1.0), few),
        "frozen experts": Case(capacity, batch, frozen=("blocks.0.mlp.experts.*", "blocks.1.mlp.router.weight")),
        "clipped experts": Case(config, batch, max_grad_norm=0.05),
    }


EXPERT_CASES = _expert_cases(7)  # the corners where tokens that travel to experts go wrong
EVEN_EXPERT_CASES = _expert_cases(8)  # the same for sequences that are cut, over whose parts 7 positions do not divide


def cases_of(layout: ParallelConfig) -> dict[str, Case]:
    """The corners that a layout is put to."""
    if layout.ep > 1:
        return EVEN_EXPERT_CASES if layout.sequence or layout.cp > 1 else EXPERT_CASES
    return CONTEXT_CASES if layout.cp > 1 else SPLIT_CASES if layout.is_hybrid else CASES
