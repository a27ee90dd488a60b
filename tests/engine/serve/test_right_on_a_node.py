"""What an engine on one GPU of several has to get right, shown without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from minillm.model import ModelConfig, Transformer
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.serve import LLM

CONFIG = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=48, init_std=0.2)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_part_of_a_model_is_refused(rank):
    group = SimpleNamespace(rank=rank, world_size=2, device=torch.device("cpu"))
    part = tensor_parallel(Transformer(CONFIG, seed=3), CONFIG, group)
    with pytest.raises(ValueError, match="1 of 2 key and value heads, 25 of 50 embedding rows"):
        LLM(part)


def test_a_context_parallel_model_is_refused():
    model = Transformer(CONFIG, seed=3)
    model.positions_of = lambda seq: torch.arange(seq)
    with pytest.raises(ValueError, match="one rank's part of a split"):
        LLM(model)
