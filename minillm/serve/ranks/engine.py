"""`over_ranks(group, source, use)`: an engine over the ranks of a group; every one of them calls it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from minillm.comm import Group
from minillm.data import Tokenizer
from minillm.model import Transformer
from minillm.model.generate import folder_of
from minillm.model.hf.generation_config import read_generation_config
from minillm.parallel.tensor_parallel.load import load_part
from minillm.parallel.tensor_parallel.quantized import cut_quantized
from minillm.serve.engine import LLM
from minillm.serve.load import dtype_of
from minillm.serve.ranks.part import as_part
from minillm.serve.speculate.registry import proposer_named

OF_FOLDER = ("device", "dtype", "max_seq_len")
READ_TARGET = ("medusa", "eagle", "early-exit")  # proposers that compute with the target's own layers
REFUSED = {
    "compile": "torch.compile cannot trace what they exchange",
    "adapters": "their matrices are not cut over ranks",
}
Result = TypeVar("Result")


def over_ranks(
    group: Group,
    source: str | Path | Transformer,
    use: Callable[[LLM], Result],
    *,
    proposer: Any = None,
    prefill: Any = None,
    **options: Any,
) -> Result | None:
    """What `use(llm)` returns, on rank 0; the other ranks compute its steps until it returns, and return None.

    source: a Hugging Face folder, of which each rank reads its part, or a model that is whole on every rank and is cut
    in place. proposer: of draft tokens, by its name in `PROPOSERS`, or an object; rank 0 alone has it.
    prefill: see `LLM`. options: of `LLM`, with a folder also device, dtype and max_seq_len of `engine_options`; the
    same on every rank.

    ValueError for heads that do not divide over the ranks and for what is not cut. If `use` leaves an exception, the
    ranks end with it.
    """
    for name, reason in REFUSED.items():
        if options.get(name):
            raise ValueError(f"{name} with an engine over ranks: {reason}, so leave one of the two out.")
    if isinstance(proposer, str) and proposer in READ_TARGET and group.world_size > 1:
        raise ValueError(
            f"proposer {proposer!r} reads the target, which is cut over {group.world_size} ranks: "
            "use draft, ngram or lookahead, or one rank."
        )
    if isinstance(source, Transformer):
        found = {"model": cut_quantized(source, group)}
    else:
        found = _loaded(source, group, **{name: options.pop(name) for name in OF_FOLDER if name in options})
    whole = found["model"].config
    model = as_part(found["model"], group)
    if group.rank == 0 and proposer is not None:
        options["proposer"] = proposer_named(proposer, model) if isinstance(proposer, str) else proposer
    llm = LLM(**found | options)
    runner = llm.runner
    if prefill is not None:
        llm.handovers = prefill.attach(llm, whole)
    if group.rank:
        with sigterm_ignored():  # rank 0 may have requests to end: it says when there are no more steps
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
def sigterm_ignored() -> Iterator[None]:
    """A SIGTERM that reaches every rank, as torchrun's or a process group's, ends none in the middle of an answer."""
    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _loaded(source: str | Path, group: Group, *, device=None, dtype=None, max_seq_len=None) -> dict[str, Any]:
    folder, device = folder_of(str(source), option="folder"), device or group.device
    part = load_part(folder, group, device=device, dtype=dtype_of(dtype, device), max_seq_len=max_seq_len)
    return {
        "model": part.model,
        "tokenizer": Tokenizer.load(folder),
        "generation": read_generation_config(folder),
    }
