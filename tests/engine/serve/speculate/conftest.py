"""A tiny target, and proposers on it whose weights are random: they guess badly, but what they say of it must hold."""

import pytest
import torch

from minillm.model import ModelConfig, Transformer
from minillm.serve import SamplingParams
from minillm.serve.speculate.heads import hidden_states
from minillm.serve.speculate.proposal import DraftRequest
from minillm.serve.speculate.proposers.eagle import EagleHead
from minillm.serve.speculate.proposers.early_exit import ExitAdapter
from minillm.serve.speculate.proposers.medusa import MedusaHeads

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}


def tiny(vocab_size=5, seed=0):
    config = ModelConfig(vocab_size, **SIZES, max_seq_len=64, tie_embeddings=True, init_std=0.4)
    return Transformer(config, seed=seed).requires_grad_(False)


def shaken(head, seed=1):
    """The head with weights that make its guesses differ from the target's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head.requires_grad_(False)


@pytest.fixture(scope="session")
def make_target():
    return tiny


@pytest.fixture(scope="session")
def target():
    return tiny()


@pytest.fixture(scope="session")
def trained(target):
    """{kind: head}."""
    return {
        "medusa": shaken(MedusaHeads(target.config, heads=3, layers=1)),
        "eagle": shaken(EagleHead(target.config).initialize(target)),
        "early_exit": shaken(ExitAdapter(target.config, layers=1, width=8).initialize(target)),
    }


@pytest.fixture
def ask():
    def make(tokens, k=3, key="a", temperature=0.0, draw=None, **params):
        draw = draw or torch.Generator().manual_seed(0)
        return DraftRequest(key, list(tokens), SamplingParams(temperature=temperature, **params), k, draw)

    return make


@pytest.fixture(scope="session")
def features(target):
    """tokens -> [tokens, hidden], what the target computes of them."""
    return lambda tokens: hidden_states(target, torch.tensor([tokens]))[-1][0]
