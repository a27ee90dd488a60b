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

from minillm.comm.ranks import of_all_ranks
from minillm.model.hf.load import DTYPES
from minillm.parallel.sharding.state import LocalState, number_of, value_of
from minillm.train.checkpoint.generators import restore_generators
from minillm.train.checkpoint.manifest import Manifest, SavedTensor
from minillm.train.checkpoint.reader import read_whole
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
    (folder / ".metadata").unlink(missing_ok=True)  # written last: what is there before belongs to other data
    dcp.save(found, storage_writer=dcp.FileSystemWriter(folder, overwrite=True), no_dist=True)


def from_torch(folder: Path, trainer: Trainer) -> None:
    """Gives a trainer the state in a folder; every rank calls it, reads all of it, then keeps its part. Weights of
    another floating dtype are rounded to the trainer's; float32 copies that the folder lacks are made of its weights. A
    parameter without optimizer state, such as an expert that has seen no token, begins with none.
    ValueError on all ranks, and nothing has changed, if there is none, or if it is of another model or other settings.
    """
    group, problem, placements = trainer.parallel.group, None, {}
    local = trainer.local_state()
    try:
        manifest, tensors = _read(folder)
        placements = local.required_parts({name: tensor.shape for name, tensor in tensors.items()})
        _check_optimizer(local, manifest)
        if manifest.progress:
            trainer.check(manifest.progress)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = str(error) if str(folder) in str(error) else f"{folder}: {error}"
    told = of_all_ranks(group, (problem, set(placements)))
    if problem := next((theirs for theirs, _ in told if theirs), None):
        raise ValueError(problem)
    if unused := {name for name in tensors if not name.startswith("master/")}.difference(*(names for _, names in told)):
        raise ValueError(f"{folder}: it is of another model: nothing here needs its {min(unused)}")
    if manifest.progress:
        trainer.resume_at(manifest.progress)
    parts = {name: placement.cut(tensors[name]) for name, placement in placements.items()}
    local.load_parts(parts, manifest.optimizer)
    if manifest.generators:
        rank = group.rank if group else 0
        restore_generators(manifest.generators[rank % len(manifest.generators)], trainer.device)


def _read(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """What a manifest of the same would say, and the tensors by the names that they have in it."""
    whole, objects = _load(folder)
    tensors: dict[str, Tensor] = {}
    counted: dict[str, dict[str, list[Any]]] = defaultdict(dict)
    for name, tensor in whole.items():
        kind, _, parameter = name.partition(".")
        if kind in ("model", "master"):
            tensors[f"{kind}/{parameter}"] = tensor
        elif kind == "optimizer":
            parameter, _, key = parameter.removeprefix("state.").rpartition(".")
            if tensor.dim():
                tensors[f"optimizer/{key}/{parameter}"] = tensor
            else:
                counted[parameter][key] = number_of(tensor)
    for name, tensor in list(tensors.items()):
        kind, _, parameter = name.partition("/")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"its {name} is {tensor.dtype}, not a number that is trained")
        if kind == "model":
            tensors.setdefault(f"master/{parameter}", tensor)
    shapes = {name: SavedTensor(tensor.dtype, tensor.shape, ()) for name, tensor in tensors.items()}
    progress, generators = json.loads(objects.get("progress", "{}")), json.loads(objects.get("generators", "[]"))
    optimizer = {"groups": _groups(objects), "counted": counted}
    return Manifest(0, progress.get("step", 0), None, (), progress, optimizer, generators, shapes), tensors


def _check_optimizer(local: LocalState, manifest: Manifest) -> None:
    """ValueError if the state is of another optimizer than the trainer's, or has a part of what a parameter needs."""
    own = local.names
    saved = [set(group["params"]) for group in manifest.optimizer["groups"]]
    if len(own) != len(saved) or not all(set(names) <= theirs for names, theirs in zip(own, saved, strict=True)):
        raise ValueError("its optimizer is another one: parameters are not in the same groups, or there are none")
    kept: dict[str, set[str]] = {name: set(counted) for name, counted in manifest.optimizer["counted"].items()}
    for name in manifest.tensors:
        kind, *key, parameter = name.split("/")
        if kind == "optimizer":
            kept.setdefault(parameter, set()).update(key)
    for name, keys in kept.items():
        if lacking := set().union(*kept.values()) - keys:
            raise ValueError(f"its optimizer has no {min(lacking)} of {name}")


def _groups(objects: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's settings by group, of which torch makes an object each."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, value in objects.items():
        if name.startswith("optimizer.param_groups."):
            place, _, key = name.removeprefix("optimizer.param_groups.").partition(".")
            if not place.isdigit():
                raise ValueError("its optimizer is flattened: save it without flatten_optimizer_state_dict")
            found[int(place)][key] = value
    return [found[place] for place in sorted(found)]


def _load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and other objects by their names in the folder."""
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state: dict[str, Any] = dict.fromkeys(metadata)
        for name, about in metadata.items():
            if isinstance(about, TensorStorageMetadata):
                state[name] = torch.empty(about.size, dtype=about.properties.dtype)
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except (Exception, dcp.api.CheckpointException) as error:  # of what is unpickled, any kind
        raise ValueError(f"{folder} holds nothing that torch.distributed.checkpoint has written whole.") from error
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}
