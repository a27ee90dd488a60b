"""Which part of every parameter a tensor-parallel rank holds: a function of the parameter's name and nothing else.

    embedding, head         rows      a rank's words; padded with zero rows where the vocabulary does not divide
    q_proj, k_proj, v_proj  rows      a rank's heads; fewer kv heads than ranks: several ranks hold the same one
    gate_proj, up_proj      rows      a rank's columns of the hidden layer; padded likewise
    o_proj, down_proj       columns   what reads them
    experts' matrices       columns   of every expert's hidden layer, as of an MLP's; or whole experts (`whole_experts`)
    norms, routers          whole     on every rank

The rules give placements (`sharding/placement.py`), which do all cutting and joining. A zero row of gate or up gives
silu(0) · 0 = 0, and the column of down that reads it is zero too, so padding changes no value, gets no gradient and
stays zero. `Partial`: the gradient is a share, to be added up by `placement.sum_partial`: of a norm that saw this
rank's heads or positions only, of a kv head that answered this rank's queries only.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from minillm.model import ModelConfig, Transformer
from minillm.model.config import refuse_beyond
from minillm.parallel.sharding.placement import Part, Partial, Placement, Replicate, Shard

ROWS = ("embedding.weight", "head.weight", *(f"{name}_proj.weight" for name in ("q", "gate", "up")), "q_proj.bias")
KV_ROWS = tuple(f"{name}_proj.{kind}" for name in ("k", "v") for kind in ("weight", "bias"))
COLUMNS = ("o_proj.weight", "down_proj.weight")
BEYOND = ("embedding_scale", "logit_soft_cap", "norm_placement", "qk_norm_over_heads", "output_bias", "mlp_bias")
EXPERTS = (
    ".experts.gate_up_proj",
    ".experts.down_proj",
)  # stacked: [experts, 2, intermediate, hidden] and the way back
HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


def check_heads(config: ModelConfig, world_size: int) -> None:
    """ValueError if attention heads cannot be dealt out to so many ranks, or for what the layers here lack.

    Other sizes are padded.
    """
    refuse_beyond(config, "tensor parallelism", BEYOND)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % world_size:
        divisors = [t for t in range(1, heads + 1) if heads % t == 0]
        raise ValueError(
            f"{heads} attention heads do not divide over {world_size} tensor-parallel ranks: every rank takes equally "
            f"many; use one of {', '.join(map(str, divisors))} ranks or another num_heads."
        )
    if kv_heads % world_size and world_size % kv_heads:
        raise ValueError(
            f"{kv_heads} kv heads neither divide over {world_size} tensor-parallel ranks nor the ranks over them: use "
            "a number of ranks that divides them or is a multiple of them."
        )


def part_of(
    config: ModelConfig, name: str, rank: int, world_size: int, sequence: bool = False, whole_experts: bool = False
) -> Part:
    """Which part of parameter `name` (its name in the whole model, or the end of it) `rank` of `world_size` holds.

    sequence: norms between the parallel regions see a part of the sequence. whole_experts: a rank has some experts, not
    a part of each. ValueError for heads that do not divide.
    """
    check_heads(config, world_size)
    if name.endswith(HEAD_NORMS):
        return _partial_if(world_size > 1, Replicate(copy=rank))
    if name.endswith("router.weight"):
        return Replicate(copy=rank)
    if name.endswith(EXPERTS):
        return Shard(0 if whole_experts else 2, rank, world_size)
    if name.endswith("norm.weight"):
        return _partial_if(sequence and world_size > 1, Replicate(copy=rank))
    if name.endswith(KV_ROWS):
        parts = min(world_size, config.num_kv_heads)
        copies = world_size // parts
        return _partial_if(copies > 1, Shard(0, rank // copies, parts, copy=rank % copies))
    if name.endswith(ROWS):
        return Shard(0, rank, world_size)
    if name.endswith(COLUMNS):
        return Shard(1, rank, world_size)
    raise ValueError(f"parameter {name!r} is none of a Transformer's: no rule says how to split it.")


def placement_of(config: ModelConfig, name: str, rank: int, world_size: int, sequence: bool = False) -> Placement:
    """Where parameter `name` of the whole model lies on `rank`."""
    return Placement(whole_shapes(config)[name], (part_of(config, name, rank, world_size, sequence),))


def placements(config: ModelConfig, rank: int, world_size: int, sequence: bool = False) -> dict[str, Placement]:
    """`placement_of` every parameter of the whole model."""
    return {name: placement_of(config, name, rank, world_size, sequence) for name in whole_shapes(config)}


@functools.lru_cache(1)
def whole_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Shapes of the whole model's parameters by name."""
    return {name: parameter.shape for name, parameter in Transformer(config, device="meta").named_parameters()}


def named_gradients(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """name -> .grad of the parameters that have one: what `sum_partial` and `global_norm` take."""
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _partial_if(yes: bool, part: Replicate | Shard) -> Part:
    return Partial(part) if yes else part
