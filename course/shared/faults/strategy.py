"""A training strategy with patches planted on every rank, as `minillm.equivalence.compare` takes one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course.shared.faults.patches import Patch, planted
from minillm.comm import Group
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import Hybrid, make_strategy


@dataclass(frozen=True)
class PlantedStrategy:
    """Makes strategies with patches planted until they are closed. make: of the strategy without them."""

    patches: tuple[Patch, ...]
    make: Callable[[Group, ParallelConfig], Any] = make_strategy

    def __call__(self, group: Group, layout: ParallelConfig) -> Hybrid:
        around = planted(self.patches)
        around.__enter__()
        strategy = self.make(group, layout)
        close = strategy.close

        def close_and_restore() -> None:
            close()
            around.__exit__(None, None, None)

        strategy.close = close_and_restore
        return strategy
