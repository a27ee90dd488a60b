"""Lab 05's rank programs: a learner's tensor-parallel pieces at work on real ranks, forward and backward told apart.

Each program takes the learner's object and a list of cases, so that one launch serves several numbers of ranks. What
came out is compared with one process in float64; beside it stand the collectives and the bytes of either direction,
because "right values" says nothing about what it cost.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from course.kit.exercises import CheckFailed
from course.kit.receipts import Row
from course.shared.groups import on_groups
from course.shared.sharding import by_case, list_calls
from course.shared.trials import run
from minillm import measure
from minillm.comm import Group, RankError

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative error that another order of summation can explain
WORLDS = (4, 3)  # of which a receipt has rows, in float64
LARGER = (5, 6)  # one of them is drawn and judged without rows, in float32: no world or dtype is the only one
Case = TypeVar("Case")


def draw_cases(draw: Callable[[int], Case]) -> list[Case]:
    """draw(world size) for those that a receipt shows and for a larger one, in float32."""
    return [*map(draw, WORLDS), in_float32(draw(random.choice(LARGER)))]


def in_float32(case: Case) -> Case:
    """The same case, a dataclass, with its float64 tensors in float32."""
    return replace(case, **{each.name: _cast(getattr(case, each.name)) for each in fields(case)})


def _cast(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    return type(value)(map(_cast, value)) if isinstance(value, (list, tuple)) else value


def shown(case: Any, rows: Sequence[Row]) -> list[Row]:
    """The rows of a case that the receipt shows; of the larger world only those that are off."""
    return [each for each in rows if case.world_size not in LARGER or each.verdict == "off"]


@dataclass(frozen=True)
class RankTraffic:
    """What a rank communicated. largest: numbers in the largest tensor it handed to a collective."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    largest: int = 0

    def __str__(self) -> str:
        return list_calls(self.calls) or "nothing"


@dataclass(frozen=True)
class Passed:
    """One rank, forward and backward. results: tensors by name; held: bytes of its weights."""

    results: dict[str, Any]
    forward: RankTraffic
    backward: RankTraffic = field(default_factory=RankTraffic)
    held: int = 0


def try_cases(program: Callable[..., Any], learner: Any, cases: Sequence[Any]) -> list[list[Any]]:
    """What `program` brings back, by case and rank; what a rank said about the answer is said to the learner."""
    try:
        return by_case(run(program, max(case.world_size for case in cases), learner, cases), cases)
    except RankError as error:
        if said := re.search(r"raised CheckFailed: (.+)", str(error)):
            raise CheckFailed(said[1]) from None
        raise


def traffic(led: measure.Ledger) -> RankTraffic:
    return RankTraffic(led.calls, led.bytes(), max((math.prod(event.shape) for event in led.events), default=0))


def there_and_back(
    compute: Callable[[], Tensor], output_gradient: Tensor, leaves: dict[str, Tensor], name: str = "output"
) -> Passed:
    """compute() and its backward pass, each under a ledger; the gradients of `leaves` under their names."""
    with measure.ledger() as forward:
        output = compute()
    if not isinstance(output, Tensor):
        raise CheckFailed(f"it returned {output!r} where a tensor is asked for: is there a return?")
    if output.shape != output_gradient.shape:
        raise CheckFailed(f"it returned {list(output.shape)}, but the exercise asks for {list(output_gradient.shape)}")
    if output.dtype != output_gradient.dtype:
        raise CheckFailed(f"it returned {output.dtype} for inputs of {output_gradient.dtype}: keep their dtype")
    if not output.requires_grad:
        gathered = (
            f" (forward called {traffic(forward)}: no weight has to travel)" if forward.calls["all_gather"] else ""
        )
        raise CheckFailed(
            "autograd cannot pass through it: a collective has no backward of its own, so what it returns is a new "
            f"leaf. Let Enter and Leave communicate, whose backward you wrote{gathered}"
        )
    with measure.ledger() as backward:
        output.backward(output_gradient)
    results = {name: output.detach().clone()} | {f"d{key}": leaf.grad for key, leaf in leaves.items()}
    held = sum(leaf.nbytes for key, leaf in leaves.items() if key != "x")
    return Passed(results, traffic(forward), traffic(backward), held)


def leaf(x: Tensor) -> Tensor:
    """A copy that gathers a gradient."""
    return x.detach().clone().requires_grad_()


def alone(group: Group) -> Group:
    """A group of this rank only, another group than the exercise's. Every rank of `group`, the world, calls it."""
    return [group.subgroup([rank], f"rank {rank} alone") for rank in range(group.world_size)][group.rank]


def close(found: Any, wanted: Tensor) -> bool:
    same, relative = isinstance(found, Tensor) and found.shape == wanted.shape, CLOSE[wanted.dtype]
    absolute = relative if wanted.dtype == torch.float32 else 1e-11
    return same and torch.allclose(found.double(), wanted.double(), rtol=relative, atol=absolute)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# The two conjugate operators.


@dataclass(frozen=True)
class Operators:
    """x: what all ranks have; partials[r]: rank r's share; gradients[r]: what backward hands to rank r."""

    x: Tensor
    partials: list[Tensor]
    gradients: list[Tensor]

    @property
    def world_size(self) -> int:
        return len(self.partials)


def run_operators(group: Group, learner: Any, cases: Sequence[Operators]) -> list[dict[str, Passed] | None]:
    """Enter and Leave, each alone; "handed" is the gradient or the share after the operator had it.

    "crossed" is the gradient of x where Enter met another group between this forward and its backward pass.
    """
    other = alone(group)

    def run(case: Operators, part: Group) -> dict[str, Passed]:
        enter, leave = learner
        x, handed = leaf(case.x), case.gradients[part.rank].clone()
        first = there_and_back(lambda: enter.apply(x, part), handed, {"x": x})
        crossed = leaf(case.x)
        output = enter.apply(crossed, part)
        enter.apply(leaf(case.x), other)
        output.backward(case.gradients[part.rank].clone())
        share = leaf(case.partials[part.rank])
        second = there_and_back(lambda: leave.apply(share, part), case.gradients[0].clone(), {"x": share})
        return {
            "enter": Passed(first.results | {"handed": handed, "crossed": crossed.grad}, first.forward, first.backward),
            "leave": Passed(second.results | {"handed": share.detach()}, second.forward, second.backward),
        }

    return on_groups(group, cases, run)


# A pair of layers; attention.


@dataclass(frozen=True)
class Layer:
    """A layer of some matrices: x [tokens, hidden] in, the same out. heads: (query heads, kv heads), attention only."""

    x: Tensor
    weights: tuple[Tensor, ...]
    output_gradient: Tensor
    world_size: int
    heads: tuple[int, int] = (0, 0)

    def alone(self, compute: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Output and gradients in one process: "output", "dx", "d0", "d1", ..."""
        x, weights = leaf(self.x), [leaf(weight) for weight in self.weights]
        output = compute(x, *weights)
        output.backward(self.output_gradient)
        return {"output": output.detach(), "dx": x.grad} | {f"d{i}": w.grad for i, w in enumerate(weights)}


def whole_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def draw_mlp(world: int) -> Layer:
    hidden, inner = (world * times for times in random.sample(range(2, 7), 2))  # both divide: any cut is possible
    tokens, shapes = random.randint(3, 5), ((inner, hidden), (inner, hidden), (hidden, inner))
    weights = tuple(randn(*shape) / 2 for shape in shapes)
    return Layer(randn(tokens, hidden), weights, randn(tokens, hidden), world)


def run_mlp(group: Group, learner: Any, cases: Sequence[Layer]) -> list[Passed | None]:
    """cut(gate, up, down, rank, world_size) -> shards, then mlp(x, shards, group) forward and backward."""

    def run(case: Layer, part: Group) -> Passed:
        cut, mlp = learner
        pieces = cut(*case.weights, part.rank, part.world_size)
        if not isinstance(pieces, (tuple, list)) or [type(piece) for piece in pieces] != [Tensor] * 3:
            raise CheckFailed(
                f"cut_mlp returned {pieces!r}; the exercise asks for three tensors: this rank's gate, up, down"
            )
        found, inner = [list(piece.shape) for piece in pieces], len(case.weights[0]) // part.world_size
        if found != [[inner, case.x.shape[1]]] * 2 + [[case.x.shape[1], inner]]:
            whole = [list(weight.shape) for weight in case.weights]
            raise CheckFailed(
                f"cut_mlp makes {found} of {whole} for a rank of {part.world_size}: a rank should have {inner} of the "
                f"{len(case.weights[0])} inner numbers, whole, and nothing of the others"
            )
        shards = [leaf(piece.clone()) for piece in pieces]
        x = leaf(case.x)
        leaves = {"x": x} | {str(i): shard for i, shard in enumerate(shards)}
        return there_and_back(lambda: mlp(x, shards, part), case.output_gradient, leaves)

    return on_groups(group, cases, run)


HEAD = 4


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the heads it is given: q [tokens, heads·4], k and v [tokens, kv_heads·4] -> like q."""
    q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(0, 1)[None] for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y[0].transpose(0, 1).flatten(1)


def whole_attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    return attend(x @ q.T, x @ k.T, x @ v.T) @ o.T


def draw_heads(world: int) -> tuple[int, int]:
    """(query heads, kv heads) for so many ranks: each has kv heads of its own, or several hold the same one."""
    shared = [kv_heads for kv_heads in range(1, world) if world % kv_heads == 0]
    kv_heads = random.choice([*shared, world, 2 * world])
    return random.randint(1, 3) * max(kv_heads, world), kv_heads


def draw_attention(heads: int, kv_heads: int, world: int) -> Layer:
    hidden, tokens = random.randint(5, 9), random.randint(4, 6)
    shapes = ((heads * HEAD, hidden), (kv_heads * HEAD, hidden), (kv_heads * HEAD, hidden), (hidden, heads * HEAD))
    weights = tuple(randn(*shape) / 2 for shape in shapes)
    return Layer(randn(tokens, hidden), weights, randn(tokens, hidden), world, (heads, kv_heads))


def cut_heads(weights: Sequence[Tensor], queries: range, keys: range) -> list[Tensor]:
    """q, k, v, o of these query and kv heads only."""
    q, k, v, o = weights
    rows, kv_rows = (slice(r.start * HEAD, r.stop * HEAD) for r in (queries, keys))
    return [q[rows], k[kv_rows], v[kv_rows], o[:, rows]]


def run_attention(group: Group, learner: Any, cases: Sequence[Layer]) -> list[Passed | None]:
    """local_heads(...) says which heads, then attention(x, shards, attend, group) forward and backward."""

    def run(case: Layer, part: Group) -> Passed:
        local_heads, attention = learner
        shards = [leaf(w) for w in cut_heads(case.weights, *local_heads(*case.heads, part.rank, part.world_size))]
        x = leaf(case.x)
        leaves = {"x": x} | {str(i): shard for i, shard in enumerate(shards)}
        return there_and_back(lambda: attention(x, shards, attend, part), case.output_gradient, leaves)

    return on_groups(group, cases, run)


# The vocabulary.


@dataclass(frozen=True)
class Vocabulary:
    """table: [vocab, hidden], or the logits [tokens, vocab]; ids: the tokens or the targets."""

    table: Tensor
    ids: Tensor
    output_gradient: Tensor
    world_size: int
    columns: bool = False

    def part(self, rank: int) -> Tensor:
        return self.table.chunk(self.world_size, dim=1 if self.columns else 0)[rank].clone()


def run_vocabulary(group: Group, learner: Callable, cases: Sequence[Vocabulary]) -> list[Passed | None]:
    """An embedding, learner(ids, rows, group), or a loss, learner(logits, ids, group)."""

    def run(case: Vocabulary, part: Group) -> Passed:
        mine, ids = leaf(case.part(part.rank)), case.ids.clone()
        arguments = (mine, ids) if case.columns else (ids, mine)
        passed = there_and_back(lambda: learner(*arguments, part), case.output_gradient, {"0": mine})
        same = torch.equal(ids, case.ids), torch.equal(mine, case.part(part.rank))
        passed.results["changed"] = [
            name for name, kept in zip(("ids", "weights or logits"), same, strict=True) if not kept
        ]
        return passed

    return on_groups(group, cases, run)
