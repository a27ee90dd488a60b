"""Training of a head that drafts for a target. The target stays as it is; AdamW moves the head alone, in float32."""

import math

import torch
from torch import nn
from tqdm import tqdm

from minillm.data import Loader
from minillm.model import Transformer
from minillm.serve.speculate.distil import LOSSES, Goals
from minillm.serve.speculate.heads import hidden_states
from minillm.serve.speculate.proposers.medusa import MedusaHeads

AHEAD = 4  # places between a row's position and the last goal it needs


def train(
    kind: str,
    head: nn.Module,
    target: Transformer,
    loader: Loader,
    *,
    steps: int,
    rows: int,
    lr: float,
    seed: int = 0,
    bf16: bool = False,
    progress: bool = False,
) -> list[float]:
    """The losses, one a step (nats; Medusa's and EAGLE's are sums over heads or steps, weighted by 0.8ⁱ).

    rows: positions of a batch whose distributions are compared. lr: reached after a twentieth of the steps, then a
    cosine to 0. bf16: multiply in bfloat16 (autocast), which many processors do twice as fast; sums stay float32.
    """
    ahead = max(AHEAD, len(head.heads) if isinstance(head, MedusaHeads) else 0)
    room = loader.dataset.seq_len - 2 * ahead
    if room < 1 or loader.dataset.seq_len > target.config.max_seq_len:
        raise ValueError(
            f"--seq-len {loader.dataset.seq_len} does not fit: {kind} needs {2 * ahead + 1} or more, "
            f"the target's context is {target.config.max_seq_len}."
        )
    if not 1 <= rows <= (most := loader.sampler.global_batch * room):
        raise ValueError(f"--rows {rows} is not in 1 .. {most}, the positions of a batch that can be compared.")
    target.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    draw, losses, device = torch.Generator().manual_seed(seed), [], target.embedding.weight.device
    warmup = max(1, steps // 20)
    for step in (bar := tqdm(range(steps), disable=not progress, desc=kind)):
        share = (step + 1) / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / steps)
        optimizer.param_groups[0]["lr"] = lr * share
        tokens = next(loader).inputs.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            with torch.no_grad():
                states = hidden_states(target, tokens)
            loss = LOSSES[kind](head, target, tokens, states, Goals.pick(target, states[-1], rows, ahead, draw))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss is {losses[-1]} after {step + 1} steps: lower --lr {lr}.")
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses
