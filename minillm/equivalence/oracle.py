"""The equivalence oracle: any layout must compute the gradients of a single process.

`reference` is the single process: one SGD step in float64. SGD and not Adam, because Adam divides a gradient's scale
out again and so hides a loss that is N times too large; float64, so that 1e-10 separates another order of summation
from a bug; every gradient and weight by name, because a loss agrees long before all of them do.

`compare` does the same step on real ranks, through the very seam that the training loop uses (`train/strategies`),
and says how far the worst parameter is off, in the corners of `cases.py`.

    python -m minillm oracle --dp 1,2,3,4 --zero 0,1,2,3 --accumulate 1,3
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.adapters.attach import adaptable, adapter_parameters, attach, chosen_layers
from minillm.adapters.dropout import numbered
from minillm.adapters.lora import LoraConfig, initial_adapter
from minillm.adapters.start import Start
from minillm.comm import Group, launch
from minillm.equivalence.cases import Batch, Case, cases_of
from minillm.model import ModelConfig, Transformer, cross_entropy, dense
from minillm.model.loss import IGNORE
from minillm.parallel.sharding.optimizer import Named
from minillm.parallel.sharding.placement import clip_, gradients_of
from minillm.quantize.formats import NF4
from minillm.quantize.linear import QuantizedLinear
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from minillm.train.strategies.single_device import Microbatch, SingleDevice

TOLERANCE = 1e-10  # relative, in float64


@dataclass(frozen=True)
class Reference:
    """One step in float64. gradients: of trainable parameters, before clipping; weights: of all, after the step."""

    loss: float
    gradients: dict[str, Tensor]
    grad_norm: float
    weights: dict[str, Tensor]


def reference(
    config: ModelConfig,
    batch: Batch,
    *,
    seed: int = 0,
    lr: float = 0.1,
    frozen: tuple[str, ...] = (),
    max_grad_norm: float | None = None,
    lora: LoraConfig | None = None,
    qlora: bool = False,
) -> Reference:
    """One SGD step of `Transformer(config, seed=seed)` on the whole batch, in this process.

    frozen: names or patterns of parameters that take no gradient ("blocks.0.*"). max_grad_norm: clip to it before.
    lora: adapters are trained and nothing else. Here they are no layers: each weight that has one is W + scale · B A.
        With dropout, which no weight expresses, they are the layers of one process.
    qlora: the weights of the blocks' linear layers are what their NF4 codes stand for.
    A tied embedding is one parameter, "embedding.weight", whose gradient is the sum of both uses.
    ValueError for a pattern that matches nothing, or when everything is frozen.
    """
    model = Transformer(config, seed=seed, device="cpu", dtype=torch.float64, attention=dense)
    _freeze(model.named_parameters(), frozen, everywhere=True)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    updated: dict[str, Tensor] = {}
    if qlora:
        _round_to_nf4(model)
    if lora and lora.dropout:
        attach(model, lora, seed=seed)
        trainable = dict(adapter_parameters(model))
    elif lora:
        trainable, updated = _adapters_of(model, lora, seed)
    if not trainable:
        raise ValueError(f"frozen {frozen} leaves no parameter to train: freeze less.")

    def forward(**how: Any) -> Any:
        how["attention"] = partial(dense, segments=batch.documents)
        return torch.func.functional_call(model, updated, (batch.tokens,), how)

    with numbered(model, _keys_of(batch, lora)):
        if config.moe:  # the losses of routers belong to the gradients of this sum
            total, weight = forward(targets=batch.targets, weights=batch.weights)
            loss = total / weight
        else:
            loss = cross_entropy(forward(), batch.targets, batch.weights)
    gradients = dict(zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True))
    grad_norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt().item()
    clip = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (grad_norm + 1e-6))  # as torch clips
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter -= lr * clip * gradients[name]
    weights = {name: each.detach() for name, each in (trainable if lora else dict(model.named_parameters())).items()}
    return Reference(loss.item(), gradients, grad_norm, weights)


def _adapters_of(model: Transformer, lora: LoraConfig, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(A and B of every layer, as leaves; the weights that they update, as functions of them), by name."""
    leaves: dict[str, Tensor] = {}
    updated: dict[str, Tensor] = {}
    for name in chosen_layers(adaptable(model), lora.targets):
        weight = model.get_parameter(f"{name}.weight").detach()
        shapes = {"lora_A": (lora.rank, weight.shape[1]), "lora_B": (weight.shape[0], lora.rank)}
        a, b = (
            initial_adapter(lora, f"{name}.{each}", shape, seed).double().requires_grad_()
            for each, shape in shapes.items()
        )
        leaves |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
        updated[f"{name}.weight"] = weight + lora.scale * (b @ a)
    return leaves, updated


def _keys_of(batch: Batch, lora: LoraConfig | None) -> Tensor | None:
    """Of the rows, for dropout."""
    return torch.arange(len(batch.tokens)) if lora and lora.dropout else None


@torch.no_grad()
def _round_to_nf4(model: Transformer) -> None:
    for layer in adaptable(model).values():
        layer.weight.copy_(QuantizedLinear.of(layer, NF4()).weight)


def _freeze(named: Iterable[tuple[str, torch.nn.Parameter]], frozen: Sequence[str], everywhere: bool = False) -> None:
    """everywhere: these are all of the model's parameters, so a pattern that matches none of them is a mistake."""
    named = list(named)
    for pattern in frozen:
        matched = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if everywhere and not matched:
            raise ValueError(f"frozen pattern {pattern!r} matches no parameter: see Transformer.named_parameters().")
        for parameter in matched:
            parameter.requires_grad_(False)


@dataclass(frozen=True)
class Comparison:
    """A layout beside the reference. worst_*: largest relative error of a parameter; parameter: the worst gradient's.

    grad_norm: its relative error. identical: every rank holds the same bits, after further steps too.
    """

    layout: str
    worst_gradient: float
    worst_weight: float
    grad_norm: float
    parameter: str
    identical: bool
    ok: bool


MakeStrategy = Callable[[Group, ParallelConfig], SingleDevice]


def compare(
    layouts: ParallelConfig | Sequence[ParallelConfig],
    cases: Mapping[str, Case] | Callable[[ParallelConfig], Mapping[str, Case]] = cases_of,
    *,
    seed: int = 0,
    lr: float = 0.1,
    steps: int = 5,
    tolerance: float = TOLERANCE,
    strategy: MakeStrategy = make_strategy,
) -> list[Comparison]:
    """Runs each layout on each case on real ranks (one launch per number of ranks); a row for each of both.

    cases: of all layouts, or a function that says which of each: by default CASES, SPLIT_CASES for layouts with tp or
        pp, CONTEXT_CASES for those with cp and EXPERT_CASES for those with ep.
    steps: SGD steps in all; the first is compared with `reference`, the ranks' weights with each other after the last.
    strategy: (group, layout) -> the strategy that is put to the test.
    """
    layouts = [layouts] if isinstance(layouts, ParallelConfig) else list(layouts)
    jobs = {layout: dict(cases(layout) if callable(cases) else cases) for layout in layouts}
    for layout, chosen in jobs.items():
        for case in chosen.values():
            layout.check(case.config, case.batch.tokens.shape[1])
    rows: dict[tuple[ParallelConfig, str], Comparison] = {}
    for world_size in sorted({layout.world_size for layout in layouts}):
        wanted = {layout: chosen for layout, chosen in jobs.items() if layout.world_size == world_size}
        expected: dict[int, Reference] = {}
        for outcome in launch(_run, world_size, strategy, wanted, seed, lr, steps, device=None)[0]:
            case = jobs[outcome.layout][outcome.case]
            if id(case) not in expected:
                how = {"frozen": case.frozen, "max_grad_norm": case.max_grad_norm}
                how |= {"lora": case.lora, "qlora": case.qlora}
                expected[id(case)] = reference(case.config, case.batch, seed=seed, lr=lr, **how)
            rows[outcome.layout, outcome.case] = _judge(outcome, expected[id(case)], tolerance)
    return [rows[layout, name] for layout, chosen in jobs.items() for name in chosen]


@dataclass(frozen=True)
class _Outcome:
    """What the ranks came to: whole tensors, by name."""

    layout: ParallelConfig
    case: str
    gradients: dict[str, Tensor]
    grad_norm: float
    weights: dict[str, Tensor]
    identical: bool


def _run(group: Group, make: MakeStrategy, jobs: dict[ParallelConfig, dict[str, Case]], *how: Any) -> list[_Outcome]:
    done = []
    for layout, cases in jobs.items():
        with make(group, layout) as strategy:
            done += [_step(group, strategy, layout, name, case, *how) for name, case in cases.items()]
    return done if group.rank == 0 else []


def _step(
    group: Group,
    strategy: SingleDevice,
    layout: ParallelConfig,
    name: str,
    case: Case,
    seed: int,
    lr: float,
    steps: int,
) -> _Outcome:
    start = Start(lora=case.lora, qlora=case.qlora)
    how = {"dtype": torch.float64, "attention": dense, "device": group.device}
    model = strategy.build(case.config, seed=seed, start=start, **how)
    batch = case.batch.to(group.device)
    _freeze(model.named_parameters(), case.frozen)
    module = strategy.wrap(model)
    updater = strategy.updater(module, partial(_sgd, lr=lr))
    for step in range(steps):
        _backward(strategy, module, batch, layout.accumulate, _keys_of(batch, case.lora))
        strategy.prepare_gradients()
        norm = strategy.grad_norm(updater.parameters)
        if step == 0:
            gradients = {name: gradient.cpu().clone() for name, gradient in strategy.gradients().items()}
            grad_norm = norm.item()
        clip_(gradients_of(updater.parameters), norm, case.max_grad_norm)
        updater.step()
        updater.zero_grad()
        if step == 0:
            weights = {name: weight.cpu().clone() for name, weight in strategy.weights().items()}
    bits = hashlib.sha256(b"".join(weight.cpu().numpy().tobytes() for weight in strategy.weights().values())).digest()
    return _Outcome(layout, name, gradients, grad_norm, weights, len(set(group.gather_objects(bits))) == 1)


def _backward(
    strategy: SingleDevice, module: torch.nn.Module, batch: Batch, accumulate: int, keys: Tensor | None = None
) -> None:
    """This rank's rows of the batch, and its positions of them, in `accumulate` microbatches."""
    parts = [batch.tokens, batch.targets, batch.weights, batch.documents, None, keys]
    if (positions := strategy.positions(batch.tokens.shape[1])) is not None:
        parts[:3] = _positions_of(batch, positions)
    rows = [None if x is None else x.tensor_split(strategy.world_size)[strategy.rank] for x in parts]
    micro = [[None] * accumulate if x is None else x.tensor_split(accumulate) for x in rows]
    micro = [Microbatch(*each) for each in zip(*micro, strict=True)]
    loss_divisor = strategy.loss_divisor(sum(((each.targets != IGNORE) * each.weights).sum() for each in micro))
    strategy.forward_backward(module, micro, loss_divisor)


def _positions_of(batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and weights at those positions; what lies beyond the end counts for nothing."""
    length, positions = batch.tokens.shape[1], positions.to(batch.tokens.device)
    tokens, targets, weights = (
        x[:, positions.clamp(max=length - 1)] for x in (batch.tokens, batch.targets, batch.weights)
    )
    return tokens, targets.masked_fill(positions >= length, IGNORE), weights


def _sgd(named: Named, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([parameter for _, parameter in named], lr=lr)


def _judge(outcome: _Outcome, expected: Reference, tolerance: float) -> Comparison:
    gradient_errors = _errors(outcome.gradients, expected.gradients)
    worst = max(gradient_errors, key=gradient_errors.__getitem__)
    weight = max(_errors(outcome.weights, expected.weights).values())
    norm = abs(outcome.grad_norm - expected.grad_norm) / expected.grad_norm
    ok = max(gradient_errors[worst], weight, norm) <= tolerance and outcome.identical
    name = f"{outcome.layout}, {outcome.case}"
    return Comparison(name, gradient_errors[worst], weight, norm, worst, outcome.identical, ok)


def _errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """max |found - expected| / max |expected| for each name; infinite if it is missing or not a number.

    A parameter whose true gradient is zero is measured against the largest of the others: rounding has no scale of
    its own.
    """
    floor = 1e-6 * max(tensor.abs().max().item() for tensor in expected.values())
    errors = {}
    for name in expected.keys() | found.keys():
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            errors[name] = math.inf
            continue
        difference = (found[name] - expected[name]).abs().max().item()
        scale = max(expected[name].abs().max().item(), floor)
        errors[name] = difference / scale if math.isfinite(difference) else math.inf
    return errors
