"""Statements about tensor and sequence parallelism."""

import torch

from course.kit.receipts import Row, row
from course.shared.statement import at, claim, computed
from minillm.comm import launch
from minillm.measure import ledger
from minillm.parallel import ColumnParallelLinear, RowParallelLinear
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.serving import decode_seconds
from minillm.predict.training import tensor

MEGATRON = "Shoeybi et al. 2019: https://arxiv.org/abs/1909.08053"
SEQUENCE = "Korthikanti et al. 2022: https://arxiv.org/abs/2205.05198"


@claim(
    "tensor parallel",
    "A column-parallel and the row-parallel layer behind it need one all-reduce in forward and one in backward.",
    "true",
    "Forward's belongs to the row layer; backward's to the column layer, whose input's gradient is a sum.",
    "if the input needs no gradient, backward has none",
    at(MEGATRON, "section 3"),
)
def one_all_reduce_each_way() -> list[Row]:
    forward, backward = launch(_column_row, 2)[0]
    return [row("all-reduces forward, column then row, 2 real ranks", 1, forward), row("backward", 1, backward)]


def _column_row(group) -> tuple[int, int]:
    """All-reduces in forward and in backward of one column and one row layer."""
    torch.manual_seed(0)
    first = ColumnParallelLinear(8, 16, group=group)
    second = RowParallelLinear(16, 8, group=group)
    x = torch.randn(2, 3, 8, requires_grad=True)
    with ledger() as forward:
        out = second(first(x))
    with ledger() as backward:
        out.sum().backward()
    return forward.calls["all_reduce"], backward.calls["all_reduce"]


@claim(
    "tensor parallel",
    "The bytes that tensor parallelism sends grow with the tokens and not with the width of the MLP.",
    "true",
    "It sends activations. Four times the tokens are four times the bytes, whatever the width of the MLP.",
    "never; fully sharded data parallelism sends weights",
    at(MEGATRON, "section 3"),
)
def tensor_sends_activations() -> list[Row]:
    from minillm.model import ModelConfig

    def sent(batch: int, intermediate: int) -> int:
        shape = ModelConfig(256, 64, intermediate, 4, 4)
        return sum(
            call.cost(2).sent_per_rank[0] for call in tensor.microbatch(shape, batch, 32) if call.part == "layers"
        )

    return [
        computed("bytes with four times the tokens", 4 * sent(1, 192), sent(4, 192), "B"),
        computed("bytes with an MLP four times as wide", sent(1, 192), sent(1, 768), "B"),
    ]


@claim(
    "tensor parallel",
    "LayerNorm under sequence parallelism needs communication.",
    "depends",
    "Not for activations: it works on each token alone. Its weight's gradient needs one all-reduce.",
    "for the gradient of its weight",
    at(SEQUENCE, "section 4.2.2"),
)
def layer_norm_communicates() -> list[Row]:
    torch.manual_seed(0)
    x, norm = torch.randn(8, 4, dtype=torch.float64), torch.nn.LayerNorm(4, dtype=torch.float64)
    parts = torch.cat([norm(part) for part in x.chunk(2)])
    norm(x).pow(2).sum().backward()
    whole, norm.weight.grad = norm.weight.grad.clone(), None
    norm(x.chunk(2)[0]).pow(2).sum().backward()
    return [
        row("outputs of shards equal the whole's", True, torch.equal(parts, norm(x))),
        row("one shard's weight gradient is the whole's", False, torch.allclose(norm.weight.grad, whole)),
    ]


@claim(
    "tensor parallel",
    "Sequence parallelism costs more bytes than tensor parallelism alone.",
    "depends",
    "A reduce-scatter and an all-gather are an all-reduce. But if a region's input is kept sharded, which "
    "saves its memory, backward gathers it again: a quarter more.",
    "inputs that are gathered again in backward (Korthikanti et al., section 4.2.2, and minillm's default)",
    at(SEQUENCE, "section 4.2.2"),
)
def bytes_of_sequence_parallelism() -> list[Row]:
    from minillm.model import ModelConfig

    shape = ModelConfig(256, 64, 192, 4, 4)

    def sent(**settings: bool) -> int:
        calls = [call for call in tensor.microbatch(shape, 2, 32, **settings) if call.part == "layers"]
        return tensor.cost(calls, 4).sent_per_rank[0]

    plain = sent(sequence=False)
    return [
        computed(
            "inputs kept whole: bytes against tensor parallelism", 1.0, sent(sequence=True, regather=False) / plain
        ),
        computed("inputs gathered again in backward", 1.25, sent(sequence=True, regather=True) / plain),
    ]


@claim(
    "tensor parallel",
    "Tensor parallelism raises the latency of a request.",
    "depends",
    "Each rank reads 1/t of the weights, and every layer waits for two all-reduces: which weighs more depends "
    "on the model and on how long a small all-reduce takes.",
    "slow all-reduces, or models so small that these dominate a step",
    "Pope et al. 2022: https://arxiv.org/abs/2211.05102",
)
def latency_of_tensor_parallelism() -> list[Row]:
    def steps(model: str, micros: float, *ranks: int) -> list[float]:
        """Milliseconds of a decode step of one sequence on so many H100s, if a small all-reduce takes `micros`."""
        machine = cluster("h100", 8, latency=(micros * 1e-6, micros * 1e-6))
        return [round(1e3 * decode_seconds(architecture(model), machine, each), 1) for each in ranks]

    return [
        computed("ms of a step of 70B, all-reduces of 20 µs: TP 2, TP 8", [25.3, 9.5], steps("llama-3-70b", 20, 2, 8)),
        computed("8B, 20 µs: TP 1, TP 8", [5.2, 2.3], steps("llama-3-8b", 20, 1, 8)),
        computed("    50 µs", [5.2, 4.2], steps("llama-3-8b", 50, 1, 8)),
        computed("    100 µs, as over a slow network", [5.2, 7.4], steps("llama-3-8b", 100, 1, 8)),
    ]


@claim(
    "tensor parallel",
    "Megatron's sequence parallelism has no all-reduce of activations in its layers.",
    "true",
    "An all-gather stands before each region and a reduce-scatter behind it; minillm gathers a region's input "
    "again in backward.",
    "never; without sequence parallelism there are four all-reduces per layer",
    "Korthikanti et al. 2022, section 4.2.2: https://arxiv.org/abs/2205.05198",
)
def sequence_parallel_all_reduces() -> list[Row]:
    from minillm.model import ModelConfig
    from minillm.predict.training import tensor

    shape = ModelConfig(256, 64, 192, 4, 4)
    calls = tensor.count([c for c in tensor.microbatch(shape, 2, 32, sequence=True) if c.part == "layers"])
    return [
        computed("all-reduces in the layers", 0, calls["all_reduce"]),
        computed(
            "all-gathers and reduce-scatters, 4 layers, both passes",
            [24, 16],
            [calls["all_gather"], calls["reduce_scatter"]],
        ),
    ]
