"""What lab 09's last exercise runs on four ranks: a hybrid step in several meshes, beside one process in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minillm import measure
from minillm.comm import Group, Mesh
from minillm.model import ModelConfig, Transformer, dense
from minillm.model.loss import IGNORE
from minillm.parallel.context_parallel import context_attention, context_parallel
from minillm.parallel.sharding.placement import Partial
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.plan import placements

WORLD = 4
ROWS, SEQ = range(4, 13, 4), range(24, 161, 8)  # sizes that are drawn: dp divides the rows, zigzag over cp the sequence
CONFIG = ModelConfig(32, 16, 24, 2, 8, 4, max_seq_len=SEQ[-1])
MESHES = (
    {"dp": 2, "cp": 1, "tp": 2},
    {"dp": 2, "cp": 2, "tp": 1},
    {"dp": 1, "cp": 4, "tp": 1},
    {"dp": 1, "cp": 2, "tp": 2},
)
ALONE = {"dp": 1, "cp": 1, "tp": 4}, {"dp": 4, "cp": 1, "tp": 1}  # one axis has all ranks: none may wait for another
WHOLE = {"dp": 2, "cp": 1, "tp": 2}  # once more without sequence parallelism: each tp rank's norms see all tokens
Reference = tuple[float, dict[str, Tensor]]  # of one process: the loss, and the gradients by parameter


@dataclass(frozen=True)
class TrainingCase:
    """tokens, targets: [rows, seq]; about one target in four does not count, so ranks have different numbers."""

    tokens: Tensor
    targets: Tensor
    seed: int


@dataclass(frozen=True)
class Outcome:
    """A step on one rank. errors: relative error of every parameter's gradient; loss: of the loss that was returned.

    sent: bytes of all-reduces over dp and cp; gradients: bytes of this rank's gradients.
    """

    mesh: str
    errors: dict[str, float]
    loss: float
    sent: int
    gradients: int

    @property
    def parameter(self) -> str:
        """The one whose gradient is furthest off."""
        return max(self.errors, key=self.errors.__getitem__)

    @property
    def worst(self) -> float:
        return self.errors[self.parameter]


def draw(seed: int) -> TrainingCase:
    draw = torch.Generator().manual_seed(seed)
    rows, seq = (sizes[int(torch.randint(len(sizes), (), generator=draw))] for sizes in (ROWS, SEQ))
    tokens = torch.randint(CONFIG.vocab_size, (rows, seq + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    targets[:, : seq // 2][torch.rand(rows, seq // 2, generator=draw) < 0.5] = IGNORE
    return TrainingCase(tokens[:, :-1], targets, seed)


def name_of(axes: dict[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1 or axis == "dp")


def run_steps(group: Group, learner: Callable, seed: int, more: bool = False) -> list[Outcome]:
    """The learner's step in each mesh, with sequence parallelism where there is tp; more: in ALONE and WHOLE, too.

    Each mesh has a batch and weights of its own, drawn from `seed`.
    """
    torch.set_num_threads(1)
    cases = [(axes, axes["tp"] > 1, name_of(axes)) for axes in (*MESHES, *(ALONE if more else ()))]
    if more:
        cases.append((WHOLE, False, f"{name_of(WHOLE)} without sequence parallelism"))
    found = []
    for number, (axes, sequence, name) in enumerate(cases):
        case = draw(seed + number)
        case = replace(case, tokens=case.tokens.to(group.device), targets=case.targets.to(group.device))
        found.append(_step(Mesh(group, **axes), name, sequence, learner, case))
    return found


def _alone(case: TrainingCase) -> Reference:
    model = Transformer(CONFIG, seed=case.seed % 1000, dtype=torch.float64, attention=dense)
    loss, count = model(case.tokens, targets=case.targets)
    (loss / count).backward()
    return (loss / count).item(), {name: p.grad for name, p in model.named_parameters()}


def _step(mesh: Mesh, name: str, sequence: bool, learner: Callable, case: TrainingCase) -> Outcome:
    tp, (right_loss, right) = mesh.tp, _alone(case)
    model = Transformer(CONFIG, seed=case.seed % 1000, dtype=torch.float64, attention=dense)
    if tp.world_size > 1:
        model = tensor_parallel(model, CONFIG, tp, sequence=sequence)
    rows, seq = case.tokens.shape
    own = slice(*(place * rows // mesh.dp.world_size for place in (mesh.dp.rank, mesh.dp.rank + 1)))
    mine = case.tokens[own], case.targets[own]
    if mesh.cp.world_size > 1:
        attention = context_attention("zigzag", mesh.cp)
        model = context_parallel(model, attention)
        mine = tuple(x[:, attention.positions(seq)] for x in mine)
    places = placements(CONFIG, tp.rank, tp.world_size, sequence)
    shares = {key for key, place in places.items() if any(isinstance(part, Partial) for part in place.parts)}
    with measure.ledger() as led:
        loss = learner(model, mine, mesh, shares)
    found = {key: p.grad for key, p in model.named_parameters()}
    errors = {key: _off(found[key], places[key].cut(whole)) for key, whole in right.items()}
    sent = sum(led.bytes(op="all_reduce", group=each) for each in ("dp", "cp", "dp_cp"))
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    off = _at_worst(abs(_number(loss) - right_loss) / right_loss)
    return Outcome(name, errors, off, sent, held)


def _number(loss: Any) -> float:
    return float(loss) if loss is not None else float("nan")


def _off(found: Tensor | None, wanted: Tensor) -> float:
    if found is None:
        return float("inf")
    return _at_worst(((found - wanted).norm() / wanted.norm()).item())


def _at_worst(error: float) -> float:
    """The error, infinite if it is no number: NaN is not larger than anything, so that no maximum would show it."""
    return float("inf") if math.isnan(error) else error


def worst(found: Sequence[Outcome]) -> Outcome:
    """Of the ranks: the one whose gradients are furthest off."""
    return max(found, key=lambda outcome: outcome.worst)
