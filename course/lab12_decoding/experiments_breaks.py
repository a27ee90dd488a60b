"""Lab 12's broken decoders, and one that is not: greedy tokens that depend on how tokens share passes.

Each decoder reads the prompt of a real text, then the rest of it one token at a time, as if it had written it itself
(teacher forcing): so all see the same tokens, and what differs are their logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.lab12_decoding.decoders import Attend, Cache
from course.lab12_decoding.experiments import target, windows
from course.shared.measuring import one_thread
from minillm.model.generate import KVCache

ANSWERS = answers_of("12_decoding")


PROMPT, LENGTH = 32, 104


def appended_after(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """In decode a token attends to what was kept before it came; then it is kept."""
    if not start:
        return ANSWERS.attend(q, k, v, keys, values, start)
    y = _over(q, keys[:, :start], values[:, :start])
    keys[:, start : start + 1], values[:, start : start + 1] = k, v
    return y


def mask_without_offset(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """The mask of a pass that starts at 0: the first query sees the first key (gpt-fast#233)."""
    right = ANSWERS.attend(q, k, v, keys, values, start)
    return right if not start else _over(q, keys[:, :1], values[:, :1])


def whole_room(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """In decode all places of a cache that was made of zeros are attended to, filled or not."""
    right = ANSWERS.attend(q, k, v, keys, values, start)
    if not start:
        keys[:, k.shape[1] :], values[:, k.shape[1] :] = 0.0, 0.0
        return right
    return _over(q, keys, values)


def _over(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    group = q.shape[0] // keys.shape[0]
    scores = q @ keys.repeat_interleave(group, 0).mT * q.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1) @ values.repeat_interleave(group, 0)


@dataclass(frozen=True)
class Decoder:
    """attend: of the cache. shift: added to the positions of decoded tokens; everywhere: of the prompt's, too."""

    attend: Attend = ANSWERS.attend
    shift: int = 0
    everywhere: int = 0


DECODERS = {
    "right": Decoder(),
    "position + 1 in decode": Decoder(shift=1),
    "every position + 100": Decoder(everywhere=100),
    "appended after attention": Decoder(appended_after),
    "mask without offset": Decoder(mask_without_offset),
}
PATIENTS = {"A": Decoder(whole_room), "B": Decoder(shift=1), "C": Decoder(appended_after)}
DISEASES = {"A": "attends to empty places", "B": "is off by one position", "C": "appends too late"}


@one_thread()
@torch.no_grad()
def read(decoder: Decoder, ids: Tensor, room: int = LENGTH) -> Tensor:
    """Logits after each token from the last of the prompt on: [LENGTH - PROMPT, vocab]. ids: [LENGTH]."""
    model = target()
    cache = Cache(model.config, room, decoder.attend)
    found = [model(ids[None, :PROMPT], torch.arange(PROMPT) + decoder.everywhere, attention=cache)[:, -1]]
    for place in range(PROMPT, LENGTH - 1):
        position = torch.tensor([place + decoder.shift + decoder.everywhere])
        found.append(model(ids[None, place : place + 1], position, attention=cache)[:, -1])
    return torch.cat(found)


@dataclass(frozen=True)
class Symptoms:
    """Of one decoder beside the right one. apart: largest difference of a logit; nll: mean, nats per token; agree:
    share of greedy tokens that are the same; kl: KL(right ‖ broken) at each position, in nats."""

    apart: float
    nll: float
    agree: float
    kl: list[float]


@cache
def _right() -> tuple[Tensor, Tensor]:
    ids = windows(1, LENGTH)[0]
    return ids, read(Decoder(), ids)


@cache
def symptoms(decoder: Decoder, room: int = LENGTH) -> Symptoms:
    ids, right = _right()
    found = read(decoder, ids, room)
    log_right, log_found = (x.log_softmax(-1) for x in (right, found))
    nll = -log_found.gather(1, ids[PROMPT:, None]).mean()
    return Symptoms(
        apart=(found - right)[1:].abs().max().item(),
        nll=nll.item(),
        agree=(found.argmax(-1) == right.argmax(-1)).float().mean().item(),
        kl=(log_right.exp() * (log_right - log_found)).sum(-1).clamp(min=0).tolist(),
    )


@cache
def all_symptoms() -> dict[str, Symptoms]:
    return {name: symptoms(decoder) for name, decoder in DECODERS.items()}


@cache
def patients(rooms: tuple[int, ...] = (LENGTH, 2 * LENGTH)) -> dict[str, dict[int, Symptoms]]:
    """{patient: {places in the cache: symptoms}}."""
    return {name: {room: symptoms(decoder, room) for room in rooms} for name, decoder in PATIENTS.items()}


# The same tokens in other passes.


@dataclass(frozen=True)
class Precision:
    """apart: largest difference of a logit; changed: greedy tokens that became others, of `tokens`; gap: the largest
    lead that the likeliest token had where it lost it; ties: places where two tokens share the lead."""

    apart: float
    changed: int
    tokens: int
    gap: float
    ties: int


def in_other_passes(dtype: torch.dtype, batch: int = 8, length: int = 64, piece: int = 7) -> Precision:
    """The same sequences in one pass, and in pieces, as when a token budget is shared with other requests."""
    model, ids = target(dtype), windows(batch, length)
    whole, pieces = (_logits(model, ids, size) for size in (length, piece))
    changed = whole.argmax(-1) != pieces.argmax(-1)
    best = whole.topk(2, dim=-1).values
    lead = best[..., 0] - best[..., 1]
    gap = lead[changed].max().item() if changed.any() else 0.0
    apart = (whole - pieces).abs().max().item()
    return Precision(apart, int(changed.sum()), changed.numel(), gap, int((lead == 0).sum()))


@one_thread()
@torch.no_grad()
def _logits(model: Callable, ids: Tensor, piece: int) -> Tensor:
    """ids: [batch, length], put through in pieces -> float64 logits [batch, length, vocab]."""
    cache = KVCache(model.config, ids.shape[1], batch=len(ids), dtype=model.embedding.weight.dtype)
    run = partial(model, attention=cache)
    starts = range(0, ids.shape[1], piece)
    found = [run(part, torch.arange(s, s + part.shape[1])) for s, part in zip(starts, ids.split(piece, 1), strict=True)]
    return torch.cat(found, dim=1).double()
