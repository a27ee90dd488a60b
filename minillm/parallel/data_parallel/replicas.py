"""What holds around a reduction: every rank has the same model, buffers stay the same, gradients have one owner.

replicate                  before training, every rank gets rank 0's values; models that differ in more are refused
BufferSync                 before a forward pass, every rank gets rank 0's statistics of BatchNorm
remove_previous_reducers   of two wrappers around the same parameters, the later one reduces their gradients
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minillm.comm import Group


def replicate(module: nn.Module, group: Group, gradient_groups: Mapping[str, Group] | None = None) -> None:
    """Makes every rank's parameters and buffers equal to rank 0's. ValueError, on every rank, if models differ in more
    than values, or are not on the group's device, or if another wrapper has them that cannot be taken off; in a later
    forward pass, if torch's DDP has been put around the module.
    gradient_groups: those that other groups hold, by name: they become equal to the first rank's of these."""
    check_plain(module)
    _check_devices(module, group)
    check_same(_tensors(module), group)
    module.register_forward_pre_hook(OutsideTorchDDP([p for p in module.parameters() if p.requires_grad]))
    for name, tensor in _tensors(module):
        (gradient_groups or {}).get(name, group).broadcast(tensor.detach())


def check_plain(module: nn.Module) -> None:
    """ValueError if torch's DDP reduces the module's gradients, or its parameters are slices of a FullyShard."""
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in module.modules()):
        raise ValueError("torch's DistributedDataParallel reduces these gradients already: wrap its .module instead.")
    if any(hasattr(parameter, "whole_shape") for parameter in module.parameters()):
        raise ValueError("these parameters are sharded already: wrap the plain module, once.")


def check_outside_torch_ddp(parameters: Iterable[Tensor]) -> None:
    """ValueError in a forward pass of torch's DDP that reduces some of these parameters' gradients as well. It may have
    been put around the module after ours, and leaves no other trace (`accelerate.prepare(model, optimizer)`)."""
    around = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if around is None:
        return
    reduced = {id(parameter) for parameter in getattr(around, "_module_parameters", around.parameters())}
    if any(id(parameter) in reduced for parameter in parameters):
        raise ValueError(
            "torch's DistributedDataParallel reduces these gradients as well: call its .module, which reduces its own, "
            "and do not prepare or wrap it again."
        )


class OutsideTorchDDP:
    """A forward pre-hook that checks it. A copy of the module is checked for nothing."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters

    def __call__(self, *_: Any) -> None:
        check_outside_torch_ddp(self.parameters)

    def __reduce__(self) -> Any:
        return OutsideTorchDDP, ((),)


class BufferSync:
    """Before a forward pass that follows one in training mode, every rank gets rank 0's saved buffers (statistics of
    BatchNorm), as with torch's DDP. Tables that are not saved never change, nor do the buffers of a module that says
    `buffers_are_constant`. is_on: False to send nothing."""

    def __init__(self, module: nn.Module, group: Group, is_on: Callable[[], bool] = lambda: True) -> None:
        saved = module.state_dict(keep_vars=True)
        constant = {
            id(buffer)
            for each in module.modules()
            if getattr(each, "buffers_are_constant", False)
            for buffer in each.buffers()
        }
        unique = {id(b): name for name, b in module.named_buffers() if name in saved and id(b) not in constant}
        self.module, self.group, self.is_on, self.names = module, group, is_on, list(unique.values())
        self.may_differ = False
        if self.names:
            module.register_forward_pre_hook(self._before_forward)

    @torch.no_grad()
    def _before_forward(self, *_: Any) -> None:
        if self.may_differ and self.is_on():
            buffers = [self.module.get_buffer(name) for name in self.names]
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
                alike = [buffer for buffer in buffers if buffer.dtype == dtype]
                flat = self.group.broadcast(torch.cat([buffer.reshape(-1) for buffer in alike]))
                parts = flat.split([buffer.numel() for buffer in alike])
                views = [part.view_as(buffer) for part, buffer in zip(parts, alike, strict=True)]
                torch._foreach_copy_(alike, views)
            self.may_differ = False
        self.may_differ = self.may_differ or self.module.training

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module belongs to no group


def remove_previous_reducers(names: Mapping[nn.Parameter, str]) -> None:
    """Ends the Reducers that these parameters have: two owners would both reduce the same .grad."""
    for earlier in {p._reducer for p in names if getattr(p, "_reducer", None)}:
        if others := [name for p, name in earlier.names.items() if p not in names]:
            raise ValueError(
                f"{others[0]} is reduced by an earlier wrapper, which would end: wrap all of its parameters again."
            )
        earlier.close()


def no_gradient(names: Sequence[str], rank: int, group: Group) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"no gradient on rank {rank} of group {group.name!r} for {', '.join(names[:5])}{more}: use find_unused=True, "
        "or freeze what never takes part before wrapping"
    )


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _check_devices(module: nn.Module, group: Group) -> None:
    first: dict[torch.device, str] = {}
    for name, tensor in _tensors(module):
        first.setdefault(tensor.device, name)
    if len(first) > 1 or {device.type for device in first} - {group.device.type}:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ValueError(f"group {group.name!r} is on {group.device}, but {places}: move the module there with .to()")


def check_same(named: Iterable[tuple[str, Tensor]], group: Group) -> None:
    """ValueError, on every rank, that names the first tensor in which a rank's model differs from rank 0's."""
    own = [f"{name} {list(t.shape)} {t.dtype}{'' if t.requires_grad else ' frozen'}" for name, t in named]
    first, *others = group.gather_objects(own)
    for rank, theirs in enumerate(others, start=1):
        for expected, found in itertools.zip_longest(first, theirs, fillvalue="nothing"):
            if expected != found:
                raise ValueError(
                    f"the model of rank {rank} has {found} where rank 0 has {expected}: build the same on every rank"
                )
