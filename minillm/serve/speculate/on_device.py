"""Drafts drawn and verified where the logits are, all sequences at once; the host reads a few numbers a row, once.

    logits [rows, vocab_size] ──▶ distributions p ──▶ residual max(p - q, 0) of guesses that were drawn from q ──▶ draw
                                        └──▶ p(x) / q(x) against the row's random number: accepted?

The same as `verify.verify` row by row, which is shorter to read: a guess is accepted by random number i of its sequence
and its residual drawn by number i + 1, and both are known before it is known which of the two is wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.draw import COLDEST, Draw
from minillm.model.paged.tables import to_device
from minillm.serve.requests.params import SamplingParams, Token
from minillm.serve.run.penalties import Penalised, Penalties, SeenOnHost
from minillm.serve.sample.batch import NOT_FINITE, inverse_transform
from minillm.serve.sample.reference import RULED_OUT, Random, choose
from minillm.serve.sample.seen import SeenTokens
from minillm.serve.sample.selection import PIECE
from minillm.serve.speculate.proposal import Draft, DraftRequest
from minillm.serve.speculate.verify import verify_greedy

ROWS_AT_ONCE = {"cpu": 8}  # of a vocabulary's size; on other devices OTHER_ROWS
OTHER_ROWS = 64


@dataclass(frozen=True)
class RowToVerify:
    """Row of logits after `before`, the guesses of its pass that come before it. guess: what stands there in the draft;
    None = nothing, it is the bonus. q: [vocab_size], what the guess was drawn from; None = not drawn. uniforms: random
    numbers i and i + 1 of its sequence. seen_row, sequence, tokens: for the penalty, see `SeenOnHost`."""

    params: SamplingParams
    before: list[int]
    guess: int | None
    q: Tensor | None
    uniforms: tuple[float, float]
    seen_row: int
    sequence: object
    tokens: Sequence[int]


class Verdict(NamedTuple):
    """likeliest: of the logits, NOT_FINITE if they are not finite. accepted: the guess, which was drawn. token: what
    comes instead of it, or after the last one."""

    likeliest: int
    token: int
    accepted: bool


def verdicts(logits: Tensor, rows: Sequence[RowToVerify], host: SeenOnHost, seen: SeenTokens) -> list[Verdict]:
    """Of each row. logits: [rows, vocab_size]."""
    size = ROWS_AT_ONCE.get(logits.device.type, OTHER_ROWS)
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    found = torch.cat([_verdicts(logits[part], rows[part], host, seen) for part in parts])
    return [Verdict(likeliest, token, bool(accepted)) for likeliest, token, accepted in found.tolist()]


def accepted_tokens(draft: Draft, found: Sequence[Verdict], params: SamplingParams) -> tuple[list[int], int]:
    """(the accepted guesses and one token more, how many random numbers that took), as `verify.verify`."""
    if params.temperature == 0:
        return verify_greedy([verdict.token for verdict in found], draft), 0
    ids: list[int] = []
    for verdict, guess in zip(found, draft.tokens, strict=False):
        if draft.probabilities is not None and verdict.accepted:
            ids.append(guess)
            continue
        ids.append(verdict.token)
        if draft.probabilities is not None:
            return ids, len(ids) + 1
        if verdict.token != guess:
            return ids, len(ids)
    if len(found) > len(draft.tokens):
        ids.append(found[len(draft.tokens)].token)
    return ids, len(ids)


def distributions(
    logits: Tensor, params: Sequence[SamplingParams], seen: Sequence[Sequence[int]], drafted: Tensor | None = None
) -> Tensor:
    """[rows, vocab_size], `verify.distribution` of each row. drafted: [rows, n], ids seen besides, on the device."""
    penalised = [row for row, each in enumerate(params) if each.repetition_penalty != 1]
    if penalised:
        wanted = [Penalised(row, params[row].repetition_penalty, row, row, seen[row]) for row in penalised]
        table = SeenTokens()
        logits = table.penalised(logits, SeenOnHost().penalties(wanted), None, drafted)
    return warped(logits, params)


def warped(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """softmax of each row after its temperature, top-k, top-p and min-p, in `reference.filtered`'s order; temperature
    0: 1 at the likeliest. scores: [rows, vocab_size], after the penalty."""
    vocab_size, device = scores.shape[1], scores.device
    columns = [[each.temperature, min(each.top_k or vocab_size, vocab_size), each.top_p, each.min_p] for each in params]
    on_host = np.array(columns, np.float64).T
    cut = np.flatnonzero((on_host[1] < vocab_size) | (on_host[2] < 1))
    settings, index = to_device([on_host.view(np.int64).copy(), cut], device)
    temperature, top_k, top_p, min_p = settings.view(torch.float64).float()[..., None]
    logits = (scores - scores.amax(-1, keepdim=True)) / temperature.clamp(min=COLDEST)
    if len(cut):
        k, p = top_k.index_select(0, index), top_p.index_select(0, index)
        ordered, order = logits.index_select(0, index).sort(dim=1, descending=True, stable=True)
        ordered = ordered.masked_fill(torch.arange(vocab_size, device=device) >= k, RULED_OUT)
        shares = ordered.softmax(-1)
        kept = (shares.cumsum(-1) - shares < p) | (p >= 1)
        part = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(~kept, RULED_OUT))
        logits = logits.index_copy(0, index, part)
    shares = logits.softmax(-1)
    if on_host[3].any():
        shares = logits.masked_fill(shares < min_p * shares.amax(-1, keepdim=True), RULED_OUT).softmax(-1)
    if (on_host[0] == 0).any():
        likeliest = torch.zeros_like(shares).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
        shares = torch.where(temperature == 0, likeliest, shares)
    return shares


def draw_from(weights: Tensor, draws: Sequence[Random | float]) -> Tensor:
    """[rows], ids on the device of weights [rows, vocab_size]. draws: of each row, or the random number itself."""
    if not all(isinstance(draw, Draw | float) for draw in draws):  # a generator, or what says itself what it draws
        return torch.tensor(
            [choose(row, draw) for row, draw in zip(weights, draws, strict=True)], device=weights.device
        )
    numbers = np.array([draw if isinstance(draw, float) else draw.uniform() for draw in draws])
    [uniforms] = to_device([numbers.view(np.int64)], weights.device)
    padded = F.pad(weights, (0, -weights.shape[1] % PIECE))
    return inverse_transform(padded, uniforms.view(torch.float64)[:, None]).clamp(max=weights.shape[1] - 1)


def next_guesses(
    logits: Tensor, asked: Sequence[DraftRequest], before: Tensor | None = None, *, drawn: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(the next draft token of each, on the device, what they were drawn from; None = all are the likeliest).

    logits: [sequences, vocab_size]. before: [sequences, n], the draft tokens so far. drawn: False = the likeliest
    whatever the temperature.
    """
    params = [each.params if drawn else replace(each.params, temperature=0.0) for each in asked]
    if all(each.temperature == 0 and each.repetition_penalty == 1 for each in params):
        return logits.argmax(-1), None
    q = distributions(logits, params, [each.tokens for each in asked], before)
    draws = [0.0 if each.temperature == 0 else one.draw for each, one in zip(params, asked, strict=True)]
    return draw_from(q, draws), q


def described_rows(logits: Tensor, wanted: Sequence[tuple[int, int, int]]) -> list[Token]:
    """`reference.described` of (row of the logits, token, how many others) each, in one read."""
    rows, ids = (np.array([each[place] for each in wanted], np.int64) for place in (0, 1))
    index, own = to_device([rows, ids], logits.device)
    logprobs = torch.log_softmax(logits.index_select(0, index), dim=-1)
    top = logprobs.topk(min(max(count for *_, count in wanted), logits.shape[1]))
    columns = (logprobs.gather(1, own[:, None]).double(), top.indices.double(), top.values.double())
    found, most = torch.cat(columns, dim=1).tolist(), top.indices.shape[1]
    return [
        Token(token, row[0], tuple(zip(map(int, row[1 : 1 + most]), row[1 + most :], strict=True))[:count])
        for (_, token, count), row in zip(wanted, found, strict=True)
    ]


def _verdicts(logits: Tensor, rows: Sequence[RowToVerify], host: SeenOnHost, seen: SeenTokens) -> Tensor:
    """[rows, 3], int64, the fields of `Verdict`."""
    most, likeliest = logits.max(-1)
    flags = torch.where(most.isfinite(), likeliest, NOT_FINITE)
    penalties = _penalties(rows, host)
    scores = seen.penalised(logits, penalties, None)
    drawn = [place for place, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        tokens = scores.argmax(-1)
        return torch.stack((flags, tokens, torch.zeros_like(tokens)), dim=1)
    p = warped(scores, [row.params for row in rows])
    accepted = torch.zeros_like(flags)
    tried = [place for place in drawn if rows[place].q is not None and rows[place].guess is not None]
    numbers = [row.uniforms[0] for row in rows]
    if tried:
        q = torch.stack([rows[place].q.to(device=p.device, dtype=p.dtype, non_blocking=True) for place in tried])
        guesses, uniforms = [rows[place].guess for place in tried], np.array([numbers[place] for place in tried])
        places, ids, u = to_device(
            [np.array(tried, np.int64), np.array(guesses, np.int64), uniforms.view(np.int64)], p.device
        )
        right = p.index_select(0, places)
        odds = right.gather(1, ids[:, None])[:, 0].double() / q.gather(1, ids[:, None])[:, 0].double()
        accepted = accepted.index_copy(0, places, (u.view(torch.float64) < odds).long())
        left = (right - q).clamp(min=0)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, right)
        p = p.index_copy(0, places, left)
        for place in tried:
            numbers[place] = rows[place].uniforms[1]
    return torch.stack((flags, draw_from(p, numbers), accepted), dim=1)


def _penalties(rows: Sequence[RowToVerify], host: SeenOnHost) -> Penalties:
    """With the guesses before each row as tokens that this row alone has seen."""
    asked = [place for place, row in enumerate(rows) if row.params.repetition_penalty != 1]
    wanted = [
        Penalised(
            place,
            rows[place].params.repetition_penalty,
            rows[place].seen_row,
            rows[place].sequence,
            rows[place].tokens,
        )
        for place in asked
    ]
    extra = [(number, guess) for number, place in enumerate(asked) for guess in rows[place].before]
    return host.penalties(wanted, extra)
