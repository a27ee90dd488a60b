"""The next token of every sequence of a batch at once, on the device of the logits; only token ids leave it.

The same tokens as `sampling.sample` one by one (which is shorter to read and slower), because the random number of a
row comes from its own `Draw` and is used in the same way: the token at which the running sum of the row's weights, in
order of token id, passes it. Rounding aside, a row's token does not depend on the rows beside it or on the device.

What the host knows (who wants what, the random numbers) goes to the device first, in a few copies that nobody waits
for; then everything is computed there without a question back, and `Drawn.read` reads it.

No vocabulary is sorted: top-k and top-p look at a row's CANDIDATES likeliest tokens, which nearly always hold all that
they keep. For the rows where they do not, a flat distribution or a large top-k, histograms of the weights find the
least one that is kept (radix selection, as in Alabi et al. 2012).
"""

from collections.abc import Callable, Sequence
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from minillm.model.block_tables import to_device
from minillm.model.draw import Draw
from minillm.serve.drawn import NOT_FINITE, UNDECIDED, Drawn
from minillm.serve.model_runner import resolved
from minillm.serve.sampling import COLDEST, SamplingParams, Token

CANDIDATES = 1024
Row = tuple[SamplingParams, Sequence[int], Draw]  # what a row's request wants; its prompt and answer so far; its draws


def sample_batch(logits: Tensor, rows: Sequence[Row]) -> list[Token | None]:
    """A token for each row, None where its logits are not finite. logits: [rows, vocab_size], float32, not changed."""
    return draw_batch(logits, rows).read()


def draw_batch(
    logits: Tensor, rows: Sequence[Row], places: Sequence[int] | None = None, drawn: Tensor | None = None
) -> Drawn:
    """What `sample_batch` gives, before the host reads it.

    places: of each row in the logits; None = they are in this order. drawn: what placeholders in the rows' tokens stand
    for, see `model_runner.resolved`.
    """
    most, likeliest = logits.max(-1)
    finite, plain = most.isfinite(), all([params.plain for params, _, _ in rows])
    if places is not None:
        [index] = _upload([places], logits.device)
        finite, likeliest = finite.index_select(0, index), likeliest.index_select(0, index)
        logits = logits if plain else logits.index_select(0, index)
    if plain:
        return Drawn(likeliest, torch.where(finite, likeliest, NOT_FINITE))
    scores = _penalised(logits, rows, drawn)
    ids = flags = likeliest if scores is logits else scores.argmax(-1)
    again = None
    warm = [row for row, (params, _, _) in enumerate(rows) if params.temperature > 0]
    wants = {row: params for row, (params, _, _) in enumerate(rows) if params.logprobs is not None}
    index, wanted = _upload([warm, list(wants)], logits.device)
    if warm:
        found, decided, again = _draw_all(scores, rows, warm, index)
        ids = ids.index_copy(0, index, found)
        flags = ids.index_copy(0, index, torch.where(decided, found, UNDECIDED))
    result = Drawn(ids, torch.where(finite, flags, NOT_FINITE), again)
    if wants:
        result.describe(wanted, wants, logits)
    return result


def _upload(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    return to_device([np.array(each, np.int64) for each in lists], device)


def _penalised(logits: Tensor, rows: Sequence[Row], drawn: Tensor | None) -> Tensor:
    """The logits after the repetition penalty (`sampling.penalised`); the very same tensor if no row has one."""
    places, ids, penalties = [], [], []
    for row, (params, tokens, _) in enumerate(rows):
        if params.repetition_penalty != 1:
            seen = set(tokens)
            ids += seen
            places += [row] * len(seen)
            penalties += [params.repetition_penalty] * len(seen)
    if not ids:
        return logits
    penalty = np.array(penalties).view(np.int64)
    places, ids, penalty = to_device([np.array(places), np.array(ids), penalty], logits.device)
    ids, penalty = resolved(ids, drawn), penalty.view(torch.float64).float()
    values = logits[places, ids]
    changed = torch.where(values > 0, values / penalty, values * penalty)
    return logits.index_put((places, ids), changed)  # an id that is there twice gets the same value twice


def _draw_all(
    scores: Tensor, rows: Sequence[Row], warm: list[int], index: Tensor
) -> tuple[Tensor, Tensor, Callable[[list[int]], Tensor] | None]:
    """(ids, whether the candidates were enough, how to draw anew where not), of the rows in `warm`, [len(warm)] each:
    drawn from softmax(scores / temperature) after the row's own top-k, top-p and min-p. index: `warm`, on the device.
    """
    vocab_size, device = scores.shape[1], scores.device
    params = [rows[row][0] for row in warm]
    top_k = [min(each.top_k or vocab_size, vocab_size) for each in params]
    cut = [k < vocab_size or each.top_p < 1 for k, each in zip(top_k, params, strict=True)]
    free = [i for i, limited in enumerate(cut) if not limited]
    near = [i for i, limited in enumerate(cut) if limited and (top_k[i] < CANDIDATES or top_k[i] == vocab_size)]
    far = [i for i, limited in enumerate(cut) if limited and CANDIDATES <= top_k[i] < vocab_size]
    heat = [max(each.temperature, COLDEST) for each in params]
    uniforms = [rows[row][2].uniform() for row in warm]
    numbers = np.array([heat, uniforms, top_k, [each.top_p for each in params], [each.min_p for each in params]])
    heat, *limits = to_device([numbers.view(np.int64)], device)[0].view(torch.float64)[..., None]
    of_free, of_near, of_far = _upload([free, near, far], device)
    if len(warm) < len(scores):
        scores = scores.index_select(0, index)
    weights = (scores - scores.amax(-1, keepdim=True)).div_(heat.float()).exp_()  # the likeliest token's is 1

    def of(part: list[int], index: Tensor) -> tuple[Tensor, ...]:
        """Of these rows: weights, uniforms, top_k, top_p, min_p."""
        if len(part) == len(warm):
            return weights, *limits
        return tuple(each.index_select(0, index) for each in (weights, *limits))

    def from_all(part: list[int], index: Tensor) -> Tensor:
        some_k, some_p = any(top_k[i] < vocab_size for i in part), any(params[i].top_p < 1 for i in part)
        return _from_all(*of(part, index), some_k=some_k, some_p=some_p)

    ids = torch.zeros(len(warm), dtype=torch.int64, device=device)
    decided = torch.ones(len(warm), dtype=torch.bool, device=device)
    if free:
        part, chosen, _, _, min_p = of(free, of_free)
        if any(params[i].min_p for i in free):
            part = part * (part >= min_p.float())
        ids[of_free] = _inverse_transform(part, chosen)
    if near:
        count = max(CANDIDATES if top_k[i] == vocab_size else top_k[i] + 1 for i in near)
        ids[of_near], decided[of_near] = _from_candidates(*of(near, of_near), count=min(count, vocab_size))
    if far:
        ids[of_far] = from_all(far, of_far)
    place = {row: i for i, row in enumerate(warm)}

    def again(undecided: list[int]) -> Tensor:
        part = [place[row] for row in undecided]
        return from_all(part, _upload([part], device)[0])

    return ids, decided, again if near else None


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
    least = values.gather(1, (keep.sum(-1, keepdim=True) - 1).clamp(min=0))  # 0 are kept of weights that are NaN
    complete = (values[:, -1:] < least)[:, 0] | (count == weights.shape[1])  # else an equal one may be left out
    keep &= values >= min_p.float()
    ids, order = ids.sort(dim=1)
    places = _inverse_transform((values * keep).gather(1, order), uniforms)
    return ids.gather(1, places[:, None])[:, 0], complete


def _from_all(
    weights: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, some_k: bool, some_p: bool
) -> Tensor:
    """[rows] token ids, however many tokens are kept. some_k, some_p: whether any row has a top-k, a top-p."""
    if some_k:
        weights = _largest(weights, torch.ones_like(weights), top_k)
    if some_p:
        weights = _largest(weights, weights, top_p * weights.sum(-1, keepdim=True, dtype=torch.float64))
    return _inverse_transform(weights * (weights >= min_p.float()), uniforms)


def _largest(weights: Tensor, masses: Tensor, limit: Tensor) -> Tensor:
    """weights, but 0 for all except the largest: as many as it takes for their masses to reach limit [rows, 1].

    Of equal weights the lowest ids stay. The bits of a float from 0 to 1, read as a whole number, are in the floats'
    order, so the least weight that stays is found ten bits at a time.
    """
    bits = weights.view(torch.int32)
    found, above = _last_bucket((bits >> 20) & 1023, masses, limit)  # 1024 and above: of NaN
    for shift in (10, 0):
        inside = masses * (bits >> (shift + 10) == found)
        key, more = _last_bucket((bits >> shift) & 1023, inside, limit - above)
        found, above = (found << 10) | key, above + more
    least = found.int().view(torch.float32)
    equal = weights == least
    each = (masses * equal).amax(-1, keepdim=True)
    wanted = ((limit - above) / each).ceil()
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
    piece = _passed(sums, target)
    before = torch.where(piece > 0, sums.gather(1, (piece - 1).clamp(min=0)), 0)
    places = piece * size + torch.arange(size, device=weights.device)
    inside = weights.gather(1, places.clamp(max=n - 1)).double() * (places < n)
    running = before + inside.cumsum(1)
    return places.gather(1, _passed(running, target))[:, 0].clamp(max=n - 1)  # behind it only for NaN


def _passed(sums: Tensor, target: Tensor) -> Tensor:
    """[rows, 1], where running sums [rows, n] pass the target, never behind the last that grows. Of NaN, any place."""
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.searchsorted(sums, target, right=True).minimum(last).clamp(max=sums.shape[1] - 1)
