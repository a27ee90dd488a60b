"""The next token of every sequence of a batch at once, on the device of the logits; only token ids leave it.

The same tokens as `reference.sample` one by one (which is shorter to read and slower), because the random number of a
row comes from its own `Draw` and is used in the same way: the token at which the running sum of the row's weights, in
order of token id, passes it. Rounding aside, a row's token does not depend on the rows beside it or on the device.

What the host knows (who wants what, the random numbers) goes to the device first, in a few copies that nobody waits
for; then everything is computed there without a question back, and `SampledTokens.read` reads it.

No vocabulary is sorted. A small top-k takes a row's likeliest tokens. For top-p and a large top-k, all that is needed
is the last token that is kept, which `selection.py` finds, however flat the distribution. Where either leaves a doubt,
such as many equals at the very place where a row is cut, the row is sorted, once the host has read that it must be.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from minillm.model.draw import COLDEST
from minillm.model.paged.tables import to_device
from minillm.serve.requests.params import Token, plain_token
from minillm.serve.run.step_inputs import SamplingInputs
from minillm.serve.sample import selection
from minillm.serve.sample.reference import described
from minillm.serve.sample.rows_triton import can_sample_rows, sample_rows
from minillm.serve.sample.seen import SeenTokens
from minillm.serve.sample.selection import LastKept, last_kept, row_sum, sum_above

NOT_FINITE, UNCERTAIN = -1, -2  # instead of an id: logits of NaN or infinity; the row has to be sorted
CANDIDATES = 2048  # a top-k below it sorts what it keeps
ROWS_AT_ONCE = 8  # on a CPU, whose caches hold no more


def sample_on_device(
    logits: Tensor, inputs: SamplingInputs, sampled: Tensor | None = None, seen: SeenTokens | None = None
) -> "SampledTokens":
    """The tokens that `inputs` asks for, before the host reads them. logits: [rows, vocab_size], float32, not changed.

    sampled: what placeholders among new tokens stand for, see `fill_placeholders`. seen: what the sequences have seen
    before; None = nothing that `inputs` does not bring.
    """
    if inputs.logits_rows is not None:
        logits = logits.index_select(0, to_device([inputs.logits_rows], logits.device)[0])
    if inputs.greedy_only:
        most, ids = logits.max(-1)
        return SampledTokens(ids, torch.where(most.isfinite(), ids, NOT_FINITE))
    drawn, described_rows = np.flatnonzero(inputs.temperature > 0), np.flatnonzero(inputs.logprobs >= 0)
    drawn_index, described_index = to_device([drawn, described_rows], logits.device)
    penalties = inputs.penalties
    seen = seen or SeenTokens()
    scores = logits if penalties is None else seen.penalised(logits, penalties, sampled)
    most = scores.amax(-1, keepdim=True)
    ids = flags = drawn_index if len(drawn) == inputs.count else scores.argmax(-1)
    resample = None
    if len(drawn):
        found, certain, resample = _sample_rows(scores, most, inputs, drawn, drawn_index)
        ids = ids.index_copy(0, drawn_index, found)
        flags = flags.index_copy(0, drawn_index, torch.where(certain, found, UNCERTAIN))
    result = SampledTokens(ids, torch.where(most[:, 0].isfinite(), flags, NOT_FINITE), resample)
    if len(described_rows):
        wanted = dict(zip(described_rows.tolist(), inputs.logprobs[described_rows].tolist(), strict=True))
        result.describe(described_index, wanted, logits)
    return result


def _sample_rows(
    scores: Tensor, most: Tensor, inputs: SamplingInputs, drawn: np.ndarray, index: Tensor
) -> tuple[Tensor, Tensor, Callable[[list[int]], Tensor]]:
    """(ids, whether they are certain, how to sample anew those that are not) of the rows in `drawn`, [len(drawn)]
    each: from softmax(scores / temperature) after the row's own top-k, top-p and min-p. most: each row's largest score;
    index: `drawn`, on the device.
    """
    vocab_size, device = scores.shape[1], scores.device
    temperature = np.maximum(inputs.temperature, COLDEST)
    top_k = np.where(inputs.top_k < vocab_size, inputs.top_k, inf)
    settings = np.stack([each[drawn] for each in (temperature, inputs.uniform, top_k, inputs.top_p, inputs.min_p)])
    limits = to_device([settings.view(np.int64)], device)[0].view(torch.float64)[..., None]

    if len(drawn) < len(scores):
        scores, most = (each.index_select(0, index) for each in (scores, most))
    on_host = settings[2:].tolist()
    count = ROWS_AT_ONCE if device.type == "cpu" else len(drawn)
    weights, found = [], []  # the weights stay: what they were made of may be overwritten by the pass that follows
    for start in range(0, len(drawn), count):
        part = slice(start, start + count)
        weights.append(_weights(scores[part], most[part], limits[0, part]))
        found.append(_sample_part(weights[-1], limits[1:, part], [each[part] for each in on_host]))
    ids, certain = map(torch.cat, zip(*found, strict=True))

    def resample(uncertain: list[int]) -> Tensor:
        places = np.searchsorted(drawn, uncertain)
        whole = torch.stack([weights[place // count][place % count] for place in places])
        [index] = to_device([places], device)
        return _from_likeliest(whole.shape[1], whole, *limits[1:].index_select(1, index))[0]

    return ids.clamp(max=vocab_size - 1), certain, resample  # behind it only for NaN


def _weights(scores: Tensor, most: Tensor, temperature: Tensor) -> Tensor:
    """exp((scores - most) / temperature), with zeros behind up to a multiple of PIECE."""
    width = scores.shape[1]
    weights = scores.new_empty(len(scores), -(-width // selection.PIECE) * selection.PIECE)
    weights[:, width:] = 0
    torch.sub(scores, most, out=weights[:, :width]).div_(temperature.float()).exp_()
    return weights


def _sample_part(weights: Tensor, limits: Tensor, on_host: Sequence[list[float]]) -> tuple[Tensor, Tensor]:
    """(ids, whether they are certain), [rows] each. limits: uniform, top_k, top_p, min_p, [4, rows, 1]. on_host: the
    last three of them, [3][rows]."""
    if can_sample_rows(weights):
        return sample_rows(weights, limits), torch.ones(len(weights), dtype=torch.bool, device=weights.device)
    top_k, top_p, min_p = on_host
    near = [row for row, k in enumerate(top_k) if k < CANDIDATES]
    far = [row for row, k in enumerate(top_k) if k >= CANDIDATES]
    cuts = any(top_k[row] < inf for row in far), any(top_p[row] < 1 for row in far), any(min_p[row] for row in far)
    if not near:
        return _from_all(cuts, weights, *limits)
    count = 1 + int(max(top_k[row] for row in near))
    if not far:
        return _from_likeliest(count, weights, *limits)
    of_near, of_far = to_device([np.array(near), np.array(far)], weights.device)
    some, others = ((weights.index_select(0, index), *limits.index_select(1, index)) for index in (of_near, of_far))
    found = zip(_from_likeliest(count, *some), _from_all(cuts, *others), strict=True)
    order = torch.cat((of_near, of_far))
    ids, certain = (torch.empty_like(torch.cat(each)).index_copy_(0, order, torch.cat(each)) for each in found)
    return ids, certain


def _from_likeliest(
    count: int, weights: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """([rows] token ids, [rows] whether they are certain), from the `count` likeliest tokens of each row, sorted."""
    ids = weights.topk(count).indices.sort().values
    values, order = weights.gather(1, ids).sort(dim=1, descending=True, stable=True)  # of equals, the lowest id first
    ids = ids.gather(1, order)
    keep = torch.arange(count, device=weights.device) < top_k
    shares = values.double() * keep
    shares /= shares.sum(-1, keepdim=True)
    keep &= shares.cumsum(-1) - shares < top_p
    least = values.gather(1, (keep.sum(-1, keepdim=True) - 1).clamp(min=0))  # 0 are kept of weights that are NaN
    certain = (values[:, -1:] < least)[:, 0] | (count == weights.shape[1])  # else an equal one may be left out
    keep &= values >= min_p.float()
    ids, order = ids.sort(dim=1)
    sums = (values * keep).gather(1, order).double().cumsum(1)
    return ids.gather(1, _passed(sums, uniforms * sums[:, -1:]))[:, 0], certain


def _from_all(
    cuts: tuple[bool, bool, bool], weights: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """([rows] token ids, [rows] whether they are certain), however many are kept. cuts: does any row have a top-k, a
    top-p, a min-p?"""
    some_k, some_p, _ = cuts
    width, certain = weights.shape[1], torch.ones_like(min_p, dtype=torch.bool)
    if not any(cuts):
        return inverse_transform(weights, uniforms), certain[:, 0]
    last = LastKept(min_p.float(), torch.full_like(min_p, width, dtype=torch.int64), certain)
    whole = kept = row_sum(weights)
    if some_k:
        number = sum_above(weights, torch.zeros_like(last.weight), counted=True)
        found, limited = last_kept(weights, top_k, number, counted=True), top_k.isfinite()
        equals = top_k - sum_above(weights, found.weight, counted=True)
        kept = torch.where(limited, sum_above(weights, found.weight, counted=False) + equals * found.weight, whole)
        last = found.where(limited, last)
    if some_p:
        found = last_kept(weights, top_p * kept, whole, counted=False)
        last = found._replace(certain=found.certain & last.certain).where(top_p < 1, last)
    least = min_p.float()
    last = LastKept(least, torch.full_like(last.place, width), last.certain).where(least > last.weight, last)
    return inverse_transform(weights, uniforms, last), last.certain[:, 0]


def inverse_transform(weights: Tensor, uniforms: Tensor, last: LastKept | None = None) -> Tensor:
    """[rows]: where the running sum of the weights that are kept [rows, multiple of PIECE] passes uniforms [rows, 1]
    of the whole; None = all are kept.

    In two levels, because a running sum in float64 over a whole vocabulary is slow: first over the sums of pieces,
    then inside the piece that was found. A weight of 0 is never chosen.
    """
    pieces = weights.unflatten(1, (-1, selection.PIECE))
    inside = torch.arange(selection.PIECE, device=weights.device)

    def kept(piece: Tensor) -> Tensor:
        """The weights of one piece of each row, [rows, PIECE], 0 if not kept. piece: [rows, 1]."""
        places = piece * selection.PIECE + inside
        found = weights.gather(1, places)
        if last is None:
            return found
        return torch.where((found > last.weight) | ((found == last.weight) & (places <= last.place)), found, 0)

    if last is None:
        sums = pieces.sum(-1)
    else:  # of equals, those up to the last one's piece, and not all of this
        number = torch.arange(pieces.shape[1], device=weights.device)
        piece = (last.place // selection.PIECE).clamp(0, len(number) - 1)
        least = torch.where(number <= piece, last.weight, last.weight.nextafter(torch.full_like(last.weight, inf)))
        sums = torch.ge(pieces, least[..., None], out=torch.empty_like(pieces)).mul_(pieces).sum(-1)
        sums = sums.scatter(1, piece, kept(piece).sum(-1, keepdim=True))
    sums = sums.double().cumsum(1)
    target = uniforms * sums[:, -1:]
    piece = _passed(sums, target)
    before = torch.where(piece > 0, sums.gather(1, (piece - 1).clamp(min=0)), 0)
    running = before + kept(piece).double().cumsum(1)
    return piece[:, 0] * selection.PIECE + _passed(running, target)[:, 0]


def _passed(sums: Tensor, target: Tensor) -> Tensor:
    """[rows, 1], where running sums [rows, n] pass the target, never behind the last that grows. Of NaN, any place."""
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.searchsorted(sums, target, right=True).minimum(last).clamp(max=sums.shape[1] - 1)


class SampledTokens:
    """ids: [rows], int64, a valid id in each. flags: the ids, with NOT_FINITE or UNCERTAIN where the host must act.

    resample: how to sample the UNCERTAIN rows anew. resampled: the rows for which `read` had to, so that their token is
    not what `ids` says.
    """

    def __init__(self, ids: Tensor, flags: Tensor, resample: Callable[[list[int]], Tensor] | None = None):
        self.ids, self.resampled = ids, []
        self._flags, self._resample = flags, resample
        self._logprobs: dict[int, tuple[int, Tensor]] = {}  # row -> how many it wants, of all tokens
        self._sent: torch.cuda.Event | None = None

    def describe(self, index: Tensor, wanted: dict[int, int], logits: Tensor) -> None:
        """Adds log-probabilities. wanted: how many for each row that wants any; index: these rows, on the device."""
        logprobs = torch.log_softmax(logits.index_select(0, index), dim=-1)
        top = logprobs.topk(min(max(wanted.values()), logits.shape[1]))
        own = logprobs.gather(1, self.ids[index][:, None])
        columns = torch.cat((own.double(), top.indices.double(), top.values.double()), dim=1)
        flags = columns.new_zeros(len(logits), 1 + columns.shape[1])  # in one tensor, so that the host reads once
        flags[:, 0] = self._flags
        flags[index, 1:] = columns
        self._flags = flags
        self._logprobs = dict(zip(wanted, zip(wanted.values(), logprobs, strict=True), strict=True))

    def send(self) -> None:
        """Starts the copy that `read` waits for, so that nothing which is launched after it delays it."""
        if self._flags.is_cuda:
            self._flags = self._flags.to("cpu", non_blocking=True)  # into pinned memory
            self._sent = torch.cuda.Event()
            self._sent.record()

    def read(self) -> list[Token | None]:
        """The tokens, None where logits are not finite. The host waits once, and again only if rows are UNCERTAIN."""
        if self._sent is not None:
            self._sent.synchronize()
        rows = self._flags.tolist()
        ids = [int(row[0]) for row in rows] if self._logprobs else rows
        if self._resample is not None and UNCERTAIN in ids:
            self.resampled = [row for row, token in enumerate(ids) if token == UNCERTAIN]
            for row, token in zip(self.resampled, self._resample(self.resampled).tolist(), strict=True):
                ids[row] = token
        tokens = [plain_token(token) if token >= 0 else None for token in ids]
        for row, (count, logprobs) in self._logprobs.items():
            if row in self.resampled:
                tokens[row] = described(ids[row], logprobs.cpu(), count)
            elif tokens[row] is not None:
                own, *top = rows[row][1:]
                most = len(top) // 2
                likeliest = zip(map(int, top[:most]), top[most:], strict=True)
                tokens[row] = Token(ids[row], own, tuple(likeliest)[:count])
        return tokens
