"""What lab 02's checks watch while a learner's training code runs: forward passes, activations, gradients.

Right gradients can be had without the mechanism (one big batch instead of accumulation, kept activations instead of
recomputed ones), so each judge here also asks the census and counts calls.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.lab02_one_device.experiments import one_thread
from minillm.measure import memory
from minillm.model import ModelConfig, Transformer


class CountingModel(nn.Module):
    """`inner`, counting how often it runs forward, in `calls`."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


class Stack(nn.Module):
    """Residual blocks x + down(relu(up(x))), the model of the memory ledger."""

    def __init__(self, hidden: int, intermediate: int, layers: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(hidden, intermediate, bias=False, dtype=dtype) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(intermediate, hidden, bias=False, dtype=dtype) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return x


@one_thread()
def stack_memory(hidden: int, intermediate: int, layers: int, tokens: int, mixed: bool) -> dict[str, int]:
    """Bytes by kind that a training step of a `Stack` really holds: state and gradients when backward is done."""
    model = Stack(hidden, intermediate, layers, torch.bfloat16 if mixed else torch.float32)
    weights = list(model.parameters())
    stepped = [nn.Parameter(weight.detach().float()) for weight in weights] if mixed else weights
    optimizer = torch.optim.AdamW(stepped, fused=True)
    x = torch.randn(tokens, hidden).to(weights[0].dtype)
    with memory(model, optimizer) as census:
        for _ in range(2):  # the first step makes the moments
            model(x).sum().backward()
            held = census.live
            if mixed:
                for weight, master in zip(weights, stepped, strict=True):
                    master.grad, weight.grad = weight.grad.float(), None
            optimizer.step()
            optimizer.zero_grad()
    counters = 4 * len(stepped)  # Adam's step number of each tensor
    state = {"parameter": held.parameter, "gradient": held.gradient, "optimizer": held.optimizer - counters}
    return state | {"activation": census.peak.activation}


# Accumulation.

Microbatch = tuple[Tensor, Tensor]
ACCUMULATION = ModelConfig(61, 16, 24, 2, 2, max_seq_len=32)


@dataclass(frozen=True)
class Accumulated:
    """What accumulating did. activation: the most that was kept, bytes; calls: forward passes."""

    loss: Any
    gradients: list[Tensor | None]
    calls: int
    activation: int
    has_graph: bool = False  # whether the loss that came back can still be differentiated


def draw_microbatches(count: int, has_empty: bool) -> list[Microbatch]:
    """Microbatches of as many positions, of which very different numbers count; has_empty: none in one of them."""
    seq, draw = 24, torch.Generator().manual_seed(random.getrandbits(32))
    batches = []
    for index in range(count):
        inputs, targets = torch.randint(0, ACCUMULATION.vocab_size, (2, 2, seq), generator=draw)
        targets[:, random.randint(5, 7) if index % 2 else random.randint(20, seq) :] = -100
        batches.append((inputs, targets))
    if has_empty:
        batches[random.randrange(1, count)][1].fill_(-100)
    return batches


@one_thread()
def accumulated(accumulate: Callable, batches: Sequence[Microbatch]) -> Accumulated:
    """accumulate(model, batches) on a fresh float64 model, watched."""
    model = CountingModel(Transformer(ACCUMULATION, dtype=torch.float64))
    with memory(model) as census:
        loss = accumulate(model, list(batches))
    gradients = [parameter.grad for parameter in model.parameters()]
    has_graph = isinstance(loss, Tensor) and loss.requires_grad
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    return Accumulated(loss, gradients, model.calls, census.peak.activation, has_graph)
