"""Lab 05's measurements: what a tensor-parallel step sends, holds and computes, beside its prediction.

One transformer, cut over t ranks in three forms: "tensor" (all-reduces), "sequence" (an all-gather in, a reduce-scatter
out, norms on 1/t of the tokens) and "regather" (the same, with a region's input gathered once more in backward instead
of being kept). All of them compute what one process computes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minillm import measure
from minillm.comm import Group, launch
from minillm.model import ModelConfig, Transformer
from minillm.predict import comms
from minillm.predict.model import parameters
from minillm.train.tensor import Split, join, split_of, sum_partial, tensor_parallel

MODEL = ModelConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_layers=3, num_heads=8, num_kv_heads=4, max_seq_len=64
)
FORMS = {"tensor": "tensor parallel", "sequence": "+ sequence parallel", "regather": "+ sequence parallel, regather"}
SEQ = 16


@dataclass(frozen=True)
class Setup:
    """One step of one form. rows: sequences of SEQ tokens in the batch; exact: float64."""

    world_size: int
    form: str = "tensor"
    rows: int = 4
    exact: bool = False
    config: ModelConfig = field(default=MODEL)

    @property
    def sequence(self) -> bool:
        return self.form != "tensor"

    @property
    def itemsize(self) -> int:
        return 8 if self.exact else 4

    @property
    def tokens(self) -> int:
        return self.rows * SEQ


@dataclass(frozen=True)
class Traffic:
    """Collectives by name, bytes sent, and the collectives by the shape of what the caller passed."""

    calls: Counter[str]
    bytes: int
    shapes: Counter[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Found:
    """What one rank saw. sums: the all-reduce of partial gradients (norms, copied kv heads), after backward.

    parameter, activation: bytes of its weights, and of what autograd saved; gradients: its parts, by name.
    """

    loss: float
    forward: Traffic
    backward: Traffic
    sums: Traffic
    parameter: int
    activation: int
    gradients: dict[str, Tensor]

    @property
    def sent(self) -> int:
        return self.forward.bytes + self.backward.bytes


# Rank program.


def tokens(rows: int, step: int = 0) -> Tensor:
    """[rows, SEQ + 1]: the same batch on every rank. They count up from a random start."""
    starts = torch.randint(MODEL.vocab_size, (rows, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(SEQ + 1)) % MODEL.vocab_size


def build(group: Group, setup: Setup) -> tuple[Transformer, dict[str, Split]]:
    """This rank's part of the model, and which part of each parameter that is."""
    config, how = setup.config, {"sequence": setup.sequence, "regather": setup.form == "regather"}
    whole = Transformer(config, seed=0, dtype=torch.float64 if setup.exact else torch.float32)
    model = tensor_parallel(whole, config, group, **how)
    splits = {n: split_of(config, n, group.rank, group.world_size, setup.sequence) for n, _ in model.named_parameters()}
    return model, splits


def step(group: Group, setup: Setup) -> Found:
    """Forward, backward and the sum of partial gradients, each under a ledger of its own."""
    model, splits = build(group, setup)
    batch = tokens(setup.rows)
    with measure.memory(model) as census, measure.ledger() as forward:
        total, count = model(batch[:, :-1], targets=batch[:, 1:])
    held = census.live
    with measure.ledger() as backward:
        (total / count).backward()
    with measure.ledger() as sums:
        sum_partial(model.named_parameters(), splits, group)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    loss = (total / count).item()
    return Found(loss, traffic(forward), traffic(backward), traffic(sums), held.parameter, held.activation, gradients)


def traffic(led: measure.Ledger) -> Traffic:
    return Traffic(led.calls, led.bytes(), Counter((event.op, event.shape) for event in led.events))


def step_all(group: Group, setups: Sequence[Setup]) -> list[Found | None]:
    """Every setup on the first `world_size` ranks."""
    groups = {n: group.subgroup(range(n), f"{n} ranks") for n in sorted({setup.world_size for setup in setups})}
    return [step(groups[s.world_size], s) if groups[s.world_size].rank >= 0 else None for s in setups]


def compare(setups: Sequence[Setup]) -> dict[Setup, list[Found]]:
    """Each setup's findings by rank, in one launch."""
    ranks = launch(step_all, max(setup.world_size for setup in setups), list(setups), device="cpu")
    return {setup: [rank[i] for rank in ranks[: setup.world_size]] for i, setup in enumerate(setups)}


def gradient_error(setup: Setup, ranks: Sequence[Found], alone: Found) -> float:
    """The largest relative error of a whole gradient, put together from the ranks' parts."""
    worst = 0.0
    for name, right in alone.gradients.items():
        splits = [split_of(setup.config, name, rank, len(ranks), setup.sequence) for rank in range(len(ranks))]
        whole = join([found.gradients[name] for found in ranks], splits, right.shape)
        worst = max(worst, ((whole - right).norm() / right.norm()).item())
    return worst


# Predictions.


def all_reduce_bytes(setup: Setup, numbers: int) -> int:
    """What rank 0 sends in one all-reduce of so many numbers."""
    return comms.ring_all_reduce(numbers, setup.itemsize, setup.world_size).sent_per_rank[0]


def layer_bytes(setup: Setup) -> int:
    """Bytes a rank sends per layer, forward and backward: 4 all-reduces of [batch, seq, hidden], or their halves.

    An all-gather and a reduce-scatter together send what an all-reduce sends. Regathering adds a gather per region.
    """
    numbers = setup.tokens * setup.config.hidden_size
    gather = comms.ring_all_gather(numbers, setup.itemsize, setup.world_size).sent_per_rank[0]
    return 4 * all_reduce_bytes(setup, numbers) + (2 * gather if setup.form == "regather" else 0)


def loss_bytes(setup: Setup) -> int:
    """The maximum, then the sum and the target's logit: three numbers per token."""
    return all_reduce_bytes(setup, setup.tokens) + all_reduce_bytes(setup, 2 * setup.tokens)


def step_bytes(setup: Setup) -> int:
    """Bytes a rank sends in forward and backward: layers, the embedding's sum, the head's input gradient, the loss."""
    ends = 2 * all_reduce_bytes(setup, setup.tokens * setup.config.hidden_size)
    return setup.config.num_layers * layer_bytes(setup) + ends + loss_bytes(setup)


def parameter_bytes(setup: Setup) -> int:
    """Weights on each rank: everything that is cut by t, and the norms whole (where everything divides)."""
    count = parameters(setup.config)
    return setup.itemsize * ((count.total - count.norms) // setup.world_size + count.norms)


def layer_activation_bytes(setup: Setup) -> int:
    """Bytes that one block keeps for backward on each rank.

    Per token, in numbers of h (hidden), q and kv (heads times head_dim), H (heads), f (the MLP's inner size):
        outside the regions   2·(2h + 1)                each norm's input, the same normalised, 1 / rms
        a region's input      2·h                       the norms' outputs, which the column layers read
        inside                3q + 2·kv + H + 4f        over t: attention by heads, the MLP by inner numbers
    Tensor parallel divides the last line only; sequence parallel the first, too; regathering all three.
    """
    c, t = setup.config, setup.world_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    outside, entered, inside = 2 * (2 * c.hidden_size + 1), 2 * c.hidden_size, 3 * q + 2 * kv + c.num_heads
    inside += 4 * c.intermediate_size
    if setup.sequence:
        outside /= t
    if setup.form == "regather":
        entered /= t
    return int(setup.itemsize * setup.tokens * (outside + entered + inside / t))


def megatron_activation_bytes(seq: int, batch: int, hidden: int, heads: int, t: int, sequence: bool) -> float:
    """Korthikanti et al. 2022, eq. 2 and 4: a GPT layer in 16 bits with dropout and stored scores, per rank."""
    scores = 5 * heads * seq / hidden
    per_token = (34 + scores) / t if sequence else 10 + (24 + scores) / t
    return seq * batch * hidden * per_token


# Per layer: a model of one layer more minus the model.


def per_layer(setups: Sequence[Setup]) -> dict[Setup, dict[str, Any]]:
    """What one more layer adds on rank 0: all-reduces (or halves) by direction, bytes sent, bytes kept."""
    deeper = {s: replace(s, config=replace(s.config, num_layers=s.config.num_layers + 1)) for s in setups}
    found = compare([*setups, *deeper.values()])
    lines = {}
    for setup, deep in deeper.items():
        one, more = found[setup][0], found[deep][0]
        lines[setup] = {
            "forward": more.forward.calls - one.forward.calls,
            "backward": more.backward.calls - one.backward.calls,
            "sent": more.sent - one.sent,
            "activation": more.activation - one.activation,
        }
    return lines
