"""Statements about data parallelism: what is averaged, and what it sends."""

import torch

from course.kit.receipts import Row, row
from course.lab23_claims.programs import bytes_of_a_step
from course.shared.statement import at, claim, computed
from minillm.comm import launch
from minillm.model import ModelConfig, Transformer
from minillm.parallel import NaiveDDP
from minillm.predict import comms
from minillm.predict.model import ADAM_MIXED

MEGATRON = "Narayanan et al. 2021: https://arxiv.org/abs/2104.04473"
RING = "Patarasuk and Yuan 2009: https://doi.org/10.1016/j.jpdc.2008.09.002"


@claim(
    "data parallel",
    "Data parallelism over 64 GPUs all-reduces 140 GB of gradients for a 70B model.",
    "depends",
    "Pure data parallelism would, but it cannot hold the model; with TP 8 and PP 2 a rank reduces a sixteenth.",
    "with replicas of the whole model",
    at(MEGATRON, "section 3.3"),
)
def seventy_reduces_140() -> list[Row]:
    whole, own = 140e9, 140e9 / 16
    sent = [2 * size * (n - 1) / n for size, n in ((whole, 64), (own, 4))]
    return [
        computed("bytes that a rank reduces in TP 8, PP 2, DP 4", 8.75e9, own, "B"),
        computed("bytes sent, pure data parallelism / this layout", 21.0, sent[0] / sent[1], tolerance=0.01),
    ]


@claim(
    "data parallel",
    "The idea of data parallelism is to distribute the model over the GPUs.",
    "false",
    "The data are distributed; every rank holds the whole model.",
    "sharded data parallelism does distribute it, between its uses",
    "Li et al. 2020: https://arxiv.org/abs/2006.15704",
)
def the_model_is_distributed() -> list[Row]:
    config = ModelConfig(64, 16, 32, 2, 2)
    whole = sum(parameter.numel() for parameter in Transformer(config, seed=0).parameters())
    held = launch(_held_under_data_parallelism, 2, config)
    return [row("parameters on each of 2 real ranks / of the model", [1.0, 1.0], [count / whole for count in held])]


def _held_under_data_parallelism(group, config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in NaiveDDP(Transformer(config, seed=0), group).parameters())


@claim(
    "data parallel",
    "Data parallelism helps when the model does not fit on one GPU.",
    "false",
    "Every rank holds a whole copy; only the batch is divided.",
    "sharded data parallelism (ZeRO, FSDP) does help",
    "Li et al. 2020: https://arxiv.org/abs/2006.15704",
)
def data_parallel_when_it_does_not_fit() -> list[Row]:
    one, eight = (ADAM_MIXED.per_rank(10**9, ranks, 0) for ranks in (1, 8))
    return [computed("bytes of states per rank on 8 ranks / on 1", 1.0, eight / one)]


@claim(
    "data parallel",
    "In a ring all-reduce each rank sends less than twice the tensor, however many ranks there are.",
    "true",
    "2P(N-1)/N, for a tensor of P bytes, tends to 2P; only the number of rounds grows, and with it the latency.",
    "counted over all links together, where it grows with N",
    RING,
)
def bytes_stay_below_twice() -> list[Row]:
    sent = {n: comms.ring_all_reduce(1024 * n, 4, n).sent_per_rank[0] / (4096 * n) for n in (2, 8, 1024)}
    return [computed(f"bytes sent per rank on {n:,} ranks / P", 2 * (n - 1) / n, share) for n, share in sent.items()]


@claim(
    "data parallel",
    "In data parallelism the bytes that a rank sends per step do not depend on the batch size.",
    "true",
    "Gradients are as large as the weights, whatever was averaged.",
    "never; what tensor, context and expert parallelism send are activations, which grow with the batch",
    "Li et al. 2020: https://arxiv.org/abs/2006.15704",
)
def bytes_do_not_depend_on_batch() -> list[Row]:
    whole = 4 * 16 * 16
    sent = {batch: launch(bytes_of_a_step, 2, batch)[0] for batch in (1, 8)}
    return [
        row(f"bytes that one of 2 real ranks sends, batch of {batch}", whole, each, "B") for batch, each in sent.items()
    ]


@claim(
    "data parallel",
    "The mean of the ranks' mean losses is the loss of the whole batch.",
    "false",
    "The tokens of short shards count too much.",
    "if all ranks have equally many tokens, or the same loss",
    "Ott et al. 2018 divide by all tokens: https://arxiv.org/abs/1806.00187",
)
def mean_of_means() -> list[Row]:
    losses, rows = [2.0, 4.0], []
    for name, tokens, off in (("8 tokens on each of 2 ranks", [8, 8], 1.0), ("12 and 4 tokens", [12, 4], 1.2)):
        whole = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
        mean = sum(losses) / len(losses)
        rows.append(computed(f"{name}: mean of means / loss of the batch", off, mean / whole, tolerance=1e-9))
    return rows


@claim(
    "data parallel",
    "Averaging over 4 ranks gives other gradients than one process with the whole batch, because of staleness.",
    "false",
    "Synchronous averaging has no staleness; the difference is rounding.",
    "asynchronous parameter servers do have it",
    "Li et al. 2020: https://arxiv.org/abs/2006.15704",
)
def averaging_is_stale() -> list[Row]:
    error = max(launch(_average_of_shards, 4))
    return [row("worst difference on 4 real ranks, float64, below 1e-12", True, error < 1e-12)]


def _average_of_shards(group) -> float:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True), torch.randn(12, 8, dtype=torch.float64)
    whole = torch.autograd.grad((x @ weight).pow(2).mean(), weight)[0]
    own = x.chunk(group.world_size)[group.rank]
    mine = torch.autograd.grad((own @ weight).pow(2).mean(), weight)[0]
    return (group.all_reduce(mine) / group.world_size - whole).abs().max().item()
