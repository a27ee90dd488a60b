"""A sharded optimizer's state, whole and in parts: what makes a run on 4 ranks go on on 2, or in one process.

    rank 0   exp_avg of its part of bucket 0 ─┐
    rank 1   exp_avg of its part of bucket 0 ─┴─ all-gather ─> cut by parameter ─> {"state": {0: {"exp_avg": ...}}}

The whole state is that of a plain torch optimizer over whole parameters, with two keys more that torch does not look
at: "names" (in the order of "state") and "masters" (float32 weights by name, where the model has 16-bit ones).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minillm.train.zero import Shard, ZeroOptimizer

Parts = dict[str, dict[str, Any]]  # by parameter name, by key ("exp_avg"): a tensor of the slice's shape, or a scalar


def whole(optimizer: "ZeroOptimizer") -> dict[str, Any]:
    """Every rank calls this and gets all of it, on the CPU."""
    mine = _parts(optimizer)
    kinds = {name: {key: _kind(value) for key, value in parts.items()} for name, parts in mine.items()}
    told: Parts = {}
    for other in optimizer.group.gather_objects(kinds):
        told = other | told
    state: Parts = {}
    masters: dict[str, Tensor] = {}
    for shard in optimizer.shards:
        known = {name: told[name] for name in shard.bucket.names if name in told}
        dtypes = {key: kind for kinds in known.values() for key, kind in kinds.items() if isinstance(kind, torch.dtype)}
        for name, kinds in known.items():
            state[name] = {key: kind for key, kind in kinds.items() if key not in dtypes}
        for key, dtype in dtypes.items():
            parts = {name: mine[name][key] for name in known if key in mine.get(name, {})}
            tensors = _gathered(shard, parts, dtype)
            for name in (name for name, kinds in known.items() if key in kinds):
                state[name][key] = tensors[name]
        if shard.wide:
            masters |= _gathered(shard, {name: part.detach() for name, part in shard.slices.items()}, torch.float32)
    return _packed(optimizer, state, masters)


def whole_gradients(optimizer: "ZeroOptimizer") -> dict[str, Tensor]:
    """Every rank calls this and gets all of them, on the CPU."""
    found: dict[str, Tensor] = {}
    for each in optimizer.shards:
        parts = {name: part.grad for name, part in each.slices.items() if part.grad is not None}
        found |= _gathered(each, parts, each.weights.dtype)
    return found


def shard(optimizer: "ZeroOptimizer") -> dict[str, Any]:
    """This rank's slices, and whose they are."""
    masters = {name: part.detach() for each in optimizer.shards if each.wide for name, part in each.slices.items()}
    return _packed(optimizer, _parts(optimizer), masters) | {"shard": _layout(optimizer)}


def load(optimizer: "ZeroOptimizer", state: dict[str, Any]) -> None:
    """Takes a whole state or this rank's own. ValueError: another model's, or another rank's or layout's shard."""
    names = _names(optimizer)
    if list(state.get("names", names)) != names:
        other = next(
            (name for name in (*state["names"], *names) if (name in names) != (name in state["names"])), names[0]
        )
        raise ValueError(f"this optimizer state is of another model or another make(): they differ in {other}.")
    by_name = {names[index]: dict(parts) for index, parts in state["state"].items()}
    masters = state.get("masters", {})
    if "shard" in state:
        if state["shard"] != _layout(optimizer):
            saved, here = state["shard"], _layout(optimizer)
            raise ValueError(
                f"this is the shard of rank {saved['rank']} of {saved['world_size']}, cut otherwise than that of rank "
                f"{here['rank']} of {here['world_size']} here: save state_dict(whole=True), which fits any layout."
            )
    else:
        by_name = _cut_all(optimizer, by_name)
    packed = {names.index(name): parts for name, parts in by_name.items()}
    optimizer.inner.load_state_dict({"state": packed, "param_groups": state["param_groups"]})
    optimizer.param_groups, optimizer.state = optimizer.inner.param_groups, optimizer.inner.state
    optimizer.home.keep(optimizer.inner)
    for each in optimizer.shards:
        each.weights.copy_(each.own)
        if each.wide and masters:
            saved = {name: masters[name] for name in each.bucket.names}
            for name, tensor in (saved if "shard" in state else _cut(each, saved, torch.float32)).items():
                each.slices[name].detach().copy_(tensor)


def _cut_all(optimizer: "ZeroOptimizer", by_name: Parts) -> Parts:
    """Whole tensors -> this rank's slices."""
    cut: Parts = {}
    for each in optimizer.shards:
        names = [name for name in each.bucket.names if name in by_name]
        for key in dict.fromkeys(key for name in names for key in by_name[name]):
            values = {name: by_name[name][key] for name in names if key in by_name[name]}
            if key != "step" and any(isinstance(value, Tensor) for value in values.values()):
                _check_shapes(each, key, values)
                values = _cut(each, values, next(iter(values.values())).dtype)
            for name, value in values.items():
                if each.slices[name].numel():
                    cut.setdefault(name, {})[key] = value
    return cut


def _check_shapes(each: "Shard", key: str, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if value.shape != each.slices[name].whole_shape:
            raise ValueError(
                f"{key} of {name} has shape {list(value.shape)}, the parameter {list(each.slices[name].whole_shape)}: "
                "this optimizer state is of another model."
            )


def _cut(each: "Shard", values: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    flat = torch.zeros(each.bucket.padded, dtype=dtype)
    for name, view in zip(each.bucket.names, each.bucket.views(flat), strict=True):
        if name in values:
            view.copy_(values[name])
    own = each.bucket.shard(flat, each.group.rank, each.group.world_size)
    return {name: own[each.ranges[name]].clone() for name in values}


def _gathered(each: "Shard", parts: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Slices on every rank -> whole tensors on every rank's CPU."""
    own = torch.zeros(each.own.shape, dtype=dtype, device=each.own.device)
    for name, part in parts.items():
        own[each.ranges[name]] = part.to(own.device)
    views = each.bucket.views(each.group.all_gather(own))
    return {name: view.to("cpu", copy=True) for name, view in zip(each.bucket.names, views, strict=True)}


def _parts(optimizer: "ZeroOptimizer") -> Parts:
    """The inner optimizer's state of this rank's slices, by name."""
    return {name: dict(optimizer.state[part]) for name, part in optimizer.slices.items() if part in optimizer.state}


def _kind(value: Any) -> Any:
    """What the others have to know of a value: its dtype if it has a number per element, else the value itself."""
    if isinstance(value, Tensor):
        return value.dtype if value.dim() else value.cpu()
    return value


def _names(optimizer: "ZeroOptimizer") -> list[str]:
    """Names in the order in which torch numbers parameters: by group."""
    names = {part: name for name, part in optimizer.slices.items()}
    return [names[part] for group in optimizer.inner.param_groups for part in group["params"]]


def _packed(optimizer: "ZeroOptimizer", state: Parts, masters: dict[str, Tensor]) -> dict[str, Any]:
    names, groups, first = _names(optimizer), [], 0
    for group in optimizer.inner.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append(settings | {"params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    numbered = {index: state[name] for index, name in enumerate(names) if name in state}
    return {"state": numbered, "param_groups": groups, "names": names, "masters": masters}


def _layout(optimizer: "ZeroOptimizer") -> dict[str, Any]:
    group, buckets = optimizer.group, [shard.bucket for shard in optimizer.shards]
    layout = [(bucket.names, bucket.padded) for bucket in buckets]
    return {"rank": group.rank, "world_size": group.world_size, "buckets": layout}
