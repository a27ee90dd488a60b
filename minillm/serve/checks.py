"""What `LLM` and its scheduler refuse before they build anything."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, signature

from minillm.model.config import check_generates
from minillm.serve.numbers import check_whole
from minillm.serve.ranks.part import group_of
from minillm.serve.ranks.stage import Stage
from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.schedule.held import most_held
from minillm.serve.schedule.policies import POLICIES
from minillm.serve.schedule.sequence import Sequence


def check_model(model: object) -> None:
    """ValueError, with the value and the fix, for what no engine can run."""
    if not hasattr(model, "config") or not hasattr(model, "embedding"):
        raise ValueError(f"model {model!r} must be a Transformer, as `load_hf(folder)` returns one.")
    check_generates(model.config)
    _check_complete(model)


def check_scheduling(scheduler: Callable, scheduling: dict[str, object]) -> None:
    """ValueError for an option that is neither the engine's nor its scheduler's."""
    known = _options_of(scheduler)
    for name in scheduling if known is not None else ():
        if name not in known:
            options = [each.name for each in known.values() if each.kind is Parameter.KEYWORD_ONLY]
            close = get_close_matches(name, options, 1)
            hint = f"did you mean {close[0]}?" if close else f"a scheduler takes {', '.join(options)}."
            raise ValueError(f"LLM has no option {name!r}: {hint}")


def _options_of(scheduler: Callable) -> dict[str, Parameter] | None:
    """What it can be called with. A class that passes options on to the class it extends takes those of that one, too;
    None if something passes on any option to who knows where."""
    made = scheduler.func if isinstance(scheduler, partial) else scheduler
    known: dict[str, Parameter] = {}
    for each in (scheduler, *(made.__mro__[:-1] if isinstance(made, type) else ())):
        found = signature(each).parameters
        known |= {name: option for name, option in found.items() if option.kind is not Parameter.VAR_KEYWORD}
        if not any(option.kind is Parameter.VAR_KEYWORD for option in found.values()):
            return known
    return None


def _check_complete(model) -> None:
    """ValueError for one rank's part of a model: its keys would not fit the cache and its logits lack words."""
    if isinstance(model, Stage):  # made by `over_ranks`, for an engine
        return
    config, group = model.config, group_of(model)
    projection = model.blocks[0].attention.k_proj
    found = getattr(projection, "out_features", None) or len(projection.weight)
    wanted = config.num_kv_heads * config.head_dim
    words = config.vocab_size if group is None else -(-config.vocab_size // group.world_size)
    if found != wanted or len(model.embedding.weight) != words or model.positions_of is not None:
        raise ValueError(
            f"this model is one rank's part of a split one ({found // config.head_dim} of {config.num_kv_heads} key "
            f"and value heads, {len(model.embedding.weight)} of {config.vocab_size} embedding rows): load a whole one "
            "with load_hf, or let minillm.serve.over_ranks split it for an engine over several ranks."
        )


def check_scheduler(
    policy: object,
    preemption: object,
    *,
    token_budget: int,
    max_num_seqs: int,
    patience: int,
    reserve: int,
    chunk: int | None,
    max_waiting: int | None,
) -> None:
    """ValueError, with the value and the fix, for options that a scheduler does not have."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown: use one of {', '.join(map(repr, POLICIES))}.")
    if preemption not in ("recompute", "swap"):
        raise ValueError(f"preemption {preemption!r} is unknown: use 'recompute' or 'swap'.")
    check_whole("token_budget", token_budget, 1)
    check_whole("max_num_seqs", max_num_seqs, 1)
    check_whole("patience", patience, 0)
    check_whole("reserve", reserve, 0)
    check_whole("chunk", chunk, 1, optional=True)
    check_whole("max_waiting", max_waiting, 1, optional=True)
    if max_num_seqs > token_budget:
        raise ValueError(
            f"token_budget {token_budget} must be at least max_num_seqs {max_num_seqs}: every running sequence may "
            "want a token."
        )


def check_fits(sequence: Sequence, pool: BlockPool, piece: int | None, max_num_seqs: int) -> None:
    """ValueError if a new sequence could never run. piece: see `Sequence.wanted`."""
    limit, n = sequence.limit, sequence.num_seqs
    for each in pool.kinds:
        needed = each.blocks_for(limit - 1)  # the last token is never computed
        if each.window is not None:
            needed = min(needed, most_held(each.window, pool.block_size, piece))
        if needed > each.total:
            raise ValueError(
                f"{limit} tokens need {needed} blocks of {pool.block_size} and the pool has {each.total}: "
                "shorten the prompt, lower max_tokens or enlarge the pool."
            )
    if n > max_num_seqs:
        raise ValueError(f"n {n} is more than max_num_seqs {max_num_seqs}: lower one or raise the other.")
