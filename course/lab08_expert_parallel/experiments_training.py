"""Lab 08's trainings: a router that collapses, two cures, and a dense model with as many active weights.

Small models learn the bytes of the course's corpus for some dozen steps. Every batch is new, so a step's loss is that
of text the model has not seen. Two run at a time, each on one thread.
"""

import time
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from minillm.comm import Group, launch
from minillm.data import corpus
from minillm.model import ModelConfig, MoEConfig, Transformer
from minillm.model.moe import MoE, update_balance_biases
from minillm.model.moe.router import drop_beyond
from minillm.predict.model import training_flops
from minillm.predict.training import moe

STEPS, BATCH, SEQ, LR = 80, 16, 64, 5e-3
NUM_EXPERTS, TOP_K = 8, 2
DENSE = ModelConfig(256, 48, 96, 2, 4, max_seq_len=SEQ, tie_embeddings=True, init_std=0.1)
BARE = replace(DENSE, moe=MoEConfig(NUM_EXPERTS, TOP_K, DENSE.intermediate_size // TOP_K))
CONFIGS = {
    "dense": DENSE,
    "no balancing": BARE,
    "balance loss": replace(BARE, moe=replace(BARE.moe, balance_loss=0.05)),
    "bias": replace(BARE, moe=replace(BARE.moe, bias_update_rate=0.01)),
}
PAIRS = (("dense", "balance loss"), ("no balancing", "bias"))  # of one rank: compared by the clock
FACTORS = (0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class Training:
    """losses: nats per byte, by step; loads: [steps, experts] of the last layer, shares of all pairs.

    seconds: CPU time of all steps; flops: of one step, by the formula; chosen: [batch, seq, k], the last batch's
    experts in that layer.
    """

    losses: list[float]
    loads: Tensor
    seconds: float
    flops: float
    chosen: Tensor | None

    @property
    def final_loss(self) -> float:
        return sum(self.losses[-10:]) / 10

    @property
    def imbalance(self) -> float:
        """Fullest expert / mean: the mean of the last ten steps."""
        return sum(map(moe.imbalance, self.loads[-10:].tolist())) / len(self.loads[-10:])


@cache
def text() -> Tensor:
    """Bytes of the held-out files, as many as the steps need."""
    needed, found = STEPS * BATCH * (SEQ + 1), b""
    for document in corpus().documents("validation"):
        found += document.text.encode()
        if len(found) >= needed:
            break
    return torch.tensor(list(found[:needed])).view(-1, SEQ + 1)  # on the default device, as the model


def train(config: ModelConfig, steps: int = STEPS) -> Training:
    """AdamW at a constant rate, the same windows in the same order for every configuration."""
    model = Transformer(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    order = torch.randperm(len(text()), generator=torch.Generator().manual_seed(0))
    losses, loads, chosen = [], [], []
    last = [each for each in model.modules() if isinstance(each, MoE)][-1:]
    for layer in last:
        layer.router.register_forward_hook(lambda module, inputs, decision: chosen.append(decision.experts))
    start = time.process_time()
    for step in range(steps):
        windows = text()[order[step * BATCH : (step + 1) * BATCH]]
        total, weight = model(windows[:, :-1], targets=windows[:, 1:])
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        update_balance_biases(model)
        losses.append((total / weight).item())
        if last:
            counts = model.router_losses.counts[last[0].layer]
            loads.append(counts / counts.sum())
    seconds = time.process_time() - start
    flops = BATCH * SEQ * training_flops(config, SEQ).total
    shares = torch.stack(loads) if loads else torch.zeros(steps, 0)
    return Training(losses, shares, seconds, flops, chosen[-1] if chosen else None)


def _train_pair(group: Group) -> dict[str, Training]:
    torch.set_num_threads(1)
    return {name: train(CONFIGS[name]) for name in PAIRS[group.rank]}


@cache
def trainings() -> dict[str, Training]:
    """All four, once per session."""
    ranks = launch(_train_pair, len(PAIRS), device="cpu", timeout=300)
    found = {name: each for rank in ranks for name, each in rank.items()}
    return {name: found[name] for name in CONFIGS}


def dropped(training: Training, factor: float, shared: bool = False) -> float:
    """Share of the last batch's pairs that experts would drop, each sequence with its own places; or, if `shared`, with
    as many for the whole batch together."""
    chosen = training.chosen.flatten(0, 1)[None] if shared else training.chosen
    capacity = moe.capacity(chosen.shape[1], TOP_K, NUM_EXPERTS, factor)
    return (drop_beyond(chosen, NUM_EXPERTS, capacity) < 0).float().mean().item()
