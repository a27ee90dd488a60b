"""How often the host waits for its device, on the pretended node: in a step of `Trainer` and in one of an engine."""

from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from minillm.comm import Group
from minillm.data import Tokens
from minillm.model import ModelConfig, MoEConfig, Transformer
from minillm.serve import LLM, SamplingParams
from minillm.serve.run.model_runner import Runner
from minillm.train import TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from tests.engine.node import streams
from tests.engine.node.node import pretend_node

WARM_UP = 2
DENSE = ModelConfig(64, 32, 64, 4, 4, 4, max_seq_len=32)
EXPERTS = ModelConfig(64, 32, 64, 4, 4, 4, max_seq_len=32, moe=MoEConfig(4, 2, 32))


def training_waits(group: Group, layouts: dict[str, ParallelConfig]) -> dict[str, Counter[str]]:
    """Of each layout, the waits of one step after WARM_UP: "kind at file:line in function" -> how many."""
    found = {}
    for name, layout in layouts.items():
        model = EXPERTS if layout.ep > 1 else DENSE
        config = TrainConfig(model, seq_len=16, batch_size=2, accumulate=layout.accumulate, spike_nats=None)
        tokens = Tokens((np.arange(4000) ** 2 % 64).astype(np.uint16), 64, 0, 1, 4000)
        with (
            make_strategy(group, layout) as parallel,
            Trainer(config, tokens, device=group.device, parallel=parallel, workers=0, time_parts=False) as trainer,
        ):
            for _ in range(WARM_UP):
                trainer.step()
            streams.NODE.counting.clear()
            trainer.step()
            found[name] = Counter(map(str, streams.NODE.counting.waits))
    return found


def no_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, *sizes: Any, window: int | None = None) -> Tensor:
    """A backend that computes nothing: a kernel would not wait either."""
    return q.clone()


def decoding_waits(sequences: int, **params) -> Counter[str]:
    """Of one step in which so many sequences decode."""
    plain = torch.inference_mode(False)(torch.no_grad()(Runner.execute))  # in that mode the node sees none
    with pretend_node() as node, mock.patch.object(Runner, "execute", plain):
        model = Transformer(DENSE, seed=0).to("cuda:0")
        llm = LLM(model, num_blocks=64, block_size=4, backend=no_attention, graphs=False)
        for number in range(sequences):
            llm.add([number, 1, 2], SamplingParams(max_tokens=20, **params))
        for _ in range(1 + WARM_UP):
            errors = [output.error for output in llm.step()]
            assert not errors, errors
        node.counting.clear()
        outputs = llm.step()
        assert not any(output.error for output in outputs) and llm.unfinished
        return Counter(map(str, node.counting.waits))
