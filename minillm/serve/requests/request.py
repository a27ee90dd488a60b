"""A request and its samples: one object for each, which holds all that is known of it until it has ended.

prompt, params ──new_request──▶ Request ── its n samples ──▶ Sample, which the scheduler sees as a Sequence
a step's tokens ──Sample.accept──▶ Sample.tokens: prompt and answer. Nothing else appends a token that was sampled.
the last sample has ended ──output_of──▶ Output, which the user gets (`output.py`)
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

from minillm.data import Tokenizer
from minillm.model import ModelConfig
from minillm.model.draw import Draw, sample_seed
from minillm.model.hf.generation_config import GenerationDefaults
from minillm.serve.numbers import check_whole
from minillm.serve.requests.params import SamplingParams, Token, plain_token
from minillm.serve.requests.prompts import prompt_ids
from minillm.serve.schedule.blocks import cache_namespace
from minillm.serve.schedule.sequence import Sequence

if TYPE_CHECKING:
    from minillm.adapters.store import Registered
    from minillm.serve.speculate.proposal import DraftState


@dataclass(eq=False)
class Request:
    """What was asked for, and when what became of it (seconds on the engine's clock, None = not yet).

    samples: its n. Only the first is scheduled until the prompt is computed; then the others share its blocks.
    awaited: by the `generate` or `stream` that added it: `LLM.step` does not return it. error: why it failed.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_tokens: frozenset[int]
    arrived: float
    timeout_s: float | None = None
    awaited: bool = False
    salt: str | None = None
    request_id: str = ""
    samples: list["Sample"] = field(default_factory=list, repr=False)
    scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None
    error: str | None = None

    def name(self, request_id: str) -> None:
        self.request_id = request_id
        for sample in self.samples:
            sample.name = f"{request_id}/{sample.index}"


@dataclass(eq=False, kw_only=True)
class Sample(Sequence):
    """One of a request's n samples: a sequence whose tokens behind the prompt are the answer.

    draw: its random numbers. plain: it wants the likeliest tokens and only their ids. push: the tokenizer's stream,
    token ids in, finished text out. text: the answer's, up to a stop text. logprobs: of each token of the answer, its
    own and those of the likeliest, if asked for. reason: see `Answer`; None = it goes on. passes: forward passes that
    gave it tokens. drafted, accepted: draft tokens checked in them, and how many were right. drafting: `Speculation`'s.
    """

    request: Request
    index: int
    draw: Draw
    plain: bool = False
    push: Callable[..., str] | None = None
    text: str = ""
    logprobs: list[tuple[float, tuple]] = field(default_factory=list)
    reason: str | None = None
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    drafting: "DraftState | None" = None

    def accept(self, token: Token) -> str | None:
        """Adds the token to the answer. Returns why the answer ends with it, None if it goes on."""
        request, tokens = self.request, self.tokens
        if token.id in request.stop_tokens:
            return "stop"
        if not self.plain and request.params.logprobs is not None:
            self.logprobs.append((token.logprob, token.top))  # before the id, see `answer`
        tokens.append(token.id)
        if self.push is not None:
            known, text = len(self.text), self.text + self.push(token.id)
            stops = request.params.stop  # a stop text may have begun in tokens before this one
            found = [text.find(stop, max(0, known - len(stop) + 1)) for stop in stops]
            if cuts := [place for place in found if place >= 0]:
                self.text, self.push = text[: min(cuts)], None  # never shown uncut, whoever reads it meanwhile
                return "stop"
            self.text = text
        return "length" if len(tokens) == self.limit else None

    def answer(self, start: int = 0) -> list[Token]:
        """The answer's tokens from number `start` on; also from another thread, while a step adds to them."""
        ids = [token for token in self.tokens[len(self.request.prompt) + start :] if token >= 0]  # no placeholders
        if self.request.params.logprobs is None:
            return [plain_token(token) for token in ids]
        return [Token(token, *logprobs) for token, logprobs in zip(ids, self.logprobs[start:], strict=False)]

    def close(self, reason: str) -> None:
        self.reason = reason
        if self.push is not None:  # half a character at the end
            self.text += self.push(final=True)


def new_request(
    prompt: str | list[int],
    params: SamplingParams | None,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    now: float,
    *,
    priority: int = 0,
    salt: str | None = None,
    timeout_s: float | None = None,
    adapter: "Registered | None" = None,
    awaited: bool = False,
    generation: GenerationDefaults | None = None,
) -> Request:
    """A request that has just arrived, and its samples; see `LLM.add`. ValueError for what the model cannot take.

    generation: what the model's folder says. Its end tokens and the tokenizer's stop it, unless params say not.
    """
    generation = generation or GenerationDefaults()
    params = params or SamplingParams(**generation.sampling)
    tokens = prompt_ids(prompt, params, tokenizer, config)
    priority = check_whole("priority", priority)
    if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s > 0):
        raise ValueError(f"timeout_s {timeout_s!r} must be above 0, or None.")
    if not isinstance(salt, str | None):
        raise ValueError(f"salt {salt!r} must be a text, or None.")
    limit = min(len(tokens) + params.max_tokens, config.max_seq_len)
    stops = set(params.stop_tokens)
    if not params.ignore_eos:
        stops.update(generation.eos_ids)
        if tokenizer is not None and tokenizer.eos is not None:
            stops.add(tokenizer.eos_id)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    request = Request(tokens, params, seed, frozenset(stops), now, timeout_s, awaited, salt)
    shared = {"priority": priority, "request": request, "origin": cache_namespace(adapter and adapter.cache_key, salt)}
    shared |= {"adapter": adapter and adapter.number, "plain": params.greedy_only and not params.first_tokens}
    for index in range(params.n):
        own = {"index": index, "draw": Draw(sample_seed(seed, index)), "push": tokenizer and tokenizer.stream()}
        request.samples.append(Sample(list(tokens), limit, **shared, **own))
    request.samples[0].num_seqs = params.n  # it stands for all of them until its prompt is computed
    return request
