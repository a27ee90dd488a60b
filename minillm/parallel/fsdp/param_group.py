"""How a module is divided into groups of parameters, and in which order these are unsharded and resharded."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minillm.model.parts import blocks_of
from minillm.parallel.fsdp.flat_param import FlatParam, ParamInfo
from minillm.parallel.sharding.slices import Initialize, ShardSettings

LOOK_UPS = ("EmbeddingBackward0", "torch::autograd::AccumulateGrad", "AddBackward0", "ToCopyBackward0")
REST = "rest"  # the group of all parameters outside of blocks


@dataclass
class UnshardStats:
    """Which groups' full parameters this rank has memory for, and the most there ever were."""

    groups: list[str] = field(default_factory=list)
    bytes: int = 0
    peak_groups: int = 0
    peak_bytes: int = 0

    def add(self, name: str, num_bytes: int) -> None:
        self.groups.append(name)
        self.bytes += num_bytes
        self.peak_groups = max(self.peak_groups, len(self.groups))
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def remove(self, name: str, num_bytes: int) -> None:
        self.groups.remove(name)
        self.bytes -= num_bytes


class ParamGroup:
    """What is unsharded, resharded and reduced together: one flat parameter per dtype, frozen weights and what other
    ranks share apart."""

    def __init__(self, name: str, members: Iterable[ParamInfo], stats: UnshardStats, settings: ShardSettings) -> None:
        self.name, self.stats, self.is_unsharded = name, stats, False
        members = list(members)
        self.owners = [owner for info in members for owner, _ in info.owners]
        kinds: dict[tuple, list[ParamInfo]] = {}
        for info in members:
            kind = info.parameter.dtype, info.parameter.requires_grad, settings.gradient_groups.get(info.names[0])
            kinds.setdefault(kind, []).append(info)
        alike = [(f"{name}.{index}", infos) for index, infos in enumerate(kinds.values())]
        self.flats = [FlatParam(key, infos, settings.of(infos[0].names[0])) for key, infos in alike]
        self.trained = [flat for flat in self.flats if flat.is_trained]
        self.nbytes = sum(flat.nbytes for flat in self.flats)

    def unshard(self) -> None:
        """Starts the all-gather, unless the weights are there or on their way; `wait` completes it."""
        if not self.is_unsharded:
            self.is_unsharded = True
            self.stats.add(self.name, self.nbytes)
            for flat in self.flats:
                flat.start_unshard()

    def wait(self) -> None:
        self.unshard()
        for flat in self.flats:
            flat.finish_unshard()

    def reshard(self) -> None:
        if self.is_unsharded:
            self.wait()
            for flat in self.flats:
                flat.reshard()
            self.is_unsharded = False
            self.stats.remove(self.name, self.nbytes)


@torch.no_grad()
def build_groups(
    module: nn.Module,
    blocks: Sequence[str | nn.Module] | None,
    everything: Sequence[ParamInfo],
    stats: UnshardStats,
    settings: ShardSettings,
) -> tuple[list[nn.Module], list[ParamGroup], list[ParamGroup]]:
    """The blocks, a group for each, and the group of the rest, if there is any. Buffers become rank 0's."""
    chosen, device = choose(module, blocks), settings.group.device
    *inside, outside = divide(chosen, everything, device)
    pairs = zip(chosen, inside, strict=True)
    groups = [ParamGroup(name, members, stats, settings) for name, members in pairs]
    rest = [ParamGroup(REST, outside, stats, settings)] if outside else []
    materialise_buffers(module, device, settings.initialize)
    for buffer in module.buffers():
        for group in settings.groups:
            group.broadcast(buffer)
    return list(chosen.values()), groups, rest


def choose(module: nn.Module, blocks: Sequence[str | nn.Module] | None) -> dict[str, nn.Module]:
    """name -> block, for blocks given by name or as modules; None means module.blocks, or the longest nn.ModuleList."""
    blocks = _blocks_of(module) if blocks is None else blocks
    modules = dict(module.named_modules())
    names = {inner: name for name, inner in modules.items()}
    chosen: dict[str, nn.Module] = {}
    for block in blocks:
        name = block if isinstance(block, str) else names.get(block)
        if name not in modules or modules[name] is module:
            raise ValueError(
                f"block {block!r} is not a part of the {type(module).__name__}: use module.named_modules()."
            )
        for other, earlier in chosen.items():
            if modules[name] in set(earlier.modules()) or earlier in set(modules[name].modules()):
                raise ValueError(f"blocks {other} and {name} overlap: name only one of them, a block holds no other.")
        chosen[name] = modules[name]
    return chosen


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    if isinstance(getattr(module, "blocks", None), nn.ModuleList | nn.ModuleDict | list):
        return blocks_of(module)
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    inside = {inner for each in lists for inner in each.modules() if inner is not each}
    outer = [each for each in lists if each not in inside and len(each)]
    if not outer:
        raise ValueError(
            f"{type(module).__name__} has no nn.ModuleList to shard by: name its blocks, blocks=['layer1', ...], or "
            "blocks=[] to gather all of it at once."
        )
    return list(max(outer, key=len))


def divide(
    chosen: dict[str, nn.Module], everything: Sequence[ParamInfo], device: torch.device
) -> list[list[ParamInfo]]:
    """The parameters of each block, and last those of the rest."""
    place = {inner: index for index, block in enumerate(chosen.values()) for inner in reversed([*block.modules()])}
    members: list[list[ParamInfo]] = [[] for _ in range(len(chosen) + 1)]
    for info in everything:
        where = {place.get(owner, len(chosen)) for owner, _ in info.owners}
        if len(where) > 1:
            raise ValueError(f"{' and '.join(info.names)} are tied but lie in different blocks: make those one block.")
        kind = info.parameter.device.type
        if kind not in ("meta", device.type):
            raise ValueError(f"{info.names[0]} is on {kind}, the group on {device.type}: move the module there first.")
        members[where.pop()].append(info)
    for name, info in zip(chosen, members, strict=False):
        if not info:
            raise ValueError(f"block {name} has no parameters of its own: leave it out.")
    return members


def materialise_buffers(module: nn.Module, device: torch.device, initialize: Initialize | None) -> None:
    """Buffers on "meta" come to `device`: those that modules make again themselves (see `Rope`), then by name."""
    for prefix, owner in module.named_modules():
        on_meta = [key for key, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        if on_meta and not owner._parameters:
            owner.to_empty(device=device, recurse=False)
        for key in on_meta:
            if owner._buffers[key].is_meta or key not in owner._non_persistent_buffers_set:
                name = f"{prefix}.{key}" if prefix else key
                if initialize is None:
                    raise ValueError(f"buffer {name} is on 'meta': give initialize=lambda name, shape: a tensor.")
                owner._buffers[key] = initialize(name, tuple(owner._buffers[key].shape)).to(device)


class PrefetchOrder:
    """The groups in the order in which every rank unshards them, and where this rank stands.

    prefetch: how many are unsharded ahead. leave: what becomes of a group when this rank goes on to the next.
    """

    def __init__(
        self, order: Sequence[ParamGroup], prefetch: int, leave: Callable[[ParamGroup], None], backward: bool = False
    ) -> None:
        self.order, self.prefetch, self.leave, self.backward, self.position = order, prefetch, leave, backward, 0
        self.used: list[ParamGroup] = []
        self._prefetch()

    @property
    def group(self) -> ParamGroup:
        return self.order[self.position]

    def to(self, group: ParamGroup) -> None:
        """Goes on to `group`, through all that lie before it, and waits until it is unsharded."""
        if group not in self.order[self.position :]:
            raise ValueError(self._why_not(group))
        while self.group is not group:
            self._advance()
        self.used.append(group)
        self.wait()

    def to_end(self) -> None:
        while self.position < len(self.order) - 1:
            self._advance()
        self.wait()

    def wait(self) -> None:
        self.group.wait()

    def _why_not(self, group: ParamGroup) -> str:
        if group in self.used:
            return f"{group.name} runs twice in one pass: name one block that holds all that repeats."
        blocks = [each for each in self.order if each.name != REST]
        if not self.used or (self.group.name == REST and blocks[-1] not in self.used):
            return (
                f"parameters outside of the blocks are used between two of them, before {group.name}: name the modules "
                "that have them among the blocks, in the order they run."
            )
        return f"{group.name} runs after {self.used[-1].name}: name the blocks in the order they run."

    def _advance(self) -> None:
        self.leave(self.group)
        self.position += 1
        self._prefetch()

    def _prefetch(self) -> None:
        for group in self.order[self.position : self.position + self.prefetch + 1]:
            group.unshard()


def reads_weights(tensors: Iterable[Tensor]) -> bool:
    """Whether what computed these tensors may need weights for its backward: all but look-ups in embeddings may."""
    seen = nodes = {x.grad_fn for x in tensors if x.grad_fn is not None}
    while nodes:
        if any(node.name() not in LOOK_UPS for node in nodes):
            return True
        nodes = {following for node in nodes for following, _ in node.next_functions if following} - seen
        seen = seen | nodes
    return False
