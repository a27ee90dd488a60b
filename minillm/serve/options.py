"""Which settings make sense: one sentence, with the value and the fix, for each that does not."""

from collections.abc import Callable
from difflib import get_close_matches
from inspect import Parameter, signature

from minillm.model.config import check_generates
from minillm.serve.policies import POLICIES
from minillm.serve.sampling import whole


def check_engine(
    model: object,
    tokenizer: object,
    clock: object,
    backend: object,
    proposer: object,
    scheduler: Callable,
    scheduling: dict[str, object],
    numbers: dict[str, tuple[object, int]],
) -> None:
    """ValueError for what `LLM` cannot work with. numbers: (value, least) by name; scheduling: the scheduler's."""
    if not hasattr(model, "config") or not hasattr(model, "embedding"):
        raise ValueError(f"model {model!r} must be a Transformer, as `load_hf(folder)` returns one.")
    check_generates(model.config)
    for name, (value, least) in numbers.items():
        check_whole(name, value, least)
    if tokenizer is not None and not hasattr(tokenizer, "stream"):
        raise ValueError(f"tokenizer {tokenizer!r} must be a Tokenizer, as `Tokenizer.load()`, or None.")
    if not callable(clock):
        raise ValueError(f"clock {clock!r} must be a function that returns seconds, as time.perf_counter.")
    if backend is not None and not callable(backend):
        raise ValueError(f"backend {backend!r} must be an attention function, as `model.paged.gathered`, or None.")
    lacking = [name for name in ("propose", "observe", "forget", "wants_hidden") if not hasattr(proposer, name)]
    if proposer is not None and lacking:
        raise ValueError(f"proposer {proposer!r} has no {lacking[0]}: it must be a Proposer, as `NGram()`, or None.")
    known = signature(scheduler).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in known.values()):
        return
    for name in scheduling:
        if name not in known:
            options = [each.name for each in known.values() if each.kind is Parameter.KEYWORD_ONLY]
            close = get_close_matches(name, options, 1)
            hint = f"did you mean {close[0]}?" if close else f"a scheduler takes {', '.join(options)}."
            raise ValueError(f"LLM has no option {name!r}: {hint}")


def check_async(async_scheduling: object, proposer: object) -> None:
    """ValueError for steps that cannot overlap."""
    if async_scheduling not in (True, False):
        raise ValueError(f"async_scheduling {async_scheduling!r} must be True or False.")
    if async_scheduling and proposer is not None:
        raise ValueError("async_scheduling with a proposer: drafts need tokens that are not read yet, leave one out.")


def check_whole(name: str, value: object, least: int, *, optional: bool = False) -> None:
    """ValueError unless it is a whole number of at least `least`. optional: None is as good."""
    if optional and value is None:
        return
    if (number := whole(value)) is None or number < least:
        raise ValueError(f"{name} {value!r} must be a whole number of at least {least}{', or None' * optional}.")


def check_options(
    token_budget: int,
    max_num_seqs: int,
    chunk: int | None,
    policy: str,
    preemption: str,
    patience: int,
    reserve: int,
    max_waiting: int | None,
) -> None:
    """ValueError, with the value and the fix, for what `Scheduler` cannot work with."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown: use one of {', '.join(map(repr, POLICIES))}.")
    if preemption not in ("recompute", "swap"):
        raise ValueError(f"preemption {preemption!r} is unknown: use 'recompute' or 'swap'.")
    for name, value, least in (
        ("token_budget", token_budget, 1),
        ("max_num_seqs", max_num_seqs, 1),
        ("patience", patience, 0),
        ("reserve", reserve, 0),
    ):
        check_whole(name, value, least)
    if not 1 <= max_num_seqs <= token_budget:
        raise ValueError(
            f"token_budget {token_budget} must be at least max_num_seqs {max_num_seqs}, and that at least 1: "
            "every running sequence may want a token."
        )
    for name, value, least in (("chunk", chunk, 1), ("max_waiting", max_waiting, 1)):
        check_whole(name, value, least, optional=True)
