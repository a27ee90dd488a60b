"""Training steps of a layout, as rank programs for the pretended node: does a step wait, does its memory grow?"""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from minillm.comm import Group
from minillm.equivalence.cases import Case
from minillm.equivalence.oracle import _backward, _freeze, _sgd
from minillm.model import dense
from minillm.parallel.sharding.placement import clip_, gradients_of
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from tests.engine.node import streams
from tests.engine.node.races import NodeError

WARM_UP = 2


def steps(group: Group, layout: ParallelConfig, case: Case, *allowed: str, strict: bool = True) -> dict[str, Any]:
    """Two steps without a host wait, apart from `allowed` callers, after some to warm up; counts of the last one.

    NodeError if the bytes alive grow from one step to the next. strict: False only counts.
    """
    node = streams.NODE
    with make_strategy(group, layout) as strategy:
        model = strategy.build(case.config, seed=0, dtype=torch.float64, attention=dense, device=group.device)
        batch = case.batch.to(group.device)
        _freeze(model.named_parameters(), case.frozen)
        module = strategy.wrap(model)
        updater = strategy.updater(module, partial(_sgd, lr=0.1))

        def step() -> None:
            _backward(strategy, module, batch, layout.accumulate)
            updater.prepare_gradients()
            norm = strategy.grad_norm(updater.parameters)
            clip_(gradients_of(updater.parameters), norm, case.max_grad_norm)
            updater.step()
            updater.zero_grad()

        for _ in range(WARM_UP):
            step()
        alive = node.memory.alive[group.device]
        for _ in range(2):
            node.counting.clear()
            with node.without_waits(*allowed) if strict else nullcontext():
                step()
            if (now := node.memory.alive[group.device]) > alive and strict:
                raise NodeError(f"memory grows: {now - alive} bytes more are alive after a step than after the one before")
            grown, alive = now - alive, now
        waits = Counter(map(str, node.counting.waits))
        return {"launches": node.counting.launches.total(), "waits": dict(waits), "grown": grown}
