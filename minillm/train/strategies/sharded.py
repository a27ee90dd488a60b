"""The strategies of the training loop: replicas, sharded optimizer state and gradients, sharded everything.

    strategy              module that runs      what a rank steps           mechanism
    DataParallel          BucketedDDP           everything                  parallel/data_parallel
    ShardedStates         the model itself      1/N, then all-gather        parallel/zero (stages 1 and 2)
    ShardedModel          FullyShard            its 1/N                     parallel/fsdp (stage 3)
    Hybrid                a split model         its parts, or 1/N of them   hybrid.py (tp, pp, cp, ep, HSDP, any stage)

Each has the methods of `SingleDevice`, which says what they mean.
"""

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.model.initialise import initial
from minillm.parallel.fsdp.fully_shard import FullyShard
from minillm.parallel.fsdp.state import FullyShardOptimizer
from minillm.parallel.sharding.optimizer_state import MakeOptimizer
from minillm.parallel.sharding.placement import Placement, global_norm, gradients_of
from minillm.parallel.zero.optimizer import ZeroOptimizer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.data_parallel import DataParallel
from minillm.train.strategies.hybrid import Hybrid
from minillm.train.strategies.single_device import SingleDevice


class Sharded(DataParallel):
    """What every ZeRO stage changes: gradients are read from this rank's shards."""

    def __init__(self, group: Group, offload: str | Path | None = None):
        super().__init__(group)
        self.offload = offload

    def finish_backward(self) -> None:
        """Backward ends with it, or `prepare_gradients` begins with it."""

    def grad_norm(self, parameters: list[Tensor]) -> Tensor:
        return global_norm(dict(enumerate(gradients_of(parameters))), None, self.group)


class ShardedStates(Sharded):
    """ZeRO stages 1 and 2."""

    def __init__(self, group: Group, stage: int, offload: str | Path | None = None):
        super().__init__(group, offload)
        self.stage = stage

    def wrap(self, model: nn.Module, master: bool = False) -> nn.Module:
        self.model = model
        return model

    def updater(self, module: nn.Module, make: MakeOptimizer, master: bool = False) -> ZeroOptimizer:
        self.zero = ZeroOptimizer(module, self.group, self.stage, make=make, master=master, offload=self.offload)
        return self.zero

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else self.zero.no_sync()

    def gradients(self) -> dict[str, Tensor]:
        return self.zero.full_gradients()


class ShardedModel(Sharded):
    """ZeRO stage 3. The model is built on "meta": no rank ever holds all of it."""

    def build(self, config: ModelConfig, *, seed: int, dtype: torch.dtype | None = None, **how: Any) -> Transformer:
        self.initialize = partial(initial, config, seed=seed)
        return Transformer(config, **how | {"device": "meta", "dtype": dtype})

    def wrap(self, model: nn.Module, master: bool = False) -> nn.Module:
        how = {"master": master, "offload": self.offload, "initialize": self.initialize}
        self.model = model
        self.module = FullyShard(model, self.group, **how)
        return self.module

    def updater(self, module: nn.Module, make: MakeOptimizer, master: bool = False) -> FullyShardOptimizer:
        return self.module.optimizer(make)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        return self.module.no_sync()

    def gradients(self) -> dict[str, Tensor]:
        return self.module.full_gradients()

    def weights(self) -> dict[str, Tensor]:
        whole = self.module.full_state_dict()
        return {name: whole[name] for name, _ in self.module.named_parameters()}

    def parts(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    @property
    def weight_placements(self) -> Mapping[str, Placement]:
        return self.module.placements

    def full_state_dict(self) -> dict[str, Any]:
        return self.module.full_state_dict()

    def sharded_state_dict(self) -> dict[str, Any]:
        return self.module.sharded_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


def make_strategy(group: Group, layout: ParallelConfig, offload: str | None = None) -> SingleDevice:
    """The strategy of a layout. offload: where ZeRO's shards live, "cpu" or a folder."""
    home = offload if offload in (None, "cpu") else Path(offload)
    if layout.is_hybrid or layout.dp_replicate > 1:
        if offload:
            raise ValueError(f"offload {offload} is for ZeRO alone: leave it out with tp, pp, cp, ep and dp_replicate.")
        return Hybrid(group, layout)
    if layout.zero == 0:
        return DataParallel(group)
    return ShardedModel(group, home) if layout.zero == 3 else ShardedStates(group, layout.zero, home)
