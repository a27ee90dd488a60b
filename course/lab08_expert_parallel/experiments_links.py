"""Lab 08's clocks. On ranks whose experts' work, and where it says so whose links, are emulated: the fullest rank, and
shared experts computed while rows travel. On this machine's core, really computed: few tokens for many experts."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course.lab08_expert_parallel.experiments import EXPERTS, HIDDEN, TOP_K, WORLD, balanced_choice
from course.shared.measuring import one_thread
from minillm.comm import Group, Link, launch
from minillm.model import ModelConfig, MoEConfig
from minillm.model.moe import MoE
from minillm.model.transformer import MLP, mixture
from minillm.parallel.expert_parallel import ExpertDispatch
from minillm.predict.training import moe

ROW_S, ROWS_PER_RANK, FULLEST = 2e-3, 32, (1.0, 1.5, 2.0, 3.0)  # an expert's seconds per row; fullest rank / mean
JOURNEY_S, SHARED_S, WORK_S, TRAVELLERS = 0.08, 0.06, 0.02, 64
REPEATS = 4


# The fullest rank.


def skewed_choice(fullest: float, rank: int) -> Tensor:
    """[ROWS_PER_RANK, 1]: experts of this rank's tokens, so that rank 0 gets `fullest` times the mean, the others the
    rest equally."""
    total, each = WORLD * ROWS_PER_RANK, EXPERTS // WORLD
    hot = round(fullest * ROWS_PER_RANK)
    token = torch.arange(rank, total, WORLD)
    elsewhere = each + (token - hot) % (EXPERTS - each)
    return torch.where(token < hot, token % each, elsewhere)[:, None]


def loads(fullest: float) -> list[int]:
    """Rows that each rank gets."""
    chosen = torch.cat([skewed_choice(fullest, rank) for rank in range(WORLD)]).flatten()
    return moe.rank_loads(torch.bincount(chosen, minlength=EXPERTS).tolist(), WORLD)


def sleeping_experts(seconds_per_row: float) -> Callable[..., Tensor]:
    """Experts that take so long for each row."""

    def compute(rows: Tensor, *_: Any) -> Tensor:
        time.sleep(seconds_per_row * len(rows))
        return rows

    return compute


def time_by_load(group: Group) -> list[float]:
    """Seconds of a layer until the last rank is done, by how full the fullest rank is: the best of some."""
    torch.set_num_threads(1)
    x, weights = torch.randn(ROWS_PER_RANK, HIDDEN), torch.ones(ROWS_PER_RANK, 1)
    dispatch, experts = ExpertDispatch(group, EXPERTS), sleeping_experts(ROW_S)
    return [
        _best(group, lambda at=at: dispatch(experts, x, skewed_choice(at, group.rank), weights)()) for at in FULLEST
    ]


def _best(group: Group, layer: Callable[[], Tensor]) -> float:
    times = []
    with torch.no_grad():
        layer()  # connections are made, and not timed
        for _ in range(REPEATS):
            group.barrier()
            start = time.monotonic()
            layer()
            times.append(max(group.gather_objects(time.monotonic() - start)))
    return min(times)


@dataclass(frozen=True)
class Load:
    """A layer: the fullest rank's rows over the mean; seconds by the formula and measured."""

    fullest: float
    predicted_s: float
    measured_s: float


def by_load() -> list[Load]:
    measured = launch(time_by_load, WORLD, device="cpu")[0]
    rows = [loads(fullest) for fullest in FULLEST]
    return [
        Load(moe.imbalance(each), moe.layer_seconds(each, ROW_S), seconds)
        for each, seconds in zip(rows, measured, strict=True)
    ]


# Shared experts.


@dataclass(frozen=True)
class Overlap:
    """Seconds of a layer's forward: by the formula and measured."""

    predicted_s: float
    measured_s: float


def time_shared(group: Group) -> dict[str, float]:
    """A layer without shared experts, with them behind the routed ones, and with them while rows travel."""
    torch.set_num_threads(1)
    x, weights = torch.randn(TRAVELLERS, HIDDEN), torch.full((TRAVELLERS, TOP_K), 1 / TOP_K)
    dispatch = ExpertDispatch(group, EXPERTS)
    how = sleeping_experts(WORK_S / (TRAVELLERS * TOP_K)), x, balanced_choice(TRAVELLERS), weights

    def shared() -> Tensor:
        time.sleep(SHARED_S)
        return x

    def beside() -> Tensor:
        answer = dispatch(*how)
        y = shared()
        return answer() + y

    return {
        "no shared experts": _best(group, lambda: dispatch(*how)()),
        "shared experts afterwards": _best(group, lambda: dispatch(*how)() + shared()),
        "shared experts while rows travel": _best(group, beside),
    }


def overlap() -> dict[str, Overlap]:
    one_way = moe.all_to_all_bytes(TRAVELLERS, TOP_K, HIDDEN, 4, WORLD)
    ranks = launch(time_shared, WORLD, link=Link(0.0, one_way / JOURNEY_S), device="cpu")
    routed = 2 * JOURNEY_S + WORK_S
    due = (routed, routed + SHARED_S, routed + max(0.0, SHARED_S - JOURNEY_S))
    return {name: Overlap(at, seconds) for at, (name, seconds) in zip(due, ranks[0].items(), strict=True)}


# Few tokens.

FEW = {8: 30, 64: 10, 1024: 3}  # tokens: repetitions
WIDE = ModelConfig(8, 256, 1024, 1, 4, moe=MoEConfig(32, 2, 512))


@dataclass(frozen=True)
class FewTokens:
    """touched: experts that any of the tokens chose; CPU seconds of the layer, and of an MLP of the same FLOPs."""

    touched: int
    experts_s: float
    dense_s: float


@one_thread()
@torch.no_grad()
def few_tokens() -> dict[int, FewTokens]:
    """By number of tokens, on one core: a layer of 32 experts, and the MLP with as many active weights."""
    draw = torch.Generator().manual_seed(0)
    layer, mlp = mixture(WIDE, 0), MLP(WIDE)
    for parameter in (*layer.parameters(), *mlp.parameters()):
        parameter.normal_(0, 0.05, generator=draw)
    found = {}
    for tokens, repetitions in FEW.items():
        x = torch.randn(1, tokens, WIDE.hidden_size, generator=draw)
        touched = layer.router(x).experts.unique().numel()
        times = [_alternate(layer, mlp, x) for _ in range(repetitions)]
        found[tokens] = FewTokens(touched, *(min(column) for column in zip(*times, strict=True)))
    return found


def _alternate(layer: MoE, mlp: MLP, x: Tensor) -> tuple[float, float]:
    seconds = []
    for each in (layer, mlp):
        start = time.process_time()
        each(x)
        seconds.append(time.process_time() - start)
    return seconds[0], seconds[1]


def touched_formula(tokens: int) -> float:
    """Experts that at least one of `tokens` tokens chooses, at random: E · (1 - (1 - k/E)^tokens)."""
    count, k = WIDE.moe.num_experts, WIDE.moe.top_k
    return count * (1 - (1 - k / count) ** tokens)
