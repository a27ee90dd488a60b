"""FullyShard for a pipeline's parts: the runtime says when weights are needed, and gradients are reduced once per step.

                F0        F1        B0        F2        B1   ...                  after the schedule
    weights     gather    gather    gather    gather    gather                    (N-1)/N · P_part each, freed after it
    gradients                       add up in full on this rank                   one reduce-scatter, (N-1)/N · P

A microbatch's forward and its backward lie far apart, with others' between them, so there is no one order of blocks to
prefetch by. Gradients stay whole until the last microbatch, as in torch's pipelining over FSDP2: to reduce each
microbatch's would send all of them once per microbatch. Closed form:
`predict.training.sharding.pipelined_fully_shard_bytes`.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from minillm.parallel.fsdp.fully_shard import FullyShard
from minillm.parallel.fsdp.param_group import ParamGroup


class PipelinedFullyShard(FullyShard):
    """See above. module: all parts that this rank holds, with `blocks`; it is never called itself."""

    def _watch(self, blocks: Sequence[nn.Module], owners: Iterable[nn.Module]) -> None:
        """No hooks: `unsharded` takes their place."""

    @contextlib.contextmanager
    def unsharded(self, groups: Sequence[ParamGroup]) -> Iterator[None]:
        """Inside, the modules of these groups have their whole weights."""
        for group in groups:
            group.unshard()
        for group in groups:
            group.wait()
        try:
            yield
        finally:
            for group in groups:
                group.reshard()

    def groups_of(self, part: nn.Module) -> list[ParamGroup]:
        """The groups that hold parameters of a part, in the order of `groups`, which is the same on all ranks."""
        held = {id(parameter) for parameter in part.parameters()}
        return [
            group
            for group in self.groups
            if any(id(kind) in held for flat in group.flats for p in flat.params for kind in (p.full, p.placeholder))
        ]

    def reduce_gradients(self) -> None:
        """Averages what has added up, into the slices' .grad; a parameter without gradient counts as zero."""
        for group in self.groups:
            self._reduce(group)
        self._settle()
        self._missing = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a pipeline's parts run by `Pipeline`: call its step, not the FullyShard around them.")
