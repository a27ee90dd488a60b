"""A FullyShard's optimizer, and its weights saved and restored: whole, as one process would have them.

How the optimizer's state becomes whole is in `parallel/sharding/full_state.py`; how runs save what each rank holds, in
`train/checkpoint`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group
from minillm.parallel.fsdp.flat_param import FlatParam, ShardedParam
from minillm.parallel.fsdp.param_group import ParamGroup
from minillm.parallel.sharding.gather import gather
from minillm.parallel.sharding.offload import Offload
from minillm.parallel.sharding.optimizer import MakeOptimizer, SlicedOptimizer
from minillm.parallel.sharding.placement import Placement


class ShardedModule(nn.Module):
    """What torch habits expect of a module of which this rank holds slices, besides forward and backward.

    module: with the names of whole parameters; groups: what is unsharded together; params: by name; home: of slices.
    norm_group: all ranks that hold parts of the model.
    """

    module: nn.Module
    group: Group
    norm_group: Group
    home: Offload
    groups: list[ParamGroup]
    params: dict[str, ShardedParam]

    @property
    def flats(self) -> list[FlatParam]:
        return [flat for group in self.groups for flat in group.flats]

    @property
    def placements(self) -> dict[str, Placement]:
        """Placements of the slices, by name."""
        return {name: param.placement for name, param in self.params.items()}

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator:
        """(name, this rank's slice), by the names and in the order of the module's own parameters."""
        return ((prefix + ("." if prefix else "") + name, param.slice) for name, param in self.params.items())

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """torch's DDP would broadcast rank 0's slices, and buffers without memory. With these names it refuses."""
        return [name for name, _ in (*self.named_parameters(), *self.named_buffers())]

    def no_sync(self) -> contextlib.AbstractContextManager:
        """For loops written for DDP, and without effect: every microbatch is reduced into the shard, because the full
        gradients that could wait are what stage 3 does not hold. Results are the same, the traffic is K-fold."""
        return contextlib.nullcontext()

    def optimizer(self, make: MakeOptimizer) -> SlicedOptimizer:
        """make(named) builds any optimizer of torch's that works element by element; named: this rank's trained slices
        under the names of the whole parameters. Gradients are reduced by then, so each rank steps for itself."""
        slices = {name: part for name, part in self.named_parameters() if part.requires_grad}
        return SlicedOptimizer(make, slices, self.placements, self.norm_group, self.home)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """The module's own, whole, on the CPU of every rank, for any number of ranks; every rank calls it."""
        slices = {name: param.slice.to(param.full.dtype) for name, param in self.params.items()}
        state = {name: tensor.cpu() for name, tensor in self._buffers_saved().items()}
        for first, whole in gather(slices, self.placements, self.norm_group).items():
            if first in self.params:  # with a pipeline, others have more
                state |= dict.fromkeys(self.params[first].names, whole)
        return {name: state[name] for name in self.module.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """What `state_dict` or a plain module's has returned; no communication."""
        self._check_names(state)
        for name, param in self.params.items():
            param.slice.copy_(param.placement.cut(state[name]))
        for name, buffer in self._buffers_saved().items():
            buffer.copy_(state[name])

    def _check_names(self, state: dict[str, Tensor]) -> None:
        shapes = {name: tensor.shape for name, tensor in self.module.state_dict().items()}
        shapes |= {name: param.placement.shape for param in self.params.values() for name in param.names}
        for name in [*shapes, *state]:
            if name not in state or name not in shapes:
                raise ValueError(
                    f"{name} is {'missing in' if name in shapes else 'no part of the module but in'} the state."
                )
            if state[name].shape != shapes[name]:
                raise ValueError(f"{name} is {list(state[name].shape)} in the state, {list(shapes[name])} here.")

    def _buffers_saved(self) -> dict[str, Tensor]:
        """Those that a state has; every rank has them whole."""
        saved = self.module.state_dict()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in saved}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("a FullyShard belongs to this process's group: copy or save its state_dict() instead.")

    def _apply(self, fn: Callable, recurse: bool = True) -> "ShardedModule":
        raise ValueError("a sharded module stays where and what it is: move or cast it before sharding.")
