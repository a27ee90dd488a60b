"""torch.distributed.checkpoint, in and out.

    checkpoints/save-0007-step-1400 ── to_torch ──▶ FOLDER/.metadata, __0_0.distcp ── from_torch ──▶ trainer

The names are those of torch's `get_state_dict(model, optimizer)` under the keys "model" and "optimizer", so torch's own
wrappers load the folder, and what they have saved loads here, into any layout. Three keys more are ours: "master",
float32 copies of 16-bit weights; "progress" and "generators", without which a trainer begins at step 0 with this state.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from minillm.train.checkpoint.generators import restore_generators
from minillm.train.checkpoint.manifest import Manifest, SavedTensor
from minillm.train.checkpoint.reader import read_whole
from minillm.train.checkpoint.state import put, value_of, wanted
from minillm.train.trainer import Trainer


def to_torch(checkpoint: Path, folder: Path) -> None:
    """Writes a checkpoint, whichever layout has saved it, from one process. ValueError if it is damaged."""
    manifest, tensors = read_whole(checkpoint)
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    texts = {"progress": json.dumps(manifest.progress), "generators": json.dumps(manifest.generators)}
    found: dict[str, Any] = {"model": {}, "master": {}, **texts}
    for name, tensor in tensors.items():
        kind, *key, parameter = name.split("/")
        if kind == "optimizer":
            state[parameter][key[0]] = tensor
        else:
            found[kind][parameter] = tensor
    for parameter, counted in manifest.optimizer["counted"].items():
        state[parameter] |= {key: value_of(*number) for key, number in counted.items()}
    found["optimizer"] = {"state": dict(state), "param_groups": manifest.optimizer["groups"]}
    dcp.save(found, storage_writer=dcp.FileSystemWriter(folder, overwrite=True), no_dist=True)


def from_torch(folder: Path, trainer: Trainer) -> None:
    """Gives a trainer the state in a folder; each rank reads all of it, then keeps its part.
    ValueError if there is none, or if it is of another model or other settings."""
    whole, objects = _read(folder)
    tensors: dict[str, Tensor] = {}
    counted: dict[str, dict[str, list[Any]]] = defaultdict(dict)
    for name, tensor in whole.items():
        kind, _, parameter = name.partition(".")
        if kind != "optimizer":
            tensors[f"{kind}/{parameter}"] = tensor
            continue
        parameter, _, key = parameter.removeprefix("state.").rpartition(".")
        if tensor.dim():
            tensors[f"optimizer/{key}/{parameter}"] = tensor
        else:
            counted[parameter][key] = [tensor.item(), str(tensor.dtype).removeprefix("torch.")]
    optimizer = {"groups": _groups(objects), "counted": counted}
    shapes = {name: SavedTensor(tensor.dtype, tensor.shape, ()) for name, tensor in tensors.items()}
    progress, generators = json.loads(objects.get("progress", "{}")), json.loads(objects.get("generators", "[]"))
    manifest = Manifest(0, progress.get("step", 0), None, (), progress, optimizer, generators, shapes)
    try:
        parts = {name: placement.cut(tensors[name]) for name, placement in wanted(trainer, manifest).items()}
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if progress:
        trainer.resume_at(progress)
    put(trainer, parts, manifest)
    if generators:
        rank = trainer.parallel.group.rank if trainer.parallel.group else 0
        restore_generators(generators[rank % len(generators)], trainer.device)


def _groups(objects: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's settings by group, of which torch makes an object each."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, value in objects.items():
        if name.startswith("optimizer.param_groups."):
            place, key = name.split(".")[2:]
            found[int(place)][key] = value
    return [found[place] for place in sorted(found)]


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and other objects by their names in the folder."""
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state: dict[str, Any] = dict.fromkeys(metadata)
        for name, about in metadata.items():
            if isinstance(about, TensorStorageMetadata):
                state[name] = torch.empty(about.size, dtype=about.properties.dtype)
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        raise ValueError(f"{folder} holds nothing that torch.distributed.checkpoint has written whole.") from error
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}
