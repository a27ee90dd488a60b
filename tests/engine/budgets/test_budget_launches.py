"""Kernels launched for each layer of a Llama and of a Qwen3, which normalises queries and keys, too.

`now` may only shrink. `target` is where it should be: a decoding layer launches at most 16 kernels once norm, rotary
embedding and activation are fused or compiled. Where it is not there yet, the table says by how much.
"""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from minillm.model import ModelConfig, Transformer
from minillm.serve import LLM, SamplingParams
from tests.engine.budgets.launches import as_on_a_gpu, launches, paged_attention

MODELS = {"Llama": {}, "Qwen3": {"qk_norm": True}}
BATCH, LENGTH = 2, 16


@dataclass(frozen=True)
class Budget:
    """Launches per layer. before: when the count was taken first; now: the most that a change may leave."""

    before: int
    now: int
    target: int | None = None


BUDGETS = {
    ("forward", "Llama"): Budget(29, 29),
    ("forward", "Qwen3"): Budget(31, 31),
    ("backward", "Llama"): Budget(45, 45),
    ("backward", "Qwen3"): Budget(47, 47),
    ("decode", "Llama"): Budget(28, 28, target=16),
    ("decode", "Qwen3"): Budget(30, 30, target=16),
}
COMPILED = {"Llama": Budget(15, 15, target=16), "Qwen3": Budget(15, 15, target=16)}


def make(name: str, num_layers: int) -> Transformer:
    return Transformer(ModelConfig(64, 32, 64, num_layers, 4, 2, max_seq_len=64, **MODELS[name]), seed=0)


def forward(name: str, num_layers: int) -> int:
    model, tokens = make(name, num_layers), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return launches(lambda: model(tokens, targets=tokens)).total


def forward_and_backward(name: str, num_layers: int) -> int:
    model, tokens = make(name, num_layers), torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    def step() -> None:
        model.zero_grad()
        model(tokens, targets=tokens)[0].backward()

    return launches(step).total


def decode(name: str, num_layers: int) -> int:
    """A step of three sequences, as an engine on a GPU takes it: query, key and value in one product."""
    llm = LLM(make(name, num_layers), num_blocks=64, block_size=4, backend=paged_attention, fused=True)
    for number in range(3):
        llm.add([number, 1, 2], SamplingParams(max_tokens=40))
    with as_on_a_gpu():
        llm.step()
    return launches(llm.step).total


def per_layer(count, name: str) -> int:
    return count(name, 3) - count(name, 2)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_of_a_training_step(name):
    once = per_layer(forward, name)
    both = per_layer(forward_and_backward, name)
    assert once <= BUDGETS["forward", name].now
    assert both - once <= BUDGETS["backward", name].now


@pytest.mark.parametrize("name", MODELS)
def test_a_decoding_layer(name):
    assert per_layer(decode, name) <= BUDGETS["decode", name].now


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_a_decoding_layer_that_is_compiled(name):
    """What inductor makes of a block, which it compiles once for all layers and numbers of tokens above 1, and what it
    leaves alone: both writes of keys and values, and attention."""
    from torch._inductor import config
    from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler

    kernels, codegen = [], Scheduler.codegen

    def counted(self):
        kernels.extend(node for node in self.nodes if not isinstance(node, NopKernelSchedulerNode))
        return codegen(self)

    torch.compiler.reset()
    with config.patch(force_disable_caches=True), mock.patch.object(Scheduler, "codegen", counted):
        llm = LLM(make(name, 2), num_blocks=64, block_size=4, backend=paged_attention, fused=True, compile=True)
        llm.generate([[1, 2, 3], [4, 5], [6]], SamplingParams(max_tokens=3))
    torch.compiler.reset()
    found = len(kernels) + 2 + 2
    assert 11 <= found <= COMPILED[name].now <= COMPILED[name].target
