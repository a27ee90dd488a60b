"""`over_ranks(group, source, use)`: an engine over the ranks of a group; every one of them calls it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from minillm.comm import Group, Mesh
from minillm.data import Tokenizer
from minillm.model import Transformer
from minillm.model.generate import folder_of
from minillm.model.hf.generation_config import read_generation_config
from minillm.parallel.tensor_parallel.load import load_part
from minillm.parallel.tensor_parallel.quantized import cut_quantized
from minillm.serve.engine import LLM
from minillm.serve.load import dtype_of
from minillm.serve.numbers import check_whole
from minillm.serve.ranks.part import as_part
from minillm.serve.ranks.stage import Stage
from minillm.serve.speculate.registry import proposer_named

OF_FOLDER = ("device", "dtype", "max_seq_len")
READ_TARGET = ("medusa", "eagle", "early-exit")  # proposers that compute with the target's own layers
REFUSED = {
    "compile": "torch.compile cannot trace what they exchange",
}
REFUSED_OF_STAGES = {
    "async_scheduling": "as many steps are under way as there are stages already",
    "prefill": "a prefill pool hands keys over to ranks that have all layers",
    "graphs": "hidden states that arrive have no place in a recorded pass",
}
Result = TypeVar("Result")


def over_ranks(
    group: Group,
    source: str | Path | Transformer,
    use: Callable[[LLM], Result],
    *,
    pp: int = 1,
    ep: bool = False,
    proposer: Any = None,
    prefill: Any = None,
    **options: Any,
) -> Result | None:
    """What `use(llm)` returns, on rank 0; the other ranks compute its steps until it returns, and return None.

    source: a Hugging Face folder, of which each rank reads its part, or a model that is whole on every rank and is cut
    in place. pp: stages of consecutive layers, each shared by world_size / pp ranks (`run/pipelined.py`). ep: of each
    layer of experts a rank has some, whole, in place of a part of every one. proposer: of draft tokens, by its name in
    `PROPOSERS`, or an object; rank 0 alone has it. prefill: see `EngineOptions`. options: of `LLM`, with a folder also
    device, dtype and max_seq_len of `engine_options`; the same on every rank. adapters: folders by name, or what is
    called with `model` and `cut` (`adapters/cut.py`) and makes a store.

    ValueError for heads that do not divide over the ranks and for what is not cut. If `use` leaves an exception, the
    ranks end with it.
    """
    _check(group.world_size, pp, proposer, options | {"prefill": prefill})
    rest = (ep, proposer, prefill, options)
    if pp == 1:
        return _run(_engine(source, group, group, None, *rest), group, use)
    with Mesh(group, pp=pp, tp=group.world_size // pp) as mesh:
        llm = _engine(source, group, mesh.tp, partial(Stage, group=group, mesh=mesh), *rest)
        return _run(llm, group, use)


def _check(ranks: int, pp: int, proposer: Any, options: dict[str, Any]) -> None:
    """ValueError for what ranks, or stages, have no form of."""
    check_whole("pp", pp, 1)
    if ranks % pp:
        raise ValueError(f"{pp} stages do not divide {ranks} ranks: start a multiple of {pp}, all stages have as many.")
    for name, reason in REFUSED.items():
        if options.get(name):
            raise ValueError(f"{name} with an engine over ranks: {reason}, so leave one of the two out.")
    for name, reason in REFUSED_OF_STAGES.items():
        if pp > 1 and options.get(name):
            raise ValueError(f"{name} with {pp} stages: {reason}, so leave it out.")
    reads_target = isinstance(proposer, str) and proposer in READ_TARGET and ranks > 1
    if reads_target or (pp > 1 and getattr(proposer, "wants_hidden", False)):
        raise ValueError(
            f"proposer {proposer!r} reads the target, which is cut over {ranks} ranks: "
            "use draft, ngram or lookahead, or one rank."
        )


def _engine(
    source: str | Path | Transformer,
    group: Group,
    sharers: Group,
    take: Callable[[Transformer], Stage] | None,
    ep: bool,
    proposer: Any,
    prefill: Any,
    options: dict[str, Any],
) -> LLM:
    """This rank's. sharers: the ranks that share its layers. take: these layers of the whole model; None = all."""
    if isinstance(source, Transformer):
        found = {"model": cut_quantized(source if take is None else take(source), sharers, whole_experts=ep)}
    else:
        of_folder = {name: options.pop(name) for name in OF_FOLDER if name in options}
        found = _loaded(source, sharers, take, ep, **of_folder)
    whole = found["model"].config
    model = as_part(found["model"], sharers)
    if group.rank == 0 and proposer is not None:
        options["proposer"] = proposer_named(proposer, model) if isinstance(proposer, str) else proposer
    if (adapters := options.get("adapters")) is not None:
        from minillm.serve.ranks.adapters import store_of_part

        options["adapters"] = store_of_part(adapters, model, whole, sharers)
    llm = LLM(**found | options | ({} if prefill is None else {"windows_apart": False}))
    if prefill is not None:
        llm.handovers = prefill.attach(llm, whole)
    return llm


def _run(llm: LLM, group: Group, use: Callable[[LLM], Result]) -> Result | None:
    """Rank 0 uses the engine, the others follow it."""
    runner = llm.runner
    if group.rank:
        with signals_ignored():  # rank 0 may have requests to end: it says when there are no more steps
            runner.follow()
        _close(llm)
        runner.channel.close(group)
        return None
    runner.lead()
    try:
        result = use(llm)
    except Exception:
        runner.check()  # if a rank was lost, that is the reason
        raise
    finally:
        runner.end()
        _close(llm)
    runner.check()
    runner.channel.close(group)
    return result


def _close(llm: LLM) -> None:
    """Ends what connects it to other engines."""
    if llm.handovers is not None:
        llm.handovers.close()


@contextmanager
def signals_ignored() -> Iterator[None]:
    """A SIGTERM or Ctrl-C that reaches every rank, as torchrun's or a process group's, ends none in the middle of an
    answer."""
    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _loaded(
    source: str | Path,
    group: Group,
    take: Callable[[Transformer], Stage] | None,
    ep: bool,
    *,
    device=None,
    dtype=None,
    max_seq_len=None,
) -> dict[str, Any]:
    folder, device = folder_of(str(source), option="folder"), device or group.device
    options = {"dtype": dtype_of(dtype, device), "max_seq_len": max_seq_len}
    part = load_part(folder, group, device=device, take=take, whole_experts=ep, **options)
    return {
        "model": part.model,
        "tokenizer": Tokenizer.load(folder),
        "generation": read_generation_config(folder),
    }
