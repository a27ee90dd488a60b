"""A vocabulary split over ranks: each holds the rows of its own words, in the embedding, in the head and in the loss.

    embedding   a rank looks up its own words and gives zeros for the others'; the sum over ranks is the embedding
    loss        nll = log Σ exp(logit) - logit of the target: the maximum, the sum and the target's logit are three
                numbers per token to agree on, instead of V / t logits to gather

Shoeybi et al. 2019, §3. As in `model.loss`, the loss works its gradient out in forward, some tokens at a time, so no
rank ever holds the logits of all its tokens. A chunk has as many logits as the tokens' hidden states have numbers
(`predict.training.tensor.loss_chunk`): 2 · ceil(V / t / hidden) all-reduces, however many tokens there are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minillm.comm import Group
from minillm.model.distillation import Goals, Words, distillation_sums
from minillm.model.loss import IGNORE, check_targets, sum_of_weights
from minillm.parallel.sharding.placement import Shard
from minillm.parallel.split_backward import weight_gradient
from minillm.parallel.tensor_parallel.layers import column_linears, cut_parameter
from minillm.parallel.tensor_parallel.regions import Region, end, reduce_from
from minillm.predict.training.tensor import loss_chunk


class VocabParallelEmbedding(nn.Module):
    """As nn.Embedding: ids [batch, seq] -> [batch, seq, hidden], or [batch, seq / t, hidden] with sequence=True.

    weight: [vocab_size / world_size rounded up, hidden_size], this rank's words. Alone it draws the whole as
    nn.Embedding does and keeps its part: seed all ranks alike. how: dtype, device.
    """

    def __init__(self, vocab_size: int, hidden_size: int, group: Group, *, sequence: bool = False, **how: Any) -> None:
        super().__init__()
        self._take(nn.Embedding(vocab_size, hidden_size, **{"device": group.device, **how}), group, sequence)

    @classmethod
    def cut(cls, whole: nn.Embedding, region: Region) -> "VocabParallelEmbedding":
        """This rank's part of an embedding."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(whole, region.group, region.sequence)
        return layer

    def _take(self, whole: nn.Embedding, group: Group, sequence: bool) -> None:
        part = Shard(0, group.rank, group.world_size)
        self.weight, self.region = cut_parameter(whole.weight, part), Region(group, sequence)
        self.first = part.index * part.size(len(whole.weight))
        self.padding_idx = None if whole.padding_idx is None else whole.padding_idx - self.first
        if self.padding_idx not in range(len(self.weight)):  # another rank's
            self.padding_idx = None

    def forward(self, tokens: Tensor) -> Tensor:
        self.region.check(tokens.shape[-1])
        local = tokens - self.first
        foreign = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill_(foreign, 0), self.weight, self.padding_idx)
        return end(x.masked_fill_(foreign[..., None], 0), self.region)


def vocab_parallel_logits(x: Tensor, head: Tensor, *, region: Region, vocab_size: int) -> Tensor:
    """x: [batch, seq, hidden] or [batch, seq / t, hidden] -> [batch, seq, vocab / world_size], padding at -inf."""
    (logits,) = column_linears(x, [head], [None], region)
    real = Shard(0, region.group.rank, region.group.world_size).real(vocab_size)
    padding = torch.arange(logits.shape[-1], device=logits.device) >= real
    return logits.masked_fill(padding, float("-inf")) if real < logits.shape[-1] else logits


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(Σ weight · nll, Σ weight), the same on every rank, of logits that no rank has whole.

    logits: [batch, seq, vocab / world_size], this rank's words, -inf where it is padding; targets, weights:
    [batch, seq] as in `model.cross_entropy_sums`, the same on every rank. Its gradient is that of this rank's logits.
    """
    check_targets(logits.shape[:-1], targets, weights)
    total = _VocabParallelCrossEntropy.apply(logits, targets, weights, group)
    return total, sum_of_weights(targets, weights, total.dtype)


def vocab_parallel_distillation_sums(
    logits: Tensor, targets: Tensor, weights: Tensor | None, goals: Goals, *, group: Group, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """`model.distillation.distillation_sums` of this rank's words, the same on every rank. goals: of all words."""
    part = Shard(0, group.rank, group.world_size)
    words = Words(
        begin=part.index * part.size(vocab_size),
        add=lambda value: reduce_from(value, group),
        most=lambda value: group.all_reduce(value, "max"),
    )
    return distillation_sums(logits, targets, weights, goals, words)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, weights, group):
        exact = logits.detach().flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        total, gradient = _nll_(exact, targets.flatten(), weights, slice(None), group)
        ctx.save_for_backward(gradient.to(logits.dtype).view_as(logits))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, factor):
        (gradient,) = ctx.saved_tensors
        return gradient * factor, None, None, None


def _nll_(logits: Tensor, ids: Tensor, weights: Tensor | None, rows: slice, group: Group) -> tuple[Tensor, Tensor]:
    """Σ weight · nll of some tokens and, in the memory of the logits, its gradient by them.

    logits: [rows, vocab / world_size]; ids: [all tokens]; two all-reduces, of one and of two numbers per token.
    """
    ids = ids[rows, None]
    counted = (ids != IGNORE).to(logits.dtype)
    if weights is not None:
        counted *= weights.flatten()[rows, None]
    local = ids - group.rank * logits.shape[1]
    mine = (local >= 0) & (local < logits.shape[1])
    local = local.masked_fill_(~mine, 0)

    top = group.all_reduce(logits.amax(1, keepdim=True), "max")
    logits -= top
    target = logits.gather(1, local).masked_fill_(~mine, 0)
    p = logits.exp_()
    summed, target = group.all_reduce(torch.stack((p.sum(1, keepdim=True), target)))
    p /= summed
    p.scatter_add_(1, local, -mine.to(p.dtype))
    return ((summed.log() - target) * counted).sum(), p.mul_(counted)


def linear_vocab_parallel_cross_entropy_sums(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    weights: Tensor | None = None,
    *,
    region: Region,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """`model.linear_cross_entropy_sums` of a head [vocab / world_size, hidden] of which each rank has its words.

    x: [batch, seq, hidden], with a sequence region [batch, seq / t, hidden]; targets, weights: [batch, seq], whole.
    chunk: tokens whose logits are held at once, by default `loss_chunk`.
    """
    parts = region.group.world_size if region.sequence else 1
    check_targets(torch.Size((*x.shape[:-2], x.shape[-2] * parts)), targets, weights)
    chunk = chunk or loss_chunk(targets.numel(), head.shape[1], head.shape[0])
    total = _LinearVocabParallelCrossEntropy.apply(x, head, targets, chunk, weights, region, vocab_size)
    return total, sum_of_weights(targets, weights, total.dtype)


class _LinearVocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head, targets, chunk, weights, region, vocab_size):
        wanted, device, weight = any(ctx.needs_input_grad[:2]), x.device.type, head
        if torch.is_autocast_enabled(device):
            x, head = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (x, head))
        x = region.begin(x)
        rows, ids = x.flatten(0, -2), targets.flatten()
        exact = torch.promote_types(x.dtype, torch.float32)
        real = Shard(0, region.group.rank, region.group.world_size).real(vocab_size)
        total = torch.zeros((), dtype=exact, device=x.device)
        if wanted:
            x_gradient = torch.empty_like(rows)
            head_gradient = torch.zeros_like(head, dtype=exact) if ctx.needs_input_grad[1] else None  # None: frozen
        for start in range(0, len(ids), chunk):
            some = slice(start, start + chunk)
            logits = (rows[some] @ head.T).to(exact)
            logits[:, real:] = float("-inf")
            nll, gradient = _nll_(logits, ids, weights, some, region.group)
            total += nll
            if wanted:
                gradient = gradient.to(x.dtype)
                x_gradient[some] = gradient @ head
                if head_gradient is None:
                    pass
                elif exact == x.dtype:
                    head_gradient.addmm_(gradient.T, rows[some])
                else:
                    head_gradient += gradient.T @ rows[some]
            del logits, gradient  # or the next chunk's would stand beside them
        if wanted:
            ctx.save_for_backward(x_gradient.view_as(x), head_gradient, weight)
            ctx.region = region
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, factor):
        x_gradient, head_gradient, weight = ctx.saved_tensors
        dx = ctx.region.begin_backward(x_gradient * factor) if ctx.needs_input_grad[0] else None
        d_head = weight_gradient(weight, lambda: head_gradient * factor) if ctx.needs_input_grad[1] else None
        return dx and dx.wait(), d_head, None, None, None, None, None
