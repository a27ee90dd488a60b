"""What is gathered, freed and reduced together, in which order, and how a module is divided into it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minillm.parallel.fsdp.flat_param import Flat, Initialize, Owned

LOOK_UPS = ("EmbeddingBackward0", "torch::autograd::AccumulateGrad", "AddBackward0", "ToCopyBackward0")


@dataclass
class Held:
    """A receipt: the units whose full parameters this rank has memory for, and the most there ever were."""

    units: list[str] = field(default_factory=list)
    bytes: int = 0
    peak_units: int = 0
    peak_bytes: int = 0

    def take(self, name: str, num_bytes: int) -> None:
        self.units.append(name)
        self.bytes += num_bytes
        self.peak_units, self.peak_bytes = max(self.peak_units, len(self.units)), max(self.peak_bytes, self.bytes)

    def give_back(self, name: str, num_bytes: int) -> None:
        self.units.remove(name)
        self.bytes -= num_bytes


class Unit:
    """What is gathered, freed and reduced together: one flat parameter per dtype, frozen weights apart."""

    def __init__(self, name: str, members: Iterable[Owned], held: Held, make: Callable[[str, list[Owned]], Flat]):
        self.name, self.held, self.is_held = name, held, False
        kinds: dict[tuple, list[Owned]] = {}
        for owned in members:
            kinds.setdefault((owned.parameter.dtype, owned.parameter.requires_grad), []).append(owned)
        self.flats = [make(f"{name}.{index}", kind) for index, kind in enumerate(kinds.values())]
        self.trained = [flat for flat in self.flats if flat.trained]
        self.nbytes = sum(flat.nbytes for flat in self.flats)

    def gather(self) -> None:
        """Starts it, unless the unit is held; `wait` ends it."""
        if not self.is_held:
            self.is_held = True
            self.held.take(self.name, self.nbytes)
            for flat in self.flats:
                flat.start_gather()

    def wait(self) -> None:
        self.gather()
        for flat in self.flats:
            flat.finish_gather()

    def free(self) -> None:
        if self.is_held:
            self.wait()
            for flat in self.flats:
                flat.free()
            self.is_held = False
            self.held.give_back(self.name, self.nbytes)


class Walk:
    """The units in the order in which every rank gathers them, and where this rank stands.

    prefetch: how many are gathered ahead. leave: what becomes of a unit when it goes on to the next.
    """

    def __init__(self, order: Sequence[Unit], prefetch: int, leave: Callable[[Unit], None], backward: bool = False):
        self.order, self.prefetch, self.leave, self.backward, self.position = order, prefetch, leave, backward, 0
        self._gather()

    @property
    def unit(self) -> Unit:
        return self.order[self.position]

    def to(self, unit: Unit) -> None:
        """Goes on to `unit`, through all that lie before it, and waits until it is gathered."""
        if unit not in self.order[self.position :]:
            raise ValueError(
                f"{unit.name} runs after {self.unit.name}: blocks run in the order they were given, each once per pass;"
                " name one block that holds those which repeat."
            )
        while self.unit is not unit:
            self._advance()
        self.wait()

    def to_end(self) -> None:
        while self.position < len(self.order) - 1:
            self._advance()
        self.wait()

    def wait(self) -> None:
        self.unit.wait()

    def _advance(self) -> None:
        self.leave(self.unit)
        self.position += 1
        self._gather()

    def _gather(self) -> None:
        for unit in self.order[self.position : self.position + self.prefetch + 1]:
            unit.gather()


def choose(module: nn.Module, blocks: Sequence[str | nn.Module] | None) -> dict[str, nn.Module]:
    """name -> block, for blocks given by name or as modules; None means each of module.blocks."""
    if blocks is None:
        if not hasattr(module, "blocks"):
            raise ValueError(f"{type(module).__name__} has no .blocks: name what to shard by, blocks=['layer1', ...].")
        blocks = list(module.blocks)
    modules = dict(module.named_modules())
    names = {inner: name for name, inner in modules.items()}
    chosen = {}
    for block in blocks:
        name = block if isinstance(block, str) else names.get(block)
        if name not in modules or modules[name] is module:
            raise ValueError(f"block {block!r} is no part of the {type(module).__name__}: use module.named_modules().")
        chosen[name] = modules[name]
    return chosen


def divide(chosen: dict[str, nn.Module], everything: Sequence[Owned], device: torch.device) -> list[list[Owned]]:
    """The parameters of each block, and last those of the rest."""
    place = {inner: index for index, block in enumerate(chosen.values()) for inner in reversed([*block.modules()])}
    members: list[list[Owned]] = [[] for _ in range(len(chosen) + 1)]
    for owned in everything:
        where = {place.get(owner, len(chosen)) for owner, _ in owned.owners}
        if len(where) > 1:
            raise ValueError(f"{' and '.join(owned.names)} are tied but lie in different blocks: make those one block.")
        kind = owned.parameter.device.type
        if kind not in ("meta", device.type):
            raise ValueError(f"{owned.names[0]} is on {kind}, the group on {device.type}: move the module there first.")
        members[where.pop()].append(owned)
    for name, owned in zip(chosen, members, strict=False):
        if not owned:
            raise ValueError(f"block {name} has no parameters of its own: leave it out, or do not name a block twice.")
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


def reads_weights(tensors: Iterable[Tensor]) -> bool:
    """Whether what computed these tensors may need weights for its backward: all but look-ups in embeddings may."""
    seen = nodes = {x.grad_fn for x in tensors if x.grad_fn is not None}
    while nodes:
        if any(node.name() not in LOOK_UPS for node in nodes):
            return True
        nodes = {following for node in nodes for following, _ in node.next_functions if following} - seen
        seen = seen | nodes
    return False
