"""The next token of every sequence of a batch at once, on the device of the logits; only token ids leave it.

The same tokens as `sampling.sample` one by one (which is shorter to read and slower), because the random number of a
row comes from its own `Draw` and is used in the same way: the token at which the running sum of the row's weights, in
order of token id, passes it. Rounding aside, a row's token does not depend on the rows beside it or on the device.

No vocabulary is sorted: top-k and top-p look at a row's CANDIDATES likeliest tokens, which nearly always hold all that
they keep; the few rows where they do not are done again with the whole vocabulary.
"""

from collections.abc import Sequence
from math import isqrt

import torch
from torch import Tensor

from minillm.model.draw import Draw
from minillm.serve.sampling import COLDEST, SamplingParams, Token, described, penalised

CANDIDATES = 1024
Row = tuple[SamplingParams, Sequence[int], Draw]  # what a row's request wants; its prompt and answer so far; its draws


def sample_batch(logits: Tensor, rows: Sequence[Row], likeliest: Tensor | None = None) -> list[Token]:
    """One token for each row. logits: [rows, vocab_size], float32, not changed. likeliest: [rows], if known already."""
    if likeliest is not None and all(_plain(params) for params, _, _ in rows):
        return [Token(token) for token in likeliest.tolist()]
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
        described(token, logits[index].cpu(), rows[index][0]) if wants[index] else Token(token)
        for index, token in enumerate(tokens)
    ]


def _plain(params: SamplingParams) -> bool:
    """Is it the likeliest token, and nothing more?"""
    return params.temperature == 0 and params.repetition_penalty == 1 and params.logprobs is None


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
    needed = [top_k[index] + 1 for index in cut if top_k[index] < vocab_size]
    count = max([*needed, CANDIDATES if any(top_p[index] < 1 for index in cut) else 0])
    while cut:
        limits = [column([values[index] for index in cut], kind) for values, kind in _limits(top_k, top_p, min_p)]
        part = weights if len(cut) == len(rows) else weights[cut]
        ids[cut], complete = _from_candidates(part, uniforms[cut], *limits, count=min(count, vocab_size))
        cut = [index for index, done in zip(cut, complete.tolist(), strict=True) if not done]
        count *= 8
    return ids


def _limits(top_k: list[int], top_p: list[float], min_p: list[float]) -> tuple:
    return (top_k, torch.int64), (top_p, torch.float64), (min_p, torch.float32)


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
