"""A training loop with all that a resume can forget: weights, moments, learning rate, data order, two generators.

Small enough to read: dropout draws from torch's generator, the noise on the inputs from Python's.
"""

import random
from typing import Any

import torch
from torch import Tensor, nn

ROWS, WIDTH, BATCH = 20, 6, 4
PARTS = ("weights", "optimizer", "scheduler", "order of the data", "torch's generator", "Python's generator")


class Order:
    """The order of the rows: each epoch is shuffled anew. position: rows of this epoch that were taken."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch, self.position = seed, 0, 0

    def take(self, count: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        rows = torch.randperm(ROWS, generator=draw)[self.position : self.position + count]
        self.position += count
        if self.position >= ROWS:
            self.epoch, self.position = self.epoch + 1, 0
        return rows


class Loop:
    """`step()` returns the loss. `data_seed` draws the rows and the target, `seed` the weights and the order."""

    def __init__(self, seed: int = 0, data_seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
            self.model = nn.Sequential(*layers).double()
            torch.manual_seed(data_seed)
            self.inputs = torch.randn(ROWS, WIDTH, dtype=torch.float64)
            self.targets = self.inputs.sum(1, keepdim=True).sin()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.8)
        self.order = Order(seed)

    def step(self) -> float:
        rows = self.order.take(BATCH)
        noise = 0.1 * torch.tensor([random.gauss(0, 1) for _ in rows], dtype=torch.float64)
        loss = (self.model(self.inputs[rows] + noise[:, None]) - self.targets[rows]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def parts(self) -> dict[str, Any]:
        """What the next step depends on, by `PARTS`, as numbers and texts that can be compared."""
        order = [self.order.seed, self.order.epoch, self.order.position]
        scheduler = {key: value for key, value in self.scheduler.state_dict().items() if key != "_last_lr"}
        moments = [[[float(x) for x in torch.as_tensor(v).flatten()] for v in self.optimizer.state[p].values()]
                   for p in self.model.parameters()]  # fmt: skip
        found = (
            [parameter.flatten().tolist() for parameter in self.model.parameters()],
            [moments, [group["lr"] for group in self.optimizer.param_groups]],
            [scheduler["last_epoch"], scheduler["_step_count"]],
            order,
            torch.get_rng_state().tolist(),
            random.getstate(),
        )
        return dict(zip(PARTS, found, strict=True))
