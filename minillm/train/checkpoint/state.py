"""What a checkpoint holds of a trainer: tensors under names that no layout changes, and numbers.

    model/blocks.0.attention.q.weight                  a weight, in the dtype of the model
    master/blocks.0.attention.q.weight                 its float32 copy, where the model has 16-bit weights
    optimizer/exp_avg/blocks.0.attention.q.weight      what the optimizer keeps per element

Each comes with the placement that says which part of it this rank has. What is no tensor goes into the manifest: the
trainer's progress, the optimizer's settings, what it counts per parameter (Adam's `step`). The learning rate is a
function of the step, and the order of the data one of the seed and a position, so neither has state of its own.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.parallel.sharding.optimizer_state import names_by_group, numbered, per_element
from minillm.parallel.sharding.placement import Placement
from minillm.train.checkpoint.manifest import Manifest
from minillm.train.trainer import Trainer


class Holding:
    """What this rank has of a trainer at this moment, whole or in part; no communication.

    tensors: by their names in a checkpoint. Weights in another dtype than the model's are copies.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, updater, dtype = trainer, trainer.updater, trainer.precision.weights
        self._named, state = updater.named(), updater.inner.state
        self._entries = {name: entry for name, part in self._named.items() if (entry := state.get(part))}
        self._kept = per_element(self._entries)
        self.tensors = {_key("model", name): part.to(dtype) for name, part in trainer.parallel.parts().items()}
        self.tensors |= {_key("model", name): buffer for name, buffer in trainer.parallel.buffers().items()}
        kept = ((k, name, v) for name, entry in self._entries.items() for k, v in entry.items() if k in self._kept)
        self._stepped = {_key("optimizer", key, name): (name, tensor) for key, name, tensor in kept}
        if trainer.precision.master:
            masters = updater.sharded_state_dict()["masters"]
            self._stepped |= {_key("master", name): (name, master) for name, master in masters.items()}
        self.tensors |= {key: tensor for key, (_, tensor) in self._stepped.items()}

    def placements(self) -> dict[str, Placement]:
        """Which parts of the whole tensors these are."""
        stepped = _stepped_placements(self.trainer)
        return _model_placements(self.trainer) | {key: stepped[name] for key, (name, _) in self._stepped.items()}

    def optimizer_numbers(self) -> Callable[[], dict[str, Any]]:
        """The optimizer's settings and parameters by group, and what it counts for the parameters of which this rank
        has elements, by name: [value, dtype]. Read now, put into words when called."""
        numbers = [
            (name, k, v) for name, entry in self._entries.items() for k, v in entry.items() if k not in self._kept
        ]
        tensors: dict[torch.dtype, list[Tensor]] = {}
        for _, _, value in numbers:
            if isinstance(value, Tensor):
                tensors.setdefault(value.dtype, []).append(value)
        read = {dtype: torch.stack(alike).cpu() for dtype, alike in tensors.items()}  # all of a kind in one read
        groups, names = self.trainer.updater.inner.param_groups, _names(self.trainer)
        settings = [group | {"params": own} for group, own in zip(groups, names, strict=True)]

        def in_words() -> dict[str, Any]:
            values = {dtype: iter(alike.tolist()) for dtype, alike in read.items()}
            counted: dict[str, dict[str, list[Any]]] = {}
            for name, key, value in numbers:
                dtype = value.dtype if isinstance(value, Tensor) else None
                number = [next(values[dtype]), str(dtype).removeprefix("torch.")] if dtype else [value, None]
                if self._named[name].numel():
                    counted.setdefault(_plain(name), {})[key] = number
            groups = [group | {"params": list(map(_plain, group["params"]))} for group in settings]
            return {"groups": groups, "counted": counted}

        return in_words


def held(trainer: Trainer) -> dict[str, tuple[Tensor, Placement]]:
    """A `Holding`'s tensors with their placements."""
    holding = Holding(trainer)
    placements = holding.placements()
    return {name: (tensor.detach(), placements[name]) for name, tensor in holding.tensors.items()}


def wanted(trainer: Trainer, manifest: Manifest) -> dict[str, Placement]:
    """Which part of which saved tensor this rank needs. ValueError if the checkpoint is of another model."""
    found = _model_placements(trainer)
    stepped, masters = _stepped_placements(trainer), trainer.updater.sharded_state_dict()["masters"]
    keys = {name.split("/")[1] for name in manifest.tensors if name.startswith("optimizer/")}
    for name in itertools.chain(*_names(trainer)):
        keyed = {_key("optimizer", key, name): stepped[name] for key in keys}
        found |= {key: placement for key, placement in keyed.items() if key in manifest.tensors}
    found |= {_key("master", name): stepped[name] for name in masters}
    for name, placement in found.items():
        saved = manifest.tensors.get(name)
        if saved is None:
            raise ValueError(f"it is of another model: it has no {name}")
        if saved.shape != placement.shape:
            raise ValueError(f"it is of another model: its {name} is {list(saved.shape)}, not {list(placement.shape)}")
    return found


@torch.no_grad()
def put(trainer: Trainer, parts: dict[str, Tensor], manifest: Manifest) -> None:
    """Gives the trainer what `wanted` named, and the optimizer's numbers."""
    for name, part in trainer.parallel.parts().items():
        part.copy_(parts[_key("model", name)])
    for name, buffer in trainer.parallel.buffers().items():
        buffer.copy_(parts[_key("model", name)])
    names, entries = _names(trainer), []
    keys = sorted({name.split("/")[1] for name in parts if name.startswith("optimizer/")})
    for name in itertools.chain(*names):
        tensors = {key: parts[at] for key in keys if (at := _key("optimizer", key, name)) in parts}
        counted = manifest.optimizer["counted"].get(_plain(name), {})
        entries.append(tensors | {key: value_of(*number) for key, number in counted.items()})
    groups = [{key: _setting(value) for key, value in group.items()} for group in manifest.optimizer["groups"]]
    own = trainer.updater.sharded_state_dict()
    own["state"] = {place: entry for place, entry in enumerate(entries) if entry}
    own["param_groups"] = numbered(groups, names)
    own["masters"] = {name: parts[_key("master", name)] for name in own["masters"]}
    trainer.updater.load_state_dict(own)


def _names(trainer: Trainer) -> list[list[str]]:
    """Of what this rank steps, by the optimizer's groups."""
    return names_by_group(trainer.updater.inner, trainer.updater.named().items())


def _model_placements(trainer: Trainer) -> dict[str, Placement]:
    """Of weights and buffers, by their names in a checkpoint."""
    parallel, placements = trainer.parallel, trainer.parallel.weight_placements
    found = {_key("model", name): placements[name] for name in parallel.parts()}
    return found | {_key("model", name): placement for name, placement in parallel.buffer_placements.items()}


def _stepped_placements(trainer: Trainer) -> dict[str, Placement]:
    """Of what is stepped: where the weights are, but for shards of them."""
    return dict(trainer.parallel.weight_placements) | dict(trainer.updater.placements)


@functools.cache
def _key(*words: str) -> str:
    return "/".join([*words[:-1], _plain(words[-1])])


def _plain(name: str) -> str:
    """A parameter's name in the model itself: torch.compile's wrapper adds a word."""
    return name.replace("_orig_mod.", "")


def value_of(value: Any, dtype: str | None) -> Any:
    return value if dtype is None else torch.tensor(value, dtype=getattr(torch, dtype))


def _setting(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # JSON knows no tuples
