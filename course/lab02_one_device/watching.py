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


class Counted(nn.Module):
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


def say_bytes(kind: str, found: float, shape: tuple[int, int, int, int], mixed: bool) -> str:
    """The mistake behind a wrong number of bytes of `kind`. shape: hidden, intermediate, layers, tokens."""
    hidden, intermediate, layers, tokens = shape
    weights, width = layers * 2 * hidden * intermediate, 2 if mixed else 4
    known = {
        "parameter": {4 * weights: "mixed precision stores them in 16 bits", width * weights / 2: "two per block"},
        "gradient": {4 * weights: "16-bit weights get 16-bit gradients"},
        "optimizer": {
            4 * weights: "Adam keeps two moments, both in float32",
            8 * weights: "the float32 master copy is missing",
            6 * weights: "of the three float32 numbers, two are given 16 bits",
        },
        "activation": {
            width * tokens * layers * intermediate: "up keeps its input as well: backward needs it for up's gradient",
            width * tokens * layers * (hidden + 2 * intermediate): "ReLU keeps its output, which is also down's "
            "input: the same tensor, counted once",
            width * tokens * layers * (2 * hidden + intermediate): "an addition keeps nothing",
            width * tokens * (hidden + intermediate): "each block keeps its own until backward comes back to it",
            4 * tokens * layers * (hidden + intermediate): "16-bit weights make 16-bit activations",
        },
    }
    return known[kind].get(found, "count the tensors that backward needs" if kind == "activation" else "see hint 2")


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


def draw_microbatches(count: int) -> list[Microbatch]:
    """Microbatches of as many positions, of which very different numbers count."""
    seq, draw = 24, torch.Generator().manual_seed(random.getrandbits(32))
    batches = []
    for index in range(count):
        inputs, targets = torch.randint(0, ACCUMULATION.vocab_size, (2, 2, seq), generator=draw)
        targets[:, random.randint(2, 5) if index % 2 else random.randint(18, seq) :] = -100
        batches.append((inputs, targets))
    return batches


@one_thread()
def accumulated(accumulate: Callable, batches: Sequence[Microbatch]) -> Accumulated:
    """accumulate(model, batches) on a fresh float64 model, watched."""
    model = Counted(Transformer(ACCUMULATION, dtype=torch.float64))
    with memory(model) as census:
        loss = accumulate(model, list(batches))
    gradients = [parameter.grad for parameter in model.parameters()]
    return Accumulated(loss, gradients, model.calls, census.peak.activation)


def mean_of_means(batches: Sequence[Microbatch]) -> list[Tensor]:
    """The gradients of the usual mistake."""
    model = Transformer(ACCUMULATION, dtype=torch.float64)
    for inputs, targets in batches:
        nll, count = model(inputs, targets=targets)
        (nll / count / len(batches)).backward()
    return [parameter.grad for parameter in model.parameters()]


def say_gradient(found: Sequence[Tensor], right: Sequence[Tensor], batches: Sequence[Microbatch], alone) -> str:
    """Which mistake makes `found` of `right`; alone(batches) gives the right gradients of a part."""
    mine, due = (torch.cat([gradient.flatten() for gradient in part]) for part in (found, right))
    if torch.allclose(mine, torch.cat([g.flatten() for g in mean_of_means(batches)]), rtol=1e-6):
        return (
            "it is the mean of the microbatches' means: a token of a short microbatch then weighs more than one of a "
            "long one. Divide each sum by the tokens of ALL microbatches"
        )
    last = torch.cat([gradient.flatten() for gradient in alone(batches[-1:])])
    if torch.allclose(mine, (mine @ last / (last @ last)) * last, rtol=1e-6, atol=1e-12):
        return "it is that of the last microbatch alone: gradients add up in .grad as long as nothing zeroes them"
    ratio = float(mine @ due / (due @ due))
    if torch.allclose(mine, ratio * due, rtol=1e-6, atol=1e-12):
        tokens = sum(int((targets != -100).sum()) for _, targets in batches)
        what = {
            tokens: "nothing was divided: there are as many counted tokens",
            1 / len(batches): "divided twice: by the tokens and by the number of microbatches",
        }
        said = next((text for factor, text in what.items() if abs(ratio / factor - 1) < 1e-6), "a wrong denominator")
        return f"it is {ratio:.4g} times too large: {said}"
    return "its direction differs from the big batch's"
