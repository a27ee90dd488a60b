"""What a user gets of a request: the whole `Output` once it has ended, and `Delta`s while its samples grow.

All of it is made from a `Request` when it is asked for; nothing here is changed afterwards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from minillm.serve.requests.params import Token

if TYPE_CHECKING:
    from minillm.serve.requests.request import Request, Sample
    from minillm.serve.requests.table import RequestTable


@dataclass(frozen=True)
class Timing:
    """Seconds on the engine's clock at which a request arrived, was first scheduled, had its first token, ended."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def queue(self) -> float | None:
        return _between(self.arrived, self.scheduled)

    @property
    def prefill(self) -> float | None:
        return _between(self.scheduled, self.first_token)

    @property
    def ttft(self) -> float | None:
        """Time to first token, the wait in the queue included."""
        return _between(self.arrived, self.first_token)

    @property
    def end_to_end(self) -> float | None:
        return _between(self.arrived, self.ended)

    def tpot(self, tokens: int) -> float | None:
        """Time per output token after the first, of an answer of so many tokens."""
        decoding = _between(self.first_token, self.ended)
        return None if decoding is None or tokens < 2 else decoding / (tokens - 1)


@dataclass(frozen=True)
class Answer:
    """One of a request's n samples. reason: "stop", "length", "cancelled", "timeout" or "failed".

    tokens: without the stop token. text: up to the stop text; empty without a tokenizer.
    """

    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    reason: str | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True)
class Output:
    """A request that ended. error: why it failed. seed: of its draws, the one it asked for or a fresh one. computed,
    hit: prompt and answer tokens put through the model, and taken from the prefix cache; preemptions: how often it lost
    its blocks; passes: forward passes that it took part in after its first token; drafted, accepted: draft
    tokens checked in them, and how many were right (all samples together).
    """

    request_id: str
    prompt: list[int]
    answers: list[Answer]
    timing: Timing
    error: str | None = None
    computed: int = 0
    hit: int = 0
    preemptions: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    seed: int = 0


def output_of(request: "Request") -> Output:
    """As it is now; final once the request has ended."""
    samples = request.samples
    return Output(
        request.request_id,
        request.prompt,
        [Answer(sample.answer(), sample.text, sample.reason) for sample in samples],
        Timing(request.arrived, request.scheduled, request.first_token, request.ended),
        request.error,
        computed=sum(sample.forwarded for sample in samples),
        hit=sum(sample.hit_tokens for sample in samples),
        preemptions=sum(sample.preemptions for sample in samples),
        passes=sum(max(0, sample.passes - 1) for sample in samples),
        drafted=sum(sample.drafted for sample in samples),
        accepted=sum(sample.accepted for sample in samples),
        seed=request.seed,
    )


class Delta(NamedTuple):
    """What a stream hands over: new tokens of one sample, and the text that is certain since. The text may lag behind
    its tokens: half a character and what may become a stop text are held back."""

    sample: int
    tokens: list[Token]
    text: str


class OutputCursor:
    """What is new of a request's samples since it was last asked for. Steps may go on in other threads meanwhile."""

    def __init__(self, request: "Request"):
        self.request = request
        self._shown = [(0, 0) for _ in request.samples]  # tokens and characters of each

    def poll(self) -> tuple[list[Delta], bool]:
        """(the deltas, whether these were the last)."""
        ended = self.request.ended is not None  # asked before the tokens
        deltas = []
        for sample in self.request.samples:
            shown, characters = self._shown[sample.index]
            tokens, text = sample.answer(shown), _safe_text(sample)
            if tokens or len(text) > characters:
                deltas.append(Delta(sample.index, tokens, text[characters:]))
                self._shown[sample.index] = shown + len(tokens), len(text)
        return deltas, ended

    def failure(self) -> RuntimeError | None:
        """Why the request failed, if it did."""
        request = self.request
        return request.error and RuntimeError(f"request {request.request_id!r} failed: {request.error}")


def deltas_of(
    request: "Request", request_id: str | None, table: "RequestTable", advance: Callable[[], None]
) -> Iterator[Delta]:
    """Submits the request, and steps until it has ended. First nothing, so that the caller can enter the `try`; then
    what is new, sample by sample. RuntimeError, after the last token, if it failed."""
    news, ended = OutputCursor(request), False
    try:
        table.submit(request, request_id)
        yield None
        while not ended:
            if request.ended is None:
                advance()
            deltas, ended = news.poll()
            yield from deltas
    finally:  # only a mark, which the next step carries out: the garbage collector may close this at any moment
        table.cancelled.append(request)
    if (failure := news.failure()) is not None:
        raise failure


def _safe_text(sample: "Sample") -> str:
    """The answer's text but for an end that may become a stop text, which would be cut off."""
    text = sample.text
    if sample.reason is not None:
        return text
    held = 0
    for stop in sample.request.params.stop:
        sizes = range(min(len(stop) - 1, len(text)), held, -1)
        held = next((size for size in sizes if text.endswith(stop[:size])), held)
    return text[: len(text) - held]


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
