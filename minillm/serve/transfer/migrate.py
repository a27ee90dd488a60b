"""A running request goes on in another engine: its tokens move at once, its keys are handed over from where they lie.

    with keys_offered(first) as address:
        second = LLM(model, prefill=PrefillAt(address, min_tokens=1))
        put_in(second, take_out(first, "request-0"))

The second engine asks the first one for the keys of the request's tokens, as it would ask a prefill pool. The first
finds nearly all of them in its prefix cache: it computes no more than what lies behind the last full block. So whatever
becomes of the hand-over, the answer goes on with the same tokens.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm.model.draw import Draw, sample_seed
from minillm.serve.ranks.part import group_of
from minillm.serve.requests.params import SamplingParams, Token
from minillm.serve.transfer.prefill import PrefillSide

if TYPE_CHECKING:
    from minillm.serve.engine import LLM


@dataclass(frozen=True)
class Moved:
    """A request between two engines. answer: its tokens so far. draws: random numbers that these took."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_tokens: frozenset[int]
    answer: tuple[Token, ...]
    draws: int
    priority: int
    salt: str | None
    timeout_s: float | None


def take_out(llm: "LLM", request_id: str) -> Moved:
    """Ends a request here, as cancelled, and returns what another engine needs to go on with it. ValueError if it has
    ended, has an adapter, or more than one sample that goes on."""
    with llm.stepping:
        request = llm.requests.live.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id!r} cannot be moved: it is unknown, has not begun, or has ended.")
        sample, several = request.samples[0], len(request.samples) > 1
        if several or sample.adapter is not None:
            what = f"{len(request.samples)} samples" if several else "an adapter"
            raise ValueError(f"request {request_id!r} has {what} and cannot be moved: let it end where it is.")
        answer = tuple(sample.answer())
        draws = sample.draw.count
        if llm.speculation is None:  # a token that is not read yet has taken one, too
            draws = len(answer) if request.params.temperature > 0 else 0
        about = (request.seed, request.stop_tokens, answer, draws, sample.priority, request.salt, request.timeout_s)
        llm.requests.end(request, "cancelled")
        return Moved(tuple(request.prompt), request.params, *about)


def put_in(llm: "LLM", moved: Moved, request_id: str | None = None) -> str:
    """Queues it, and returns its id here. Its output is the whole answer; times count from now. Errors: see
    `LLM.add`."""
    options = {"priority": moved.priority, "salt": moved.salt, "timeout_s": moved.timeout_s}
    request = llm.requests.request(list(moved.prompt), moved.params, **options)
    sample = request.samples[0]
    request.seed, request.stop_tokens = moved.seed, moved.stop_tokens
    sample.draw = Draw(sample_seed(moved.seed, 0))
    sample.draw.count = moved.draws
    for token in moved.answer:
        sample.accept(token)
    llm.requests.submit(request, request_id)
    return request.request_id


@contextmanager
def keys_offered(llm: "LLM", address: str = "127.0.0.1:0") -> Iterator[str]:
    """Until it is left, an engine hands keys over to whoever asks at the address that this yields, and computes them
    first if need be. ValueError for one over ranks."""
    if (group := group_of(llm.model)) is not None:
        raise ValueError(
            f"keys_offered with an engine over {group.world_size} ranks, of which each has its own heads: use an "
            "engine that has the whole model."
        )
    side = PrefillSide(None, address).attach(llm, llm.model.config)
    thread = threading.Thread(target=side.serve, args=(llm,), name="minillm offers keys", daemon=True)
    thread.start()
    try:
        yield side.addresses[0]
    finally:
        side.close()
        thread.join()
        llm.core.builder.sends_of = None
