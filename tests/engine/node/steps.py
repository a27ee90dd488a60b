"""Training steps of a layout, as rank programs for the pretended node: does a step wait, does its memory grow?"""

import gc
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
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

WARM_UP, STEPS = 1, 3


def steps(group: Group, layout: ParallelConfig, case: Case, *allowed: str, strict: bool = True) -> dict[str, Any]:
    """Some steps without a host wait, apart from `allowed` callers, after one to warm up; counts of the last one.

    NodeError if the bytes alive grow with every step. strict: False only counts.
    """
    node = streams.NODE
    with make_strategy(group, layout) as strategy:
        model = strategy.build(case.config, seed=0, dtype=torch.float64, attention=dense, device=group.device)
        batch = case.batch.to(group.device)
        _freeze(model.named_parameters(), case.frozen)
        module = strategy.wrap(model)
        updater = strategy.updater(
            module, partial(_sgd, lr=0.0)
        )  # every step is the same, down to the tokens of each expert

        def step() -> None:
            _backward(strategy, module, batch, layout.accumulate)
            strategy.prepare_gradients()
            norm = strategy.grad_norm(updater.parameters)
            clip_(gradients_of(updater.parameters), norm, case.max_grad_norm)
            updater.step()
            updater.zero_grad()

        for _ in range(WARM_UP):
            step()
        gc.collect()
        gc.disable()  # memory that waits for the garbage collector counts as kept
        alive = [node.memory.alive[group.device]]
        try:
            for _ in range(STEPS):
                node.counting.clear()
                with node.without_waits(*allowed) if strict else nullcontext():
                    step()
                alive.append(node.memory.alive[group.device])
        finally:
            gc.enable()
        grown = [after - before for before, after in pairwise(alive)]
        if strict and min(grown) > 0:  # a group may keep what its latest operation has used: now and then it is more
            raise NodeError(f"memory grows: {grown} more bytes are alive after each step than after the one before")
        waits = Counter(map(str, node.counting.waits))
        return {"launches": node.counting.launches.total(), "waits": dict(waits), "grown": sum(grown)}
