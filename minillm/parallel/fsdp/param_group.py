"""What is unsharded, resharded and reduced together, and in which order."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from minillm.parallel.fsdp.flat_param import FlatParam, ParamInfo
from minillm.parallel.slices import Sharding

LOOK_UPS = ("EmbeddingBackward0", "torch::autograd::AccumulateGrad", "AddBackward0", "ToCopyBackward0")
REST = "rest"  # the group of all parameters outside of blocks


@dataclass
class UnshardStats:
    """A receipt: the groups whose full parameters this rank has memory for, and the most there ever were."""

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
    ranks share apart. how: see `FlatParam`."""

    def __init__(
        self, name: str, members: Iterable[ParamInfo], stats: UnshardStats, sharding: Sharding, **how: Any
    ) -> None:
        self.name, self.stats, self.is_unsharded = name, stats, False
        members = list(members)
        self.owners = [owner for info in members for owner, _ in info.owners]
        kinds: dict[tuple, list[ParamInfo]] = {}
        for info in members:
            kind = info.parameter.dtype, info.parameter.requires_grad, sharding.apart.get(info.names[0])
            kinds.setdefault(kind, []).append(info)
        alike = [(f"{name}.{index}", infos) for index, infos in enumerate(kinds.values())]
        self.flats = [FlatParam(key, infos, sharding.of(infos[0].names[0]), **how) for key, infos in alike]
        self.trained = [flat for flat in self.flats if flat.is_trained]
        self.nbytes = sum(flat.nbytes for flat in self.flats)

    def unshard(self) -> None:
        """Starts it, unless that is done; `wait` ends it."""
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
