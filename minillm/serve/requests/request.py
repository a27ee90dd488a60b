"""A request from prompt to output: its samples, what ends them, its times."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.data import Tokenizer
from minillm.model import ModelConfig
from minillm.model.draw import Draw, sample_seed
from minillm.serve.numbers import whole_numbers
from minillm.serve.requests.params import SamplingParams, Token
from minillm.serve.schedule.blocks import cache_namespace
from minillm.serve.schedule.sequence import Sequence


@dataclass
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


@dataclass
class Answer:
    """One of a request's n samples. reason: "stop", "length", "cancelled", "timeout" or "failed"; None = not ended.

    tokens: without the stop token. text: up to the stop text; empty without a tokenizer.
    """

    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    reason: str | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass
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


class Delta(NamedTuple):
    """What a stream hands over: new tokens of one sample, and the text that is certain since. The text may lag behind
    its tokens: half a character and what may become a stop text are held back."""

    sample: int
    tokens: list[Token]
    text: str


@dataclass(eq=False)
class Request:
    """A request on its way: its output so far, and its samples (one until its prompt is computed, then n)."""

    output: Output
    params: SamplingParams
    stop_tokens: frozenset[int]
    draws: list[Draw]  # the random numbers of its n samples
    limit: int  # tokens of a sample at most, prompt included
    samples: list["Sample"] = field(default_factory=list)
    priority: int = 0
    salt: str | None = None
    timeout_s: float | None = None
    awaited: bool = False  # by the `generate` or `stream` that added it: `step` does not return it

    def sequence(self) -> Sequence:
        """Of its prompt, for the scheduler."""
        origin = cache_namespace(None, self.salt)
        return Sequence(list(self.output.prompt), self.limit, self.params.n, self.priority, origin)

    def attach(self, sequence: Sequence, tokenizer: Tokenizer | None) -> "Sample":
        index, answer = len(self.samples), Answer()
        sequence.name = f"{self.output.request_id}/{index}"
        push = tokenizer and tokenizer.stream()
        self.samples.append(Sample(self, index, sequence, answer, self.draws[index], push))
        self.output.answers.append(answer)
        return self.samples[-1]


@dataclass(eq=False)
class Sample:
    """One sequence and the answer it becomes. push: the tokenizer's stream, token ids in, finished text out. passes:
    forward passes that gave it tokens."""

    request: Request
    index: int
    sequence: Sequence
    answer: Answer
    draw: Draw
    push: Callable[..., str] | None
    passes: int = 0

    def accept(self, token: Token) -> str | None:
        """Adds the token to the answer. Returns why the answer ends with it, None if it goes on."""
        request, answer, tokens = self.request, self.answer, self.sequence.tokens
        if token.id in request.stop_tokens:
            return "stop"
        answer.tokens.append(token)
        tokens.append(token.id)
        if self.push is not None:
            known, text = len(answer.text), answer.text + self.push(token.id)
            stops = request.params.stop  # a stop text may have begun in tokens before this one
            found = [text.find(stop, max(0, known - len(stop) + 1)) for stop in stops]
            if cuts := [place for place in found if place >= 0]:
                answer.text, self.push = text[: min(cuts)], None  # never shown uncut, whoever reads it meanwhile
                return "stop"
            answer.text = text
        return "length" if len(tokens) == self.sequence.limit else None

    @property
    def safe_text(self) -> str:
        """The answer's text but for an end that may become a stop text, which would be cut off."""
        text = self.answer.text
        if self.answer.reason is not None:
            return text
        held = 0
        for stop in self.request.params.stop:
            sizes = range(min(len(stop) - 1, len(text)), held, -1)
            held = next((size for size in sizes if text.endswith(stop[:size])), held)
        return text[: len(text) - held]

    def close(self, reason: str) -> None:
        self.answer.reason = reason
        if self.push is not None:  # half a character at the end
            self.answer.text += self.push(final=True)

    def add_stats_to_output(self) -> None:
        """What its sequence counted goes into the output of its request."""
        output, sequence = self.request.output, self.sequence
        output.hit += sequence.hit_tokens
        output.preemptions += sequence.preemptions
        output.computed += sequence.forwarded
        output.passes += max(0, self.passes - 1)


def new_request(
    prompt: list[int],
    params: SamplingParams,
    limit: int,
    tokenizer: Tokenizer | None,
    now: float,
    *,
    request_id: str = "",
    **options,
) -> Request:
    """A request that has just arrived, without samples yet. The tokenizer's end of text stops it, unless params say
    not. request_id: "" until it is submitted. options: the other fields of a `Request`."""
    stops = set(params.stop_tokens)
    if tokenizer is not None and tokenizer.eos is not None and not params.ignore_eos:
        stops.add(tokenizer.eos_id)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    draws = [Draw(sample_seed(seed, index)) for index in range(params.n)]
    output = Output(request_id, prompt, [], Timing(now), seed=seed)
    return Request(output, params, frozenset(stops), draws, limit, **options)


class OutputCursor:
    """What is new of a request's samples since it was last asked for. Steps may go on in other threads meanwhile."""

    def __init__(self, request: Request):
        self.request = request
        self._shown: list[tuple[int, int]] = []  # tokens and characters of each sample

    def poll(self) -> tuple[list[Delta], bool]:
        """(the deltas, whether these were the last)."""
        ended = self.request.output.timing.ended is not None  # asked before the tokens
        deltas = []
        for index, each in enumerate(list(self.request.samples)):
            tokens, text = list(each.answer.tokens), each.safe_text
            if index == len(self._shown):
                self._shown.append((0, 0))
            known, characters = self._shown[index]
            self._shown[index] = len(tokens), len(text)
            if len(tokens) > known or len(text) > characters:
                deltas.append(Delta(index, tokens[known:], text[characters:]))
        return deltas, ended

    def failure(self) -> RuntimeError | None:
        """Why the request failed, if it did."""
        output = self.request.output
        return output.error and RuntimeError(f"request {output.request_id!r} failed: {output.error}")


def pairs(prompts: list[str | list[int]], params: SamplingParams | list[SamplingParams] | None) -> list[tuple]:
    """(prompt, its params) of each; params: for all, or one for each."""
    if isinstance(prompts, str):
        raise ValueError("prompts is one text: give a list of prompts.")
    each = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(each)} params: give one for all, or one for each.")
    return list(zip(prompts, each, strict=True))


def prompt_ids(
    prompt: str | list[int], params: SamplingParams, tokenizer: Tokenizer | None, config: ModelConfig
) -> list[int]:
    """The prompt's token ids; ValueError if the model cannot take them."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params {params!r} must be SamplingParams, or None for the defaults.")
    if tokenizer is None and (isinstance(prompt, str) or params.stop):
        what = "the prompt" if isinstance(prompt, str) else f"stop {params.stop!r}"
        raise ValueError(f"{what} is text and this LLM has no tokenizer: pass tokenizer=, or token ids.")
    if isinstance(prompt, str):
        tokens = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(prompt)
    else:
        tokens = None if isinstance(prompt, set | frozenset) else whole_numbers(prompt)
        if tokens is None:
            raise ValueError(f"the prompt {prompt!r} must be a text or a list of token ids.")
    if not 0 < len(tokens) < config.max_seq_len:
        raise ValueError(f"a prompt of {len(tokens)} tokens does not fit: use 1 to {config.max_seq_len - 1}.")
    for token in (*tokens, *params.stop_tokens, *params.first_tokens):
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token id {token} is outside 0 .. {config.vocab_size - 1} (the vocabulary).")
    return list(tokens)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
