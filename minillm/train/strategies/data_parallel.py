"""Replicas that average their gradients: `parallel/data_parallel` for the training loop."""

import contextlib
from collections.abc import Callable

from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.data_parallel.ddp import BucketedDDP, _Replicated
from minillm.parallel.sharding.optimizer_state import MakeOptimizer
from minillm.train.optimizer import Updater
from minillm.train.strategies.single_device import SingleDevice


class DataParallel(SingleDevice):
    """Data parallelism for the training loop. wrap_with: one of the forms above, with its options."""

    def __init__(self, group: Group, wrap_with: Callable[[nn.Module, Group], _Replicated] = BucketedDDP) -> None:
        self.group, self.rank, self.world_size, self.wrap_with = group, group.rank, group.world_size, wrap_with

    def wrap(self, model: nn.Module, master: bool = False) -> nn.Module:
        self.model, self.module = model, self.wrap_with(model, self.group)
        return self.module

    def updater(self, module: nn.Module, make: MakeOptimizer, master: bool = False) -> Updater:
        return super().updater(self.module.module, make, master)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else self.module.no_sync()

    def finish_backward(self) -> None:
        self.module.finish()

    def sum(self, value: Tensor) -> Tensor:
        return self.group.all_reduce(value.detach().clone())
