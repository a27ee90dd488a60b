"""Lab 05's clocks and counters: what overlap hides, what a slow link costs, a pair that gathers.

All links here are emulated, and where compute has to overlap with them it is emulated too: a product that sleeps takes
as long on a busy machine as on an idle one.
"""

import time
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.lab05_tensor_parallel.experiments import MODEL, SEQ, Setup, build, calls, tokens
from course.shared.measuring import timed
from minillm import measure
from minillm.comm import Group, Link, launch
from minillm.model import ModelConfig, Transformer, cross_entropy
from minillm.parallel import BucketedDDP
from minillm.parallel.sharding.placement import sum_partial
from minillm.parallel.tensor_parallel.plan import named_gradients
from minillm.parallel.tensor_parallel.regions import copy_to, reduce_from
from minillm.predict import comms
from minillm.predict.model import parameters
from minillm.predict.training import tensor as predict

LINK = Link(latency_s=1e-3, bandwidth_bytes_per_s=10e6, name="emulated")
SLOW = Link(latency_s=4e-3, bandwidth_bytes_per_s=6e6, name="slow")
LAYERS, NUMBERS, PRODUCT_S = 4, 40_000, 0.02  # column layers; of an activation; of dX, and of dW
ROW_NUMBERS, ROW_S = 200_000, 0.1  # of a row layer's output; of its product


# Overlap.


class _SleepyColumn(torch.autograd.Function):
    """The backward pass of a column layer whose two products take PRODUCT_S each."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, overlap: bool, name: str) -> Tensor:
        ctx.group, ctx.overlap, ctx.name = group, overlap, name
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        with measure.span(f"dX {ctx.name}"):
            time.sleep(PRODUCT_S)
            dx = gradient.clone()
        handle = ctx.group.all_reduce(dx, "avg", async_op=True)
        if not ctx.overlap:
            handle.wait()
        with measure.span(f"dW {ctx.name}"):
            time.sleep(PRODUCT_S)
        return handle.wait(), None, None, None


def column_steps(group: Group) -> dict[str, tuple[measure.Ledger, float]]:
    """Backward through LAYERS column layers, waiting for each all-reduce at once and after dW: ledger, seconds."""
    return {name: _quicker(group, name == "overlapped") for name in ("waits at once", "overlapped")}


def _quicker(group: Group, overlap: bool) -> tuple[measure.Ledger, float]:
    """Of two passes the one whose slowest rank was quicker; one before them connects the ranks."""
    passes = []
    for _ in range(3):
        y = torch.ones(NUMBERS, requires_grad=True)
        for layer in range(LAYERS):
            y = _SleepyColumn.apply(y, group, overlap, str(layer))
        passes.append(timed(group, partial(y.backward, torch.ones(NUMBERS))))
    seconds, led = min(passes[1:], key=itemgetter(0))
    return led, seconds


def row_forward(group: Group, pieces: int) -> float:
    """Seconds of a row layer's forward whose tokens are cut into pieces: while the sum of one piece travels, the next
    is computed. The faster of two passes, after one that connects the ranks."""

    def forward() -> None:
        works = []
        for part in torch.ones(ROW_NUMBERS).chunk(pieces):
            time.sleep(ROW_S / pieces)
            works.append(group.all_reduce(part.clone(), async_op=True))
        for work in works:
            work.wait()

    return min([timed(group, forward)[0] for _ in range(3)][1:])


def forward_on_a_clock(counts: Sequence[int] = (1, 2, 4), nproc: int = 2) -> dict[int, tuple[float, float]]:
    """By number of pieces: seconds of `row_forward`, predicted and measured."""

    def run(group: Group) -> list[float]:
        return [row_forward(group, pieces) for pieces in counts]

    measured, found = launch(run, nproc, link=LINK, device="cpu")[0], {}
    for pieces, seconds in zip(counts, measured, strict=True):
        reduce = comms.ring_all_reduce(ROW_NUMBERS // pieces, 4, nproc).time(LINK.latency_s, LINK.bandwidth_bytes_per_s)
        product = ROW_S / pieces
        found[pieces] = product + (pieces - 1) * max(product, reduce) + reduce, seconds
    return found


def overlap_on_a_clock(nproc: int = 2) -> dict[str, dict[str, Any]]:
    """By form: seconds of the backward pass predicted and measured, and the ranks' ledgers."""
    ranks = launch(column_steps, nproc, link=LINK, device="cpu")
    reduce = comms.ring_all_reduce(NUMBERS, 4, nproc).time(LINK.latency_s, LINK.bandwidth_bytes_per_s)
    predicted = {"waits at once": 2 * PRODUCT_S + reduce, "overlapped": PRODUCT_S + max(PRODUCT_S, reduce)}
    return {
        name: {
            "predicted_s": LAYERS * predicted[name],
            "measured_s": max(rank[name][1] for rank in ranks),
            "ledgers": [rank[name][0] for rank in ranks],
        }
        for name in predicted
    }


# A slow link: the same batch, divided by weights or by rows.


def timed_steps(group: Group, batches: Sequence[int]) -> dict[tuple[str, int], float]:
    """Seconds of the quickest of three steps, by (what is divided, rows)."""
    found = {}
    for rows in batches:
        model, places = build(group, Setup(group.world_size, rows=rows))
        ddp = BucketedDDP(Transformer(MODEL, seed=0), group)
        share = tokens(rows)[group.rank :: group.world_size]

        def tensor(rows: int = rows, model: nn.Module = model, places: Any = places) -> None:
            total, count = model(tokens(rows)[:, :-1], targets=tokens(rows)[:, 1:])
            (total / count).backward()
            sum_partial(named_gradients(model.named_parameters()), places, group)

        def data(ddp: nn.Module = ddp, share: Tensor = share) -> None:
            cross_entropy(ddp(share[:, :-1]), share[:, 1:]).backward()
            ddp.zero_grad()

        for name, run in (("tensor", tensor), ("data", data)):
            found[name, rows] = min(timed(group, run)[0] for _ in range(3))
    return found


def over_a_slow_link(batches: Sequence[int] = (4, 16, 32), nproc: int = 2) -> dict[str, Any]:
    """Seconds of a step of either kind over a slow link: bytes / bandwidth + rounds · latency, and measured."""
    measured = launch(timed_steps, nproc, list(batches), link=SLOW, device="cpu")[0]
    rows = [
        {"kind": kind, "tokens": rows * SEQ, "predicted_s": slow_seconds(kind, rows, nproc), "measured_s": seconds}
        for (kind, rows), seconds in measured.items()
    ]
    return {"world_size": nproc, "emulated": True, "bandwidth_bytes_per_s": SLOW.bandwidth_bytes_per_s, "rows": rows}


def slow_seconds(kind: str, rows: int, nproc: int) -> float:
    """Communication alone: 4L + 2 all-reduces of activations and 2 of the loss, or one of all gradients."""
    if kind == "data":
        count = parameters(MODEL).total
        return comms.ring_all_reduce(count, 4, nproc).time(SLOW.latency_s, SLOW.bandwidth_bytes_per_s)
    cost = predict.cost(calls(Setup(nproc, rows=rows)), nproc)
    return cost.time(SLOW.latency_s, SLOW.bandwidth_bytes_per_s)


def equal_tokens(config: ModelConfig) -> float:
    """Tokens at which the layers' 4L all-reduces of tokens · hidden numbers send what one of all parameters does.

    3 h for a deep model of 12 h² weights per layer.
    """
    return parameters(config).total / (4 * config.num_layers * config.hidden_size)


# A pair that is none: the column layer's output is gathered, then cut again for the row layer.


class _GatherOutput(torch.autograd.Function):
    """[n, f/t] -> [n, f]; backward this rank's columns."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return torch.cat(group.all_gather(x.contiguous()).chunk(group.world_size), dim=1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return gradient.chunk(ctx.group.world_size, dim=1)[ctx.group.rank].contiguous(), None


class _CutInput(torch.autograd.Function):
    """[n, f] -> [n, f/t]; backward the columns of all ranks are gathered."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.world_size, dim=1)[group.rank].contiguous()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return torch.cat(ctx.group.all_gather(gradient.contiguous()).chunk(ctx.group.world_size), dim=1), None


def pairs(group: Group, tokens: int = 32, hidden: int = 16) -> dict[str, tuple[int, int]]:
    """Bytes that rank 0 sends forward and backward through column, GELU, row: paired, and with a gather between."""
    inner, found = 4 * hidden, {}
    into, out = torch.randn(inner // group.world_size, hidden), torch.randn(hidden, inner // group.world_size)
    for name in ("paired", "gathered"):
        x = torch.randn(tokens, hidden, requires_grad=True)
        with measure.ledger() as forward:
            y = copy_to(x, group) @ into.T
            if name == "gathered":
                y = _CutInput.apply(F.gelu(_GatherOutput.apply(y, group)), group)
            else:
                y = F.gelu(y)
            y = reduce_from(y @ out.T, group)
        with measure.ledger() as backward:
            y.sum().backward()
        found[name] = (forward.bytes(), backward.bytes())
    return found
