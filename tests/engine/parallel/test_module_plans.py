"""Tensor parallelism of other people's modules by a plan: transformers' models against one process in float64."""

import pytest
import torch
from torch import nn

from minillm.comm import launch
from minillm.measure import ledger
from minillm.model import ModelConfig
from minillm.parallel.sharding.placement import Shard
from minillm.parallel.tensor_parallel.module_plans import LLAMA, column, row
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel

KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")


def model_of(kind, tied=False):
    import transformers

    how = dict(vocab_size=51, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8)
    how |= dict(num_key_value_heads=4, head_dim=4, max_position_embeddings=32, tie_word_embeddings=tied)
    config = getattr(transformers, f"{kind}Config")(**how, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for module in list(model.modules()):  # transformers' RMSNorm computes in float32 whatever its input
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def against_one_process(group):
    """(kind, tied) -> largest relative errors of logits and of a gradient, and all-reduces of [batch, seq, hidden]."""
    torch.set_num_threads(1)
    tokens = torch.randint(51, (2, 7), generator=torch.Generator().manual_seed(1))
    found = {}
    for kind, tied in [(kind, False) for kind in KINDS] + [("Llama", True), ("Qwen3", True)]:
        alone, cut = model_of(kind, tied), tensor_parallel(model_of(kind, tied), LLAMA, group)
        expected = alone(tokens, labels=tokens)
        expected.loss.backward()
        with ledger() as led:
            got = cut(tokens, labels=tokens)
        got.loss.backward()
        whole = dict(alone.named_parameters())
        errors = {"logits": (got.logits - expected.logits).abs().max().item()}
        for name, parameter in cut.named_parameters():
            right = whole[name].grad
            dim = next((d for d in (0, 1) if d < right.dim() and parameter.shape[d] != right.shape[d]), None)
            part = right if dim is None else Shard(dim, group.rank, group.world_size).cut(right)
            errors[name] = ((parameter.grad - part).norm() / right.norm()).item()
        assert dict(cut.named_parameters()).keys() == whole.keys()
        assert sum(p.numel() for p in cut.parameters()) < 0.7 * sum(p.numel() for p in alone.parameters())
        assert (cut.lm_head.weight is cut.model.embed_tokens.weight) == tied
        found[kind, tied] = max(errors.values()), len([e for e in led.select("all_reduce") if len(e.shape) == 3])
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_transformers_models_equal_one_process(world_size):
    pytest.importorskip("transformers")
    for found in launch(against_one_process, world_size):
        for case, (worst, reductions) in found.items():
            assert worst < 1e-10 and reductions == 1 + 2 * 2, case  # embedding; attention and MLP of two layers


class OneOf:
    name, rank, device = "world", 0, torch.device("cpu")

    def __init__(self, world_size):
        self.world_size = world_size


class Attention(nn.Module):
    head_dim = 4

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(12, 12)


@pytest.mark.parametrize(
    ("module", "plan", "ranks", "says"),
    [
        (nn.Sequential(nn.Linear(4, 4)), LLAMA, 2, "the plan cuts nothing of Sequential"),
        (nn.Sequential(nn.Linear(4, 4)), ModelConfig(8, 8, 8, 1, 2), 2, "nothing would be cut: pass a plan"),
        (nn.Sequential(nn.Linear(4, 6)), {"0": column}, 4, "0 has 6 outputs, which do not divide over 4"),
        (nn.Sequential(nn.Linear(3, 4)), {"0": row}, 2, "0 has 3 inputs, which do not divide over 2"),
        (Attention(), {"q_proj": column}, 2, "q_proj has 3 heads, which do not divide over 2"),
        (nn.Sequential(nn.ReLU()), {"0": column}, 2, "0 is a ReLU, but the plan cuts it as nn.Linear"),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(module, plan, ranks, says):
    with pytest.raises(ValueError, match=says) as error:
        tensor_parallel(module, plan, OneOf(ranks))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="sequence parallelism changes what lies between layers"):
        tensor_parallel(nn.Sequential(nn.Linear(4, 4)), {"0": column}, OneOf(2), sequence=True)
