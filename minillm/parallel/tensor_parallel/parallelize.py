"""`tensor_parallel(module, plan, group)`: cuts a module into this rank's part of it, in place.

    tensor_parallel(Transformer(config), config, group)      minillm's own: every head, word and column where it belongs
    tensor_parallel(llama, LLAMA, group)                     any other: a plan, module name pattern -> how it is cut

A model cut by a plan takes what it took and returns what it did, the same on every rank, and needs nothing else: its
gradients are complete after backward. minillm's own model shares more (one all-reduce for q, k and v, kv heads on
several ranks, sequence parallelism, logits that stay cut) and needs `placement.sum_partial` after backward for it.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from minillm.comm import Group
from minillm.model import ModelConfig
from minillm.model.initialise import initial
from minillm.model.moe import MoE
from minillm.parallel.tensor_parallel.experts import cut_experts
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, fused_column_linears
from minillm.parallel.tensor_parallel.module_plans import Plan, cut_by_plan
from minillm.parallel.tensor_parallel.plan import check_heads, part_of, placement_of, whole_shapes
from minillm.parallel.tensor_parallel.regions import Region
from minillm.parallel.tensor_parallel.vocab import (
    VocabParallelEmbedding,
    linear_vocab_parallel_cross_entropy_sums,
    vocab_parallel_distillation_sums,
    vocab_parallel_logits,
)


def tensor_parallel(
    module: nn.Module, plan: ModelConfig | Plan, group: Group, *, sequence: bool = False, regather: bool = True
) -> nn.Module:
    """Cuts `module`, whole and the same on every rank (or on "meta"), into this rank's part of it, in place, and
    returns it.

    plan: what to cut and how: `LLAMA`, or patterns of module names, of which the first that matches counts. A
        ModelConfig: `module` is a Transformer or a pipeline's part of one, anything with some of `embedding`, `blocks`,
        `norm` and `head`. Then `logits` gives this rank's words, and what travels between a pipeline's parts is
        [batch, seq / module.sequence_shards, hidden].
    sequence, regather: sequence parallelism, see `regions.Region`; with a ModelConfig only.

    Names stay, so does requires_grad; parameters are new, so make optimizers afterwards. ValueError for a plan that
    cuts nothing, layers or heads that do not divide over the ranks, and a module that is cut already.
    """
    if any(isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) for layer in module.modules()):
        raise ValueError("this module is tensor parallel already: cut a whole one.")
    region = Region(group, sequence, regather)
    if isinstance(plan, ModelConfig):
        return _cut_transformer(module, plan, region)
    if sequence:
        raise ValueError("sequence parallelism changes what lies between layers, which a plan cannot: leave it off.")
    return cut_by_plan(module, plan, region)


def _cut_transformer(module: nn.Module, config: ModelConfig, region: Region) -> nn.Module:
    group = region.group
    check_heads(config, group.world_size)
    blocks = getattr(module, "blocks", ())
    blocks = list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)
    embedding, head = getattr(module, "embedding", None), getattr(module, "head", None)
    if not blocks and embedding is None and head is None:
        raise ValueError(
            f"{type(module).__name__} has no blocks, embedding or head of a Transformer, so nothing would be cut: pass "
            "a plan, as in tensor_parallel(module, LLAMA, group)."
        )
    for block in blocks:
        mlp, of_mlp = block.mlp, region
        if isinstance(mlp, MoE):
            cut_experts(mlp, region)
            mlp, of_mlp = mlp.shared, Region(group)
        for layer, columns, row_name, around in (
            (block.attention, ("q_proj", "k_proj", "v_proj"), "o_proj", region),
            (mlp, ("gate_proj", "up_proj"), "down_proj", of_mlp),
        ):
            if layer is None:
                continue
            for name in columns:
                part = part_of(config, f"{name}.weight", group.rank, group.world_size)
                setattr(layer, name, ColumnParallelLinear.cut(getattr(layer, name), around, part))
            setattr(layer, row_name, RowParallelLinear.cut(getattr(layer, row_name), around))
            layer.linears = fused_column_linears
    if embedding is not None:
        module.embedding = VocabParallelEmbedding.cut(embedding, region)
    if head is not None:
        module.head = ColumnParallelLinear.cut(head, region)
    whole_vocabulary = {"region": region, "vocab_size": config.vocab_size}
    module.head_loss = partial(linear_vocab_parallel_cross_entropy_sums, **whole_vocabulary)
    module.head_logits = partial(vocab_parallel_logits, **whole_vocabulary)
    module.distil_loss = partial(vocab_parallel_distillation_sums, group=group, vocab_size=config.vocab_size)
    module.draw = partial(initial_part, group=group)
    module.sequence_shards = group.world_size if region.sequence else 1
    return module


def initial_part(config: ModelConfig, name: str, shape: Sequence[int], seed: int, *, group: Group) -> Tensor:
    """This rank's part of `initial(config, name, ...)`, which is asked for the whole, whatever `shape` says."""
    if name not in whole_shapes(config):  # a buffer, which is the same everywhere
        return initial(config, name, tuple(shape), seed)
    placement = placement_of(config, name, group.rank, group.world_size)
    return placement.cut(initial(config, name, tuple(placement.shape), seed))
