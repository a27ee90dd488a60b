"""The state of a whole run from what its ranks hold, and back: on any other number of ranks, or for plain torch.

rank 0   exp_avg of a part of a weight ─┐                                          ┌─ rank 0 of 3
rank 1   exp_avg of a part of a weight ─┴─ {"state": {0: {"exp_avg": ...}}, ...} ──┼─ ...
                                       full_state                              load_full
"""

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from minillm.comm import Group
from minillm.comm.ranks import of_all_ranks
from minillm.parallel.sharding.gather import gather
from minillm.parallel.sharding.state import LocalState, number_of, numbered, per_element, value_of


def full_state(local: LocalState, group: Group | None) -> dict[str, Any]:
    """All ranks' local states put together: "model", whole weights and buffers by name, and "optimizer", in the layout
    of torch's optimizers over the whole model, with two keys more that torch does not look at: "names", in the order of
    "state", and "masters" by name. Every rank of `group` calls it, and gets copies on the CPU. None: of one process,
    whose tensors these are."""
    tensors = gather(local.tensors, local.placements(), group) if group else local.tensors
    numbers = local.numbers()
    by_rank = of_all_ranks(group, numbers)
    state: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Tensor]] = {"model": {}, "master": {}}
    for key, tensor in tensors.items():
        kind, name = key.split("/", 1)  # no further: torch allows slashes in the names of modules
        if kind == "optimizer":
            key, name = name.split("/", 1)
            state.setdefault(name, {})[key] = tensor
        else:
            found[kind][name] = tensor
    counted: dict[str, dict[str, list[Any]]] = {}
    for theirs in by_rank:  # of a parameter on several ranks, the first one's
        counted = theirs["counted"] | counted
    for name, entry in counted.items():
        state.setdefault(name, {}).update({key: value_of(*number) for key, number in entry.items()})
    order = local.weights.names if local.weights else list(itertools.chain(*local.names))
    groups = []
    for alike in zip(*(theirs["groups"] for theirs in by_rank), strict=True):
        members = set(itertools.chain(*(group["params"] for group in alike)))
        groups.append([name for name in order if name in members])
    names = list(itertools.chain(*groups))
    optimizer = {
        "state": {place: state[name] for place, name in enumerate(names) if name in state},
        "param_groups": numbered(numbers["groups"], groups),
        "names": names,
        "masters": found["master"],
    }
    return {"model": found["model"], "optimizer": optimizer}


def load_full(local: LocalState, optimizer: Mapping[str, Any], model: Mapping[str, Tensor] = {}) -> None:
    """The inverse of `full_state`, on a rank of any layout; no communication. Parameters and errors: `parts_of_full`.
    After a ValueError nothing has changed."""
    local.load_parts(*parts_of_full(local, optimizer, model, "this optimizer state"))


def parts_of_full(
    local: LocalState, optimizer: Mapping[str, Any], model: Mapping[str, Tensor], what: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `local.load_parts` takes: this rank's parts of a whole state, and the optimizer's numbers. optimizer: may be
    what a plain optimizer of the same parameters has saved: then "names" are those of this rank, and masters are copied
    from the weights. what: a name for it in messages. ValueError: it is of another model, or its optimizer groups
    parameters otherwise."""
    own = local.names
    names = optimizer.get("names", list(itertools.chain(*own)))
    ordered, sizes = iter(names), [len(group["params"]) for group in optimizer["param_groups"]]
    groups = [list(itertools.islice(ordered, size)) for size in sizes]
    if local.weights is None:  # this rank steps parts of everything; with a pipeline, it may step less
        for mine, theirs in itertools.zip_longest(itertools.chain(*own), names):
            if mine != theirs:
                raise ValueError(f"{what} is of another model or another make(): it has {theirs} in place of {mine}.")
    if len(own) != len(groups) or any(set(mine) - set(theirs) for mine, theirs in zip(own, groups, strict=True)):
        here = [len(group) for group in own]
        raise ValueError(
            f"{what} is of another model or another make(): its groups have {sizes} parameters, {here} here."
        )
    entries = {name: optimizer["state"][place] for place, name in enumerate(names) if place in optimizer["state"]}
    kept = per_element(entries)
    tensors = {f"model/{name}": tensor for name, tensor in model.items()}
    tensors |= {f"master/{name}": tensor for name, tensor in optimizer.get("masters", {}).items()}
    counted: dict[str, dict[str, list[Any]]] = {}
    for name, entry in entries.items():
        for key, value in entry.items():
            if key in kept and isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value
            else:
                counted.setdefault(name, {})[key] = number_of(value)
    required = local.required_parts({name: tensor.shape for name, tensor in tensors.items()}, what, masters=False)
    parts = {name: placement.cut(tensors[name]) for name, placement in required.items()}
    return parts, {"groups": optimizer["param_groups"], "counted": counted}
