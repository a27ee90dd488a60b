"""Plans for modules that are not minillm's: module name pattern -> how it is cut.

    tensor_parallel(LlamaForCausalLM(config), LLAMA, group)
    tensor_parallel(model, {"*.fc1": column, "*.fc2": row}, group)

A pair of linear layers becomes `column`, `row`; `vocabulary` cuts embeddings and heads. Every layer takes and returns
what it did, or a rank's share of it between a pair, and all gradients are complete after backward.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.sharding.placement import Part, Shard
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minillm.parallel.tensor_parallel.regions import Region
from minillm.parallel.tensor_parallel.vocab import VocabParallelEmbedding

Cut = Callable[[nn.Module, Region], nn.Module]
Plan = Mapping[str, Cut]


def column(layer: nn.Linear, region: Region) -> nn.Module:
    """Each rank computes its share of the outputs: the first layer of a pair."""
    return ColumnParallelLinear.cut(layer, region)


def row(layer: nn.Linear, region: Region) -> nn.Module:
    """Each rank reads its share of the inputs, and the results are summed: the second layer of a pair."""
    return RowParallelLinear.cut(layer, region)


def vocabulary(layer: nn.Module, region: Region) -> nn.Module:
    """Each rank has some of the words, of an nn.Embedding or a head, whose logits are gathered; padded with zeros."""
    return (VocabParallelEmbedding if isinstance(layer, nn.Embedding) else VocabParallelLinear).cut(layer, region)


def summed(layer: nn.Module, region: Region) -> nn.Module:
    """Every rank has all of it, inside a region, so that its gradients are shares: the norm of a rank's own heads."""
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient: region.group.all_reduce(gradient.contiguous().clone()))
    return layer


LLAMA: Plan = {  # transformers' Llama, Mistral, Qwen2 and Qwen3
    "*embed_tokens": vocabulary,
    "*.self_attn.[qkv]_proj": column,
    "*.self_attn.[qk]_norm": summed,
    "*.self_attn.o_proj": row,
    "*.mlp.gate_proj": column,
    "*.mlp.up_proj": column,
    "*.mlp.down_proj": row,
    "lm_head": vocabulary,
}


def cut_by_plan(module: nn.Module, plan: Plan, region: Region) -> nn.Module:
    """See `tensor_parallel`. Of several patterns that match a module the first counts; tied parameters stay one."""
    chosen = {}
    for name, layer in module.named_modules():
        cut = next((cut for pattern, cut in plan.items() if fnmatchcase(name, pattern)), None)
        if cut:
            if cut in (column, row):
                _check_linear(name, layer, cut, module.get_submodule(name.rpartition(".")[0]), region)
            chosen[name] = cut
    if not chosen:
        raise ValueError(
            f"the plan cuts nothing of {type(module).__name__}: none of its modules is named {' or '.join(plan)}; give "
            "patterns of the names in module.named_modules()."
        )
    cut_before: dict[nn.Parameter, nn.Parameter] = {}
    for name, cut in chosen.items():
        whole = module.get_submodule(name)
        layer = cut(whole, region)
        for key, parameter in whole._parameters.items():
            if parameter is not None:
                layer._parameters[key] = cut_before.setdefault(parameter, layer._parameters[key])
        module.set_submodule(name, layer)
    return module


def _check_linear(name: str, layer: nn.Module, cut: Cut, parent: nn.Module, region: Region) -> None:
    """ValueError unless a linear layer divides, by whole heads where its module, attention, has a `head_dim`."""
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{name} is a {type(layer).__name__}, but the plan cuts it as nn.Linear: leave it out.")
    size = layer.out_features if cut is column else layer.in_features
    head_dim = getattr(parent, "head_dim", None)
    count, what = (size // head_dim, "heads") if head_dim else (size, "outputs" if cut is column else "inputs")
    if count % region.group.world_size:
        raise ValueError(
            f"{name} has {count} {what}, which do not divide over {region.group.world_size} tensor-parallel ranks: use "
            "a number of ranks that divides them."
        )


class VocabParallelLinear(ColumnParallelLinear):
    """A head whose logits are gathered: [..., hidden] -> [..., vocab_size] on every rank. weight: as an embedding's."""

    def _take(self, whole: nn.Linear, region: Region, part: Part | None = None) -> None:
        super()._take(whole, region, part)
        self.vocab_size = whole.out_features

    def forward(self, x: Tensor) -> Tensor:
        return gather_words(super().forward(x), self.region.group, self.vocab_size)


def gather_words(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """[..., vocab / world_size] of every rank -> [..., vocab_size] on every rank. Its gradient must be the same on all
    ranks; each takes that of its own words."""
    return _GatherWords.apply(logits, group, vocab_size)


class _GatherWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, group, vocab_size):
        ctx.part = Shard(-1, group.rank, group.world_size)
        rows = group.all_gather(logits.contiguous()[None])
        return rows.movedim(0, -2).flatten(-2)[..., :vocab_size].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.part.cut(gradient).contiguous(), None, None
