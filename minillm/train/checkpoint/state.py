"""What a checkpoint holds of a trainer: tensors under names that no layout changes, and numbers.

    model/blocks.0.attention.q.weight                  a weight, in the dtype of the model
    master/blocks.0.attention.q.weight                 its float32 copy, where the model has 16-bit weights
    optimizer/exp_avg/blocks.0.attention.q.weight      what the optimizer keeps per element

Each comes with the placement that says which part of it this rank has. What is no tensor goes into the manifest: the
trainer's progress, the optimizer's settings, what it counts per parameter (Adam's `step`). The learning rate is a
function of the step, and the order of the data one of the seed and a position, so neither has state of its own.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minillm.parallel.optimizer_state import by_name, is_empty, names_by_group, numbered, per_element
from minillm.parallel.placement import Placement
from minillm.train.checkpoint.manifest import Manifest
from minillm.train.trainer import Trainer

Held = dict[str, tuple[Tensor, Placement]]


def held(trainer: Trainer) -> Held:
    """All tensors that this rank has, whole or in part; no communication. Weights in another dtype than the model's
    are copies."""
    weights, dtype = trainer.parallel.held(), trainer.precision.weights
    stepped = _stepped_placements(trainer, weights)
    found: Held = {_key("model", name): (part.to(dtype), placement) for name, (part, placement) in weights.items()}
    found |= {_key("model", name): held for name, held in trainer.parallel.held_buffers().items()}
    state = trainer.updater.sharded_state_dict()
    for name, entry, kept in _entries(trainer, state):
        found |= {_key("optimizer", key, name): (entry[key], stepped[name]) for key in entry if key in kept}
    return found | {_key("master", name): (master, stepped[name]) for name, master in state["masters"].items()}


def optimizer_numbers(trainer: Trainer) -> dict[str, Any]:
    """The optimizer's settings and parameters by group, and what it counts for the parameters of which this rank has
    elements, by name: [value, dtype]."""
    state = trainer.updater.sharded_state_dict()
    counted: dict[str, dict[str, list[Any]]] = {}
    tensors: dict[torch.dtype, list[tuple[list[Any], Tensor]]] = {}
    for name, entry, kept in _entries(trainer, state):
        if is_empty(entry):
            continue
        numbers = counted[_plain(name)] = {key: [value, None] for key, value in entry.items() if key not in kept}
        for number in numbers.values():
            if isinstance(number[0], Tensor):
                tensors.setdefault(number[0].dtype, []).append((number, number[0]))
    for dtype, alike in tensors.items():  # all of a kind in one read from the device
        for (number, _), value in zip(alike, torch.stack([tensor for _, tensor in alike]).tolist(), strict=True):
            number[:] = [value, str(dtype).removeprefix("torch.")]
    names = [[_plain(name) for name in group] for group in _names(trainer)]
    settings = [group | {"params": own} for group, own in zip(state["param_groups"], names, strict=True)]
    return {"groups": settings, "counted": counted}


def wanted(trainer: Trainer, manifest: Manifest) -> dict[str, Placement]:
    """Which part of which saved tensor this rank needs. ValueError if the checkpoint is of another model."""
    weights, buffers = trainer.parallel.held(), trainer.parallel.held_buffers()
    found = {_key("model", name): placement for name, (_, placement) in (weights | buffers).items()}
    stepped, masters = _stepped_placements(trainer, weights), trainer.updater.sharded_state_dict()["masters"]
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
    for name, (part, _) in trainer.parallel.held().items():
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


def _entries(trainer: Trainer, state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """Of each parameter that the optimizer knows: name, what it keeps, and which of that is per element."""
    entries = by_name(state, _names(trainer))
    kept = per_element(entries)
    return ((name, entry, kept) for name, entry in entries.items())


def _stepped_placements(trainer: Trainer, weights: Held) -> dict[str, Placement]:
    """Of what is stepped: where the weights are, but for shards of them."""
    return {name: placement for name, (_, placement) in weights.items()} | dict(trainer.updater.placements)


def _key(*words: str) -> str:
    return "/".join([*words[:-1], _plain(words[-1])])


def _plain(name: str) -> str:
    """A parameter's name in the model itself: torch.compile's wrapper adds a word."""
    return name.replace("_orig_mod.", "")


def value_of(value: Any, dtype: str | None) -> Any:
    return value if dtype is None else torch.tensor(value, dtype=getattr(torch, dtype))


def _setting(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # JSON knows no tuples
