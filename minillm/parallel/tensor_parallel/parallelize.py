"""`tensor_parallel(Transformer(config), config, group)`: cuts a model into this rank's part of it, in place.

Every head, word and column goes where it belongs. Ranks share kv heads where there are fewer of them than ranks, and
norms under sequence parallelism, so `placement.sum_partial` has to complete gradients after backward. Torch's
`parallelize_module` cuts other modules.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from minillm.comm import Group
from minillm.model import ModelConfig
from minillm.model.initialise import Draw, initial
from minillm.model.moe import MoE
from minillm.model.parts import blocks_of
from minillm.parallel.tensor_parallel.experts import cut_experts
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, fused_column_linears
from minillm.parallel.tensor_parallel.plan import check_heads, part_of, placement_of, whole_shapes
from minillm.parallel.tensor_parallel.regions import Region
from minillm.parallel.tensor_parallel.vocab import (
    VocabParallelEmbedding,
    linear_vocab_parallel_cross_entropy_sums,
    vocab_parallel_distillation_sums,
    vocab_parallel_logits,
)


def tensor_parallel(
    module: nn.Module, config: ModelConfig, group: Group, *, sequence: bool = False, regather: bool = True
) -> nn.Module:
    """Cuts `module`, whole and the same on every rank (or on "meta"), into this rank's part of it, in place, and
    returns it.

    module: a Transformer or a pipeline's part of one, anything with some of `embedding`, `blocks`, `norm` and `head`.
        Its `logits` then gives this rank's words, and what travels between a pipeline's parts is
        [batch, seq / module.sequence_shards, hidden].
    sequence, regather: sequence parallelism, see `regions.Region`.

    Names stay, so does requires_grad; parameters are new, so make optimizers afterwards. ValueError for a module of
    another kind, heads that do not divide over the ranks, and a module that is cut already.
    """
    if any(isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) for layer in module.modules()):
        raise ValueError("this module is tensor parallel already: cut a whole one.")
    region = Region(group, sequence, regather)
    check_heads(config, group.world_size)
    blocks, embedding, head = blocks_of(module), getattr(module, "embedding", None), getattr(module, "head", None)
    if not blocks and embedding is None and head is None:
        raise ValueError(
            f"{type(module).__name__} has no blocks, embedding or head of a Transformer, so nothing would be cut: use "
            "torch's parallelize_module for other modules."
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
    module.draw = partial(initial_part, group=group, draw=getattr(module, "draw", initial))
    module.sequence_shards = group.world_size if region.sequence else 1
    return module


def initial_part(
    config: ModelConfig, name: str, shape: Sequence[int], seed: int, *, group: Group, draw: Draw = initial
) -> Tensor:
    """This rank's part of what `draw(config, name, ...)` makes, which is asked for the whole, whatever `shape` says."""
    if name not in whole_shapes(config):  # a buffer, which is the same everywhere
        return draw(config, name, tuple(shape), seed)
    placement = placement_of(config, name, group.rank, group.world_size)
    return placement.cut(draw(config, name, tuple(placement.shape), seed))
