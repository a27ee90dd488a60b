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

from course.lab05_tensor_parallel.rank_programs_order import normalise
from course.shared.groups import on_groups
from course.shared.sharding import list_calls
from minillm import measure
from minillm.comm import Group, launch
from minillm.model import ModelConfig, Transformer, cross_entropy
from minillm.model.attention import sdpa
from minillm.model.rope import Rope, rotate
from minillm.model.transformer import RMSNorm
from minillm.parallel.sharding.placement import Placement, join, sum_partial
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.plan import named_gradients, placement_of, placements
from minillm.predict.training import tensor as predict
from minillm.predict.training.activations import block_activation_bytes

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
class StepTraffic:
    """Collectives by name, bytes sent, and the collectives by the shape of what the caller passed."""

    calls: Counter[str]
    bytes: int
    shapes: Counter[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class StepRecord:
    """What one rank saw. sums: the all-reduce of partial gradients (norms, copied kv heads), after backward.

    parameter, activation: bytes of its weights, and of what autograd saved; gradients: its parts, by name.
    """

    loss: float
    forward: StepTraffic
    backward: StepTraffic
    sums: StepTraffic
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


def build(group: Group, setup: Setup) -> tuple[Transformer, dict[str, Placement]]:
    """This rank's part of the model, and which part of each parameter that is."""
    config, how = setup.config, {"sequence": setup.sequence, "regather": setup.form == "regather"}
    whole = Transformer(config, seed=0, dtype=torch.float64 if setup.exact else torch.float32)
    model = tensor_parallel(whole, config, group, **how)
    return model, placements(config, group.rank, group.world_size, setup.sequence)


def step(group: Group, setup: Setup) -> StepRecord:
    """Forward, backward and the sum of partial gradients, each under a ledger of its own."""
    model, places = build(group, setup)
    batch = tokens(setup.rows)
    with measure.memory(model) as census, measure.ledger() as forward:
        total, count = model(batch[:, :-1], targets=batch[:, 1:])
    held = census.live
    with measure.ledger() as backward:
        (total / count).backward()
    with measure.ledger() as sums:
        sum_partial(named_gradients(model.named_parameters()), places, group)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    loss = (total / count).item()
    return StepRecord(
        loss, traffic(forward), traffic(backward), traffic(sums), held.parameter, held.activation, gradients
    )


def traffic(led: measure.Ledger) -> StepTraffic:
    return StepTraffic(led.calls, led.bytes(), Counter((event.op, event.shape) for event in led.events))


def step_all(group: Group, setups: Sequence[Setup]) -> list[StepRecord | None]:
    """Every setup on the first `world_size` ranks."""
    return on_groups(group, setups, lambda setup, part: step(part, setup))


def compare(setups: Sequence[Setup]) -> dict[Setup, list[StepRecord]]:
    """Each setup's findings by rank, in one launch."""
    ranks = launch(step_all, max(setup.world_size for setup in setups), list(setups), device="cpu")
    return {setup: [rank[i] for rank in ranks[: setup.world_size]] for i, setup in enumerate(setups)}


def gradient_error(setup: Setup, ranks: Sequence[StepRecord], alone: StepRecord) -> float:
    """The largest relative error of a whole gradient, put together from the ranks' parts."""
    worst = 0.0
    for name, right in alone.gradients.items():
        places = [placement_of(setup.config, name, rank, len(ranks), setup.sequence) for rank in range(len(ranks))]
        whole = join([(place, found.gradients[name]) for place, found in zip(places, ranks, strict=True)])
        worst = max(worst, ((whole - right).norm() / right.norm()).item())
    return worst


# Layers alone.


def single_layers(group: Group, rows: int = 4, hidden: int = 16) -> dict[str, tuple[str, str]]:
    """Collectives of a column layer, a row layer and a norm on a part of the sequence: (forward, backward)."""
    norm = RMSNorm(hidden, 1e-5)
    torch.nn.init.ones_(norm.weight)
    layers = {
        "column layer": (ColumnParallelLinear(hidden, 4 * hidden, group), hidden),
        "row layer": (RowParallelLinear(4 * hidden, hidden, group), 4 * hidden // group.world_size),
        "norm on 1/t of the tokens": (norm, hidden),
    }
    found = {}
    for name, (layer, inputs) in layers.items():
        x = torch.randn(rows, SEQ // group.world_size if layer is norm else SEQ, inputs, requires_grad=True)
        with measure.ledger() as forward:
            y = layer(x)
        with measure.ledger() as backward:
            y.sum().backward()
        found[name] = (listed(forward.calls), listed(backward.calls))
    return found


def listed(calls: Counter[str]) -> str:
    """{"all_gather": 2} -> "2 all_gather"."""
    return list_calls({name: count for name, count in calls.items() if count}) or "none"


# A model by hand, for a learner's pieces.


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MODEL's attention of some heads: [tokens, heads · head_dim] of whole sequences of SEQ, one after another."""
    rotation = Rope(MODEL)(torch.arange(SEQ), q.dtype)
    q, k, v = (y.view(-1, SEQ, y.shape[1] // MODEL.head_dim, MODEL.head_dim).transpose(1, 2) for y in (q, k, v))
    return sdpa(rotate(q, *rotation), rotate(k, *rotation), v).transpose(1, 2).flatten(0, 1).flatten(1)


def train_alone(steps: int, lr: float) -> list[float]:
    """Losses of MODEL in one process."""
    model, losses = Transformer(MODEL, seed=0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        batch = tokens(4, step)
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_with(group: Group, pieces: Any, steps: int, lr: float) -> list[float]:
    """Losses of MODEL cut over the group with a learner's pieces.

    pieces: Enter, cut_mlp, mlp, local_heads, attention, embed, vocabulary_cross_entropy, as in the lab.
    """
    enter, cut_mlp, mlp, local_heads, attention, embed, vocabulary_cross_entropy = pieces
    c, n, rank = MODEL, group.world_size, group.rank
    whole = {name: p.detach() for name, p in Transformer(c, seed=0).named_parameters()}
    q, kv = (
        slice(r.start * c.head_dim, r.stop * c.head_dim) for r in local_heads(c.num_heads, c.num_kv_heads, rank, n)
    )

    def own(part: Tensor) -> Tensor:
        return part.clone().requires_grad_()

    table, head = (own(whole[name].chunk(n)[rank]) for name in ("embedding.weight", "head.weight"))
    last, layers = own(whole["norm.weight"]), []
    for i in range(c.num_layers):
        w = {name.split(".", 2)[2]: part for name, part in whole.items() if name.startswith(f"blocks.{i}.")}
        heads = [w["attention.q_proj.weight"][q], w["attention.k_proj.weight"][kv], w["attention.v_proj.weight"][kv]]
        heads.append(w["attention.o_proj.weight"][:, q])
        inner = cut_mlp(*(w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")), rank, n)
        norms = w["attention_norm.weight"], w["mlp_norm.weight"]
        layers.append([[own(part) for part in parts] for parts in (heads, inner, norms)])
    weights = [table, head, last, *(part for layer in layers for parts in layer for part in parts)]
    optimizer, losses = torch.optim.AdamW(weights, lr=lr), []
    for step in range(steps):
        batch = tokens(4, step)
        x = embed(batch[:, :-1].flatten(), table, group)
        for heads, inner, norms in layers:
            x = x + attention(normalise(x, norms[0]), heads, attend, group)
            x = x + mlp(normalise(x, norms[1]), inner, group)
        logits = enter.apply(normalise(x, last), group) @ head.T
        loss = vocabulary_cross_entropy(logits, batch[:, 1:].flatten(), group).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def four_ranks_and_one(*pieces: Any, steps: int = 3, lr: float = 3e-3) -> tuple[list[float], list[float]]:
    """Losses with a learner's pieces on 4 ranks, and of minillm's model in one process."""
    return launch(train_with, 4, pieces, steps, lr, device="cpu")[0], train_alone(steps, lr)


# Predictions: `minillm.predict.training.tensor` for a setup.


def calls(setup: Setup, *parts: str) -> list[predict.Call]:
    """The collectives of a forward and a backward pass; of some parts (layers, embedding, head, loss) or of all."""
    how = {"sequence": setup.sequence, "regather": setup.form == "regather"}
    everything = predict.microbatch(setup.config, setup.rows, SEQ, setup.itemsize, **how)
    return [call for call in everything if not parts or call.part in parts]


def step_bytes(setup: Setup, *parts: str) -> int:
    """Bytes that rank 0 sends in forward and backward, by all parts or by some."""
    return predict.cost(calls(setup, *parts), setup.world_size).sent_per_rank[0]


def layer_bytes(setup: Setup) -> int:
    """Bytes that a rank sends per layer, forward and backward."""
    return step_bytes(setup, "layers") // setup.config.num_layers


def parameter_bytes(setup: Setup) -> int:
    return setup.itemsize * predict.parameters(setup.config, setup.world_size)


def layer_activation_bytes(setup: Setup) -> int:
    """Bytes that one block keeps for backward on each rank."""
    how = {"sequence": setup.sequence, "regather": setup.form == "regather"}
    return block_activation_bytes(setup.config, setup.rows, SEQ, setup.itemsize, tp=setup.world_size, **how)


# Per layer: a model of one layer more minus the model.


def per_layer(setups: Sequence[Setup]) -> dict[Setup, dict[str, Any]]:
    """What one more layer adds on rank 0: all-reduces (or halves) by direction, bytes sent, bytes kept."""
    deeper = {s: replace(s, config=replace(s.config, num_layers=s.config.num_layers + 1)) for s in setups}
    found = compare([*setups, *deeper.values()])
    return {setup: one_more(found[setup][0], found[deep][0]) for setup, deep in deeper.items()}


def one_more(shallow: StepRecord, deeper: StepRecord) -> dict[str, Any]:
    """What the layer that one model has more than the other sends and keeps."""
    return {
        "forward": deeper.forward.calls - shallow.forward.calls,
        "backward": deeper.backward.calls - shallow.backward.calls,
        "sent": deeper.sent - shallow.sent,
        "activation": deeper.activation - shallow.activation,
    }
