"""Every proposer by its name: what `generate --speculate NAME` and `bench speculate` choose from."""

from collections.abc import Callable
from importlib import import_module

from minillm.model import Transformer, load_hf
from minillm.model.generate import folder_of
from minillm.serve.speculate.proposal import Proposer
from minillm.serve.speculate.proposers.draft_model import DraftModel
from minillm.serve.speculate.proposers.ngram import NGram


def _draft(target: Transformer) -> Proposer:
    weight = target.embedding.weight
    return DraftModel(load_hf(folder_of("draft"), device=weight.device, dtype=weight.dtype), cost=0.25)


def _trained(module: str, name: str) -> Callable[[Transformer], Proposer]:
    return lambda target: getattr(import_module(f"minillm.serve.speculate.proposers.{module}"), name)(target)


PROPOSERS: dict[str, Callable[[Transformer], Proposer]] = {
    "draft": _draft,
    "ngram": lambda target: NGram(),
    "medusa": _trained("medusa", "Medusa"),
    "eagle": _trained("eagle", "Eagle"),
    "lookahead": lambda target: import_module("minillm.serve.speculate.proposers.lookahead").Lookahead(),
    "early-exit": _trained("early_exit", "EarlyExit"),
}


def proposer_named(name: str, target: Transformer) -> Proposer:
    """ValueError for an unknown name, and, with the command that makes them, for one whose weights are missing."""
    if name not in PROPOSERS:
        raise ValueError(f"no proposer {name!r}: use one of {', '.join(PROPOSERS)}.")
    return PROPOSERS[name](target)
