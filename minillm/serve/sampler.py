"""The next token of every sequence of a batch at once, on the device of the logits; only token ids leave it.

The same tokens as `sampling.sample` one by one (which is shorter to read and slower), because the random number of a
row comes from its own `Draw` and is used in the same way: the token at which the running sum of the row's weights, in
order of token id, passes it. Rounding aside, a row's token does not depend on the rows beside it or on the device.

No vocabulary is sorted: top-k and top-p look at a row's CANDIDATES likeliest tokens, which nearly always hold all that
they keep. For the rows where they do not, a flat distribution or a large top-k, histograms of the weights find the
least one that is kept (radix selection, as in Alabi et al. 2012).
"""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

from minillm.model.draw import Draw
from minillm.serve.sampling import COLDEST, SamplingParams, Token, described, penalised

CANDIDATES = 1024
Row = tuple[SamplingParams, Sequence[int], Draw]  # what a row's request wants; its prompt and answer so far; its draws


def sample_batch(logits: Tensor, rows: Sequence[Row], likeliest: Tensor | None = None) -> list[Token]:
    """One token for each row. logits: [rows, vocab_size], float32, not changed. likeliest: [rows], if known already."""
    if likeliest is not None and all([params.plain for params, _, _ in rows]):
        return [plain_token(token) for token in likeliest.tolist()]
    scores = _penalised(logits, rows)
    ids = scores.argmax(-1) if likeliest is None or scores is not logits else likeliest
    drawn = [index for index, (params, _, _) in enumerate(rows) if params.temperature > 0]
    if drawn:
        if len(drawn) < len(rows):
            scores = scores[drawn]
        ids = ids.clone()
        ids[drawn] = _draw_all(scores, [rows[index] for index in drawn])
    tokens = ids.tolist()
    wants = [params.logprobs is not None for params, _, _ in rows]
    return [
        described(token, logits[index].cpu(), rows[index][0]) if wants[index] else plain_token(token)
        for index, token in enumerate(tokens)
    ]


@lru_cache(maxsize=1 << 16)
def plain_token(token: int) -> Token:
    """One object for all the times that a token is sampled: it never changes."""
    return Token(token)


def _penalised(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The logits after the repetition penalty; the very same tensor if no row has one."""
    wanted = [index for index, (params, _, _) in enumerate(rows) if params.repetition_penalty != 1]
    if wanted:
        logits = logits.clone()
        for index in wanted:
            logits[index] = penalised(logits[index], rows[index][0], rows[index][1])
    return logits


def _draw_all(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    """[rows], each drawn from softmax(scores / temperature) after its own top-k, top-p and min-p."""

    def column(values: list, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(scores.device, non_blocking=True)[:, None]

    heat = column([max(params.temperature, COLDEST) for params, _, _ in rows])
    weights = (scores - scores.amax(-1, keepdim=True)).div_(heat).exp_()  # the likeliest token's is 1
    uniforms = column([draw.uniform() for _, _, draw in rows], torch.float64)
    vocab_size = scores.shape[1]
    top_k = [min(params.top_k or vocab_size, vocab_size) for params, _, _ in rows]
    top_p, min_p = [params.top_p for params, _, _ in rows], [params.min_p for params, _, _ in rows]
    cut = [index for index in range(len(rows)) if top_k[index] < vocab_size or top_p[index] < 1]
    free = [index for index in range(len(rows)) if index not in set(cut)]
    ids = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    if free:
        part = weights if not cut else weights[free]
        if any(min_p[index] for index in free):
            part = part * (part >= column([min_p[index] for index in free]))
        ids[free] = _inverse_transform(part, uniforms[free])
    near = [index for index in cut if top_k[index] < CANDIDATES or top_k[index] == vocab_size]
    far = [index for index in cut if CANDIDATES <= top_k[index] < vocab_size]

    def limits(part: list[int]) -> tuple[Tensor, ...]:
        """Of these rows: weights, uniforms, top_k, top_p, min_p."""
        kinds = ((top_k, torch.int64), (top_p, torch.float64), (min_p, torch.float32))
        columns = [column([values[index] for index in part], kind) for values, kind in kinds]
        return weights if len(part) == len(rows) else weights[part], uniforms[part], *columns

    if near:
        count = max(CANDIDATES if top_k[index] == vocab_size else top_k[index] + 1 for index in near)
        ids[near], complete = _from_candidates(*limits(near), count=min(count, vocab_size))
        far += [index for index, done in zip(near, complete.tolist(), strict=True) if not done]
    if far:
        ids[far] = _from_all(*limits(far))
    return ids


def _from_candidates(
    weights: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, count: int
) -> tuple[Tensor, Tensor]:
    """([rows] token ids, [rows] whether the `count` likeliest tokens were enough to know them)."""
    ids = weights.topk(count).indices.sort().values
    values, order = weights.gather(1, ids).sort(dim=1, descending=True, stable=True)  # of equals, the lowest id first
    ids = ids.gather(1, order)
    keep = torch.arange(count, device=weights.device) < top_k
    everything = torch.where(top_k < weights.shape[1], (values * keep).sum(-1, True), weights.sum(-1, True))
    shares = values.double() * keep / everything
    keep &= shares.cumsum(-1) - shares < top_p
    least = values.gather(1, keep.sum(-1, keepdim=True) - 1)
    complete = (values[:, -1:] < least)[:, 0] | (count == weights.shape[1])  # else an equal one may be left out
    keep &= values >= min_p
    ids, order = ids.sort(dim=1)
    places = _inverse_transform((values * keep).gather(1, order), uniforms)
    return ids.gather(1, places[:, None])[:, 0], complete


def _from_all(weights: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[rows] token ids, however many tokens are kept."""
    if (top_k < weights.shape[1]).any():
        weights = _largest(weights, torch.ones_like(weights), top_k.double())
    if (top_p < 1).any():
        weights = _largest(weights, weights, top_p * weights.sum(-1, keepdim=True, dtype=torch.float64))
    return _inverse_transform(weights * (weights >= min_p), uniforms)


def _largest(weights: Tensor, masses: Tensor, limit: Tensor) -> Tensor:
    """weights, but 0 for all except the largest: as many as it takes for their masses to reach limit [rows, 1].

    Of equal weights the lowest ids stay. The bits of a float from 0 to 1, read as a whole number, are in the floats'
    order, so the least weight that stays is found ten bits at a time.
    """
    bits = weights.view(torch.int32)
    found, above = _last_bucket(bits >> 20, masses, limit)
    for shift in (10, 0):
        inside = masses * (bits >> (shift + 10) == found)
        key, more = _last_bucket((bits >> shift) & 1023, inside, limit - above)
        found, above = (found << 10) | key, above + more
    least = found.int().view(torch.float32)
    equal = weights == least
    each = (masses * equal).amax(-1, keepdim=True)
    wanted = ((limit - above) / each).ceil()
    if (wanted < equal.sum(-1, keepdim=True)).any():
        equal &= equal.cumsum(-1) <= wanted
    return weights * ((weights > least) | equal)


def _last_bucket(keys: Tensor, masses: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """([rows, 1] the key below 1024 at which the masses, summed from the largest key down, reach limit; the sum before
    it). keys, masses: [rows, n]."""
    sums = torch.zeros((len(keys), 1024), dtype=torch.float64, device=keys.device)
    sums.scatter_add_(1, keys.bitwise_xor(1023).long(), masses.double())  # the largest key first
    before = sums.cumsum(1) - sums
    possible = (before < limit) & (sums > 0)
    last = (possible * torch.arange(1024, device=keys.device)).amax(-1, keepdim=True)
    return last ^ 1023, before.gather(1, last)


def _inverse_transform(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[rows]: where the running sum of weights [rows, n] passes uniforms [rows, 1] of the whole.

    In two levels, because a running sum in float64 over a whole vocabulary is slow: first over the sums of pieces,
    then inside the piece that was found. A weight of 0 is never chosen.
    """
    n = weights.shape[1]
    size = isqrt(n)
    pieces = weights[:, : n // size * size].unflatten(1, (-1, size)).sum(-1)
    sums = torch.cat((pieces, weights[:, n // size * size :].sum(-1, keepdim=True)), dim=1).double().cumsum(1)
    target = uniforms * sums[:, -1:]
    piece = torch.minimum(
        torch.searchsorted(sums, target, right=True), torch.searchsorted(sums, sums[:, -1:].contiguous())
    )
    before = torch.where(piece > 0, sums.gather(1, (piece - 1).clamp(min=0)), 0)
    places = piece * size + torch.arange(size, device=weights.device)
    inside = weights.gather(1, places.clamp(max=n - 1)).double() * (places < n)
    running = before + inside.cumsum(1)
    place = torch.minimum(
        torch.searchsorted(running, target, right=True), torch.searchsorted(running, running[:, -1:].contiguous())
    )
    return places.gather(1, place)[:, 0]
