"""Adapters in the engine (minillm/adapters/store.py has them): what its parts ask, each with one call.

    a request arrives       `prompts.registered`: its name is known, its folder is whole and fits; else it is refused
    a sequence is admitted  only while the store has room for the adapters of all that run (`Scheduler`)
    a step is planned       hold_adapters: loads what was admitted, and puts sequences of one adapter side by side
    its inputs are made     adapters_of: a number for each sequence
    it is executed          `AdapterStore.routed` around the forward pass (`Runner`)

An adapter's number and digest are where its prefixes begin in the cache, see `cache_namespace`: keys and values depend
on its values, and whether a planned step computes them on whether it could be loaded.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minillm.model import Transformer
from minillm.model.parts import blocks_of
from minillm.serve.run.optimise import CompiledBlock
from minillm.serve.schedule.scheduler import Scheduler
from minillm.serve.schedule.sequence import Plan, State

if TYPE_CHECKING:
    from minillm.adapters.store import AdapterStore


def store_of(
    model: Transformer, adapters: "AdapterStore | Mapping[str, str | Path] | None", compile: bool | str = False
) -> "AdapterStore | None":
    """All as of `EngineOptions`; None = there are no adapters. ValueError for a model that cannot serve them."""
    if adapters is None:
        return None
    from minillm.adapters.routed import routes_of
    from minillm.adapters.store import AdapterStore

    if compile is not False or any(isinstance(block.forward, CompiledBlock) for block in blocks_of(model)):
        raise ValueError("adapters with compile: compiled blocks have no place for updates, leave one of the two out.")
    if not isinstance(adapters, AdapterStore | Mapping):
        raise ValueError(f"adapters {adapters!r} must be names with their folders, as {{'french': 'adapters/french'}}.")
    store = adapters if isinstance(adapters, AdapterStore) else AdapterStore(model, adapters)
    if store.model is not model:
        raise ValueError("this AdapterStore is of another model: make one with the model of the LLM.")
    routes_of(model)  # from here on it cannot be compiled
    return store


def hold_adapters(plan: Plan, store: "AdapterStore", scheduler: Scheduler, end: Callable[..., None]) -> None:
    """Loads what running sequences need. Requests whose adapter cannot be loaded fail and leave the plan; what is left
    of it is sorted by adapter. end: `RequestTable.end`."""
    for number, error in store.hold(scheduler.adapters_in_use).items():
        for sequence in [each for each in scheduler.running if each.adapter == number]:
            end(sequence.request, "failed", error)
    batch = [(sequence, tokens) for sequence, tokens in plan.batch if sequence.state is State.RUNNING]
    plan.batch = sorted(batch, key=lambda each: -1 if each[0].adapter is None else each[0].adapter)


def adapters_of(numbers: list[int | None]) -> np.ndarray | None:
    """`StepInputs.adapters`, of each sequence's own."""
    if numbers.count(None) == len(numbers):
        return None
    from minillm.adapters.grouped import NO_ADAPTER

    return np.array([NO_ADAPTER if number is None else number for number in numbers], np.int64)
