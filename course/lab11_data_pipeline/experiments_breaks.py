"""Lab 11, two bugs that no error shows: a job in which every rank has the same samples, a resume that skips some."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from minillm import measure
from minillm.comm import Group, launch
from minillm.data import Prefetcher, TokenDataset
from minillm.data.sampler import permutation
from minillm.model.loss import cross_entropy


def two_jobs(deal: Callable) -> dict[str, list[dict[str, Any]]]:
    """By job: what `train_step` gives on each of 4 ranks, which take 8 of 64 samples each. B forgets its rank."""
    order = partial(permutation, 64, 0)
    jobs = {
        "A": lambda group: deal(0, order, 64, 8, group.rank, group.world_size),
        "B": lambda group: deal(0, order, 64, 8, 0, group.world_size),
    }
    return {name: launch(train_step, 4, job, device="cpu") for name, job in jobs.items()}


def train_step(group: Group, samples: Callable[[Group], Sequence[int]]) -> dict[str, Any]:
    """One data-parallel step of a next-token model on the windows that `samples(group)` names for this rank."""
    tokens = torch.randint(0, 64, (64 * 32 + 1,), generator=torch.Generator().manual_seed(0), device="cpu")
    mine = [int(sample) for sample in samples(group)]
    inputs, targets = (x.to(group.device) for x in TokenDataset(tokens, seq_len=32).batch(mine))
    torch.manual_seed(0)  # the same weights on every rank
    model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    average = gradient.clone()
    with measure.ledger() as led:
        group.all_reduce(average, op="avg")
    change = (average - gradient).norm() / gradient.norm()
    return {"samples": mine, "loss": loss.item(), "bytes": led.bytes(), "calls": led.calls, "change": change.item()}


def lost_on_resume(deal: Callable, taken: int, resume_at: int, batch: int, num_samples: int) -> int:
    """Samples of epoch 0 that a run never trains on which took `taken` batches and goes on with batch `resume_at`."""
    order, last = partial(permutation, num_samples, 0), num_samples // batch
    shown = {
        sample
        for k in (*range(taken), *range(resume_at, last))
        for sample in deal(k * batch, order, num_samples, batch, 0, 1)
    }
    return num_samples - len(shown)


def made_ahead(taken: int, depth: int) -> int:
    """Batches that a prefetcher has made when `taken` were taken from it and it has had time."""
    made: list[int] = []
    with Prefetcher(lambda k: made.append(k) or k, workers=1, depth=depth) as batches:
        for _ in range(taken):
            next(batches)
        while len(made) < taken + depth:  # its thread fills the queue while the last batch is computed
            time.sleep(0.001)
    return len(made)
