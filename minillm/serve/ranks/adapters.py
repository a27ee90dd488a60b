"""Adapters of an engine over ranks: each rank has a store of its part, which holds what the steps say.

rank 0     scheduler ──▶ hold ──▶ the step's adapters are among its inputs ──▶ pass
rank 1..                                               told ──▶ hold ────────▶ pass
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from minillm.adapters.cut import Cut
from minillm.adapters.grouped import NO_ADAPTER
from minillm.adapters.store import AdapterStore
from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.serve.ranks.part import layers_of
from minillm.serve.ranks.stage import Stage


def store_of_part(
    adapters: Mapping[str, str | Path] | Callable[..., AdapterStore],
    model: Transformer | Stage,
    whole: ModelConfig,
    sharers: Group,
) -> AdapterStore:
    """adapters: as of `over_ranks`. model: this rank's part of one of configuration `whole`, whose layers the sharers
    have between them."""
    if not callable(adapters) and not isinstance(adapters, Mapping):
        raise ValueError(f"adapters {adapters!r} over ranks must be folders by name: a store is of a whole model.")
    make = adapters if callable(adapters) else partial(AdapterStore, folders=adapters)
    return make(model=model, cut=Cut(whole, sharers, layers_of(model)))


@contextmanager
def routed_as_told(store: AdapterStore, adapters: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
    """`AdapterStore.routed` on a rank that is only told the steps. RuntimeError for one that rank 0 could load and this
    rank cannot."""
    wanted, names = {int(number) for number in adapters} - {NO_ADAPTER}, store.names
    for number in wanted:
        store.registered(names[number])
    for reason in store.hold(wanted).values():
        raise RuntimeError(f"an adapter that rank 0 has loaded cannot be loaded here: {reason}")
    with store.routed(adapters, counts):
        yield
