"""Lab 07: three bugs of real projects and one to find, each on 4 ranks beside one process, in float64."""

from typing import Any

import torch
from torch import Tensor

from course.lab07_long_context.experiments import WORLD, attend
from minillm.comm import Group, launch
from minillm.model import ModelConfig, Transformer, dense
from minillm.parallel.context_parallel import ContextAttention, RingAttention, context_parallel, local_positions

SEQ, PROMPT, DIM = 64, 24, 8
MODEL = ModelConfig(32, 16, 32, 1, 2, 1, max_seq_len=SEQ)


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    """tokens, targets and weights [1, SEQ]: a prompt that counts nothing, then an answer."""
    drawn = torch.randint(32, (1, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:], (torch.arange(SEQ) >= PROMPT)[None].double()


def _model() -> Transformer:
    return Transformer(MODEL, seed=0, dtype=torch.float64, attention=dense)


def _gradient(model: Transformer, group: Group, attention: ContextAttention, weighted: bool, own_mean: bool) -> Tensor:
    """This rank's gradient of the mean loss over the counted tokens of all ranks, or over its own."""
    tokens, targets, weights = (x[:, attention.positions(SEQ)] for x in _tokens())
    weights = weights if weighted else torch.ones_like(weights)
    loss, count = context_parallel(model, attention)(tokens, targets=targets, weights=weights)
    if not own_mean:
        count = group.all_reduce(count.detach().clone())
    (loss / count.clamp(min=1)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def _alone(weighted: bool) -> Tensor:
    tokens, targets, weights = _tokens()
    model = _model()
    loss, count = model(tokens, targets=targets, weights=weights if weighted else torch.ones_like(weights))
    (loss / count).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def _off(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def kv_never_exchanged(group: Group) -> dict[str, float]:
    """How far this rank's gradient is from one process: with the sum over cp, and without."""
    mine, right = _gradient(_model(), group, RingAttention(group), weighted=False, own_mean=False), _alone(False)
    skipped = _off(mine, right)
    return {"skipped": skipped, "summed": _off(group.all_reduce(mine), right)}


def mean_of_means(group: Group) -> dict[str, Any]:
    """The gradient with each rank's own mean averaged, and with the sum divided by all tokens.

    Returns the relative error of each, and how many tokens count on this rank.
    """
    right, found = _alone(True), {}
    for name, own_mean in (("mean of means", True), ("mean over all tokens", False)):
        attention = RingAttention(group, "contiguous")
        mine = _gradient(_model(), group, attention, weighted=True, own_mean=own_mean)
        found[name] = _off(group.all_reduce(mine, "avg" if own_mean else "sum"), right)
    return found | {"tokens": int(_tokens()[2][:, attention.positions(SEQ)].sum())}


def _whole() -> list[Tensor]:
    return list(torch.randn(4, 1, 1, SEQ, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64))


def from_zero(group: Group) -> float:
    """All keys are there, but the mask counts this rank's queries from 0."""
    q, k, v, _ = _whole()
    mine = RingAttention(group, "contiguous").positions(SEQ)
    counted = torch.arange(len(mine))
    found, _ = attend(q[:, :, mine], k, v, counted[:, None] >= torch.arange(SEQ))
    return _off(found, dense(q, k, v)[:, :, mine])


# A bug to find.


def ring_backward(q, k, v, lse, d_out, delta, group, backward_block):
    """Gradients of this rank's q, k, v: blocks and their gradients go round once more.

    backward_block(q, k, v, lse, d_out, delta, source) -> (dq, dk, dv) of this rank's queries and the block of `source`.
    """
    n, rank = group.world_size, group.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    block, gradient, dq = torch.stack((k, v)), torch.zeros_like(torch.stack((k, v))), torch.zeros_like(q)
    for step in range(n):
        source = (rank - step) % n
        to_q, to_k, to_v = backward_block(q, k, v, lse, d_out, delta, source)
        dq += to_q
        gradient = gradient + torch.stack((to_k, to_v))
        block, gradient = shift((block, gradient), right, left, group)
    return dq, *gradient


def shift(tensors, right, left, group):
    """Sends tensors to the right, returns those from the left."""
    arriving = [torch.empty_like(x) for x in tensors]
    group.exchange(send=[(x, right) for x in tensors], recv=[(x, left) for x in arriving])
    return arriving


def bug_hunt(group: Group) -> dict[str, float]:
    """`ring_backward` beside one process: relative errors of the output and of dq, dk, dv on this rank."""
    whole = _whole()
    inputs = [x.clone().requires_grad_() for x in whole[:3]]
    out = dense(*inputs)
    right = torch.autograd.grad(out, inputs, whole[3])
    ring = RingAttention(group, "zigzag")
    at = ring.positions(SEQ)
    q, k, v, d_out = (x[:, :, at] for x in whole)
    found = ring(q, k, v, positions=at)
    seen = torch.arange(SEQ) <= at[:, None]
    lse = attend(q, whole[1], whole[2], seen)[1]
    delta = (d_out * found).sum(-1)
    held = [local_positions(SEQ, rank, group.world_size) for rank in range(group.world_size)]

    def backward_block(q, k, v, lse, d_out, delta, source):
        visible = at[:, None] >= held[source]
        p = (q @ k.mT * DIM**-0.5 - lse[..., None]).exp() * visible
        ds = p * (d_out @ v.mT - delta[..., None]) * DIM**-0.5
        return ds @ k, ds.mT @ q, p.mT @ d_out

    gradients = ring_backward(q, k, v, lse, d_out, delta, group, backward_block)
    errors = {name: _off(g, w[:, :, at]) for name, g, w in zip(("dq", "dk", "dv"), gradients, right, strict=True)}
    return {"output": _off(found, out.detach()[:, :, at])} | errors


def all_of_them(group: Group) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {each.__name__: each(group) for each in (kv_never_exchanged, mean_of_means, from_zero, bug_hunt)}


def accidents() -> list[dict[str, Any]]:
    """What each rank found."""
    return launch(all_of_them, WORLD, device="cpu")
