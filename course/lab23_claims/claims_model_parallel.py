"""Statements about tensor, sequence, pipeline and expert parallelism and about networks, and what decides them."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from course.kit.receipts import Row, formula, row
from course.shared.statement import claim, computed
from minillm.comm import launch
from minillm.measure import ledger
from minillm.model.attention.tiled import tiled
from minillm.parallel import ColumnParallelLinear, RowParallelLinear
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from minillm.parallel.pipeline_parallel.schedule.simulate import simulate
from minillm.predict import comms, roofline
from minillm.predict.planner.clusters import DEVICES, cluster
from minillm.predict.planner.layout import path
from minillm.predict.training import pipeline, tensor

GPIPE = "Huang et al. 2019: https://arxiv.org/abs/1811.06965"
MEGATRON = "Shoeybi et al. 2019: https://arxiv.org/abs/1909.08053"
INTERLEAVED = "Narayanan et al. 2021: https://arxiv.org/abs/2104.04473"
SEQUENCE = "Korthikanti et al. 2022: https://arxiv.org/abs/2205.05198"
NVIDIA = "NVIDIA's data sheets: https://www.nvidia.com/en-us/data-center/h100/"


@claim(
    "pipeline",
    "The bubble is (stages - 1) / microbatches of the step.",
    "false",
    "That is idle over useful time; of the step it is (n-1)/(M+n-1).",
    "many microbatches, where both agree",
    GPIPE,
)
def bubble_over_microbatches() -> list[Row]:
    idle = simulate(SCHEDULES["gpipe"](4, 8)).idle_share
    return [
        row("idle share of 4 stages and 8 microbatches, simulated", 3 / 11, idle, tolerance=1e-6, kind="simulated"),
        formula("claimed", 3 / 8),
    ]


@claim(
    "pipeline",
    "1F1B idles as much as GPipe.",
    "true",
    "The bubble is the same; what shrinks is the number of microbatches in flight.",
    "with interleaved or zero-bubble schedules, which do shrink it",
    INTERLEAVED,
)
def one_f_one_b_and_gpipe_idle_alike() -> list[Row]:
    gpipe, ours = (simulate(SCHEDULES[name](4, 8)) for name in ("gpipe", "1f1b"))
    return [
        row("steps' lengths", gpipe.makespan, ours.makespan, kind="simulated"),
        row(
            "in flight on stage 0: GPipe 8, 1F1B 4",
            [8, 4],
            [gpipe.peak_in_flight[0], ours.peak_in_flight[0]],
            kind="simulated",
        ),
    ]


@claim(
    "pipeline",
    "1F1B needs several versions of the weights.",
    "depends",
    "As PipeDream introduced it, yes: n - s versions on stage s. With a flush in every step one is enough, and "
    "gradients are exact.",
    "asynchronous training, without a flush",
    "Narayanan et al. 2019: https://arxiv.org/abs/1806.03377",
)
def versions_of_one_f_one_b() -> list[Row]:
    kinds = _kinds(SCHEDULES["1f1b"](4, 8).orders[0])
    return [
        computed("microbatches forward on stage 0 within a step", 8, sum(kind == "F" for kind in kinds)),
        computed(
            "all of them backward before it ends, so no weight is updated in between",
            8,
            sum(kind == "B" for kind in kinds),
        ),
        computed("versions that asynchronous PipeDream keeps there", 4, pipeline.weight_versions(4, 0)),
    ]


@claim(
    "pipeline",
    "Interleaving is memory-efficient and time-efficient.",
    "depends",
    "It shortens the bubble, and holds more than plain 1F1B; it is lean against GPipe only.",
    "compared with GPipe",
    INTERLEAVED,
)
def interleaving_is_lean() -> list[Row]:
    plain, cut = simulate(SCHEDULES["1f1b"](4, 8)), simulate(SCHEDULES["interleaved"](4, 8))
    return [
        row("idle share falls", True, cut.idle_share < plain.idle_share, kind="simulated"),
        row("stages' worth in flight on stage 0, 1F1B", 4, plain.peak_in_flight[0], kind="simulated"),
        computed("    interleaved with 2 chunks", 5.5, pipeline.in_flight_interleaved(4, 2, 8)),
    ]


@claim(
    "pipeline",
    "PP = 2 means that the model has 4 stages.",
    "depends",
    "Two ranks are two stages, unless each has two chunks (interleaved).",
    "virtual stages",
    INTERLEAVED,
)
def two_ranks_four_stages() -> list[Row]:
    plain, cut = SCHEDULES["1f1b"](2, 4), SCHEDULES["interleaved"](2, 4)
    return [
        computed("parts, 1F1B on 2 ranks", 2, plain.num_parts),
        computed("parts, interleaved on 2 ranks", 4, cut.num_parts),
    ]


@claim(
    "pipeline",
    "3(n-1) microbatches keep the bubble of n stages at a quarter.",
    "true",
    "(n-1)/(M+n-1) is 1/4 there; the rule of 4n gives 11 % on 2 stages and 18 % on 8.",
    "with v chunks per stage a v-th of them is enough",
    GPIPE,
)
def three_microbatches_per_stage() -> list[Row]:
    return [
        computed("needed for 8 stages", 21, pipeline.microbatches_needed(8, 0.25)),
        computed("idle share of 8 stages with 21", 0.25, pipeline.idle_share(8, 21)),
        computed("    with 20 it is more than a quarter", True, pipeline.idle_share(8, 20) > 0.25),
        computed("    with 4n on 2, 4 and 8 stages", [0.111, 0.158, 0.179], _idle_with_4n()),
    ]


def _idle_with_4n() -> list[float]:
    return [round(pipeline.idle_share(stages, 4 * stages), 3) for stages in (2, 4, 8)]


@claim(
    "pipeline",
    "A pipeline sends as many bytes in a step whatever the number of microbatches.",
    "true",
    "There are more messages, and each is smaller: 2(n-1) times the batch's activations in all.",
    "interleaving with v chunks, which sends about v times as much",
    GPIPE,
)
def microbatches_leave_the_bytes() -> list[Row]:
    def sent(microbatches: int) -> float:
        """Of all stages: an activation behind every forward but the last stage's, a gradient behind every backward."""
        each = 8 * 16 * 32 * 4 / microbatches
        orders = SCHEDULES["1f1b"](4, microbatches).orders
        forward = sum(_kinds(order).count("F") for order in orders[:-1])
        return (forward + sum(_kinds(order).count("B") for order in orders[1:])) * each

    expected = pipeline.sent_bytes(4, 8, 16, 32, 4)
    return [
        row(f"bytes of a step of 4 stages, {count} microbatches", expected, sent(count), "B", kind="simulated")
        for count in (4, 8)
    ]


def _kinds(order) -> list[str]:
    """F and B in the order of one rank's schedule."""
    return [action.kind for step in order for action in (step if isinstance(step, tuple) else (step,))]


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
    "A column-parallel and the row-parallel layer behind it need one all-reduce in forward and one in backward.",
    "true",
    "Forward's belongs to the row layer; backward's to the column layer, whose input's gradient is a sum.",
    "if the input needs no gradient, backward has none",
    MEGATRON,
)
def one_all_reduce_each_way() -> list[Row]:
    forward, backward = launch(_column_row, 2)[0]
    return [row("all-reduces forward, column then row, 2 real ranks", 1, forward), row("backward", 1, backward)]


@claim(
    "tensor parallel",
    "The bytes that tensor parallelism sends grow with the tokens and not with the width of the MLP.",
    "true",
    "It sends activations. Twice the tokens are twice the bytes, whatever the width of the MLP.",
    "fully sharded data parallelism, which sends weights",
    MEGATRON,
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
    "Not for activations, it works per token; its weight's gradient needs one all-reduce.",
    "the gradient of its weight",
    SEQUENCE,
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
    SEQUENCE,
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
    def step(parameters: float, layers: int, ranks: int, all_reduce_s: float) -> float:
        """Seconds of a decode step of one sequence: the rank's weights, and two all-reduces per layer."""
        waits = 2 * layers * all_reduce_s if ranks > 1 else 0.0
        return 2 * parameters / ranks / DEVICES["h100"].bandwidth + waits

    alone = {"8B": step(8e9, 32, 1, 0), "70B": step(70e9, 80, 1, 0)}
    return [
        computed("70B, all-reduces of 20 µs: TP 8 makes a step shorter", True, step(70e9, 80, 8, 2e-5) < alone["70B"]),
        computed("8B, 20 µs: shorter", True, step(8e9, 32, 8, 2e-5) < alone["8B"]),
        computed("8B, 100 µs: shorter", False, step(8e9, 32, 8, 1e-4) < alone["8B"]),
        formula("milliseconds of a step of 8B alone", alone["8B"] * 1e3),
    ]


@claim(
    "network",
    "InfiniBand HDR carries 200 GB/s.",
    "false",
    "200 Gb/s: 25 GB/s per port and direction.",
    "eight ports of a node together",
    "InfiniBand Trade Association, roadmap: https://www.infinibandta.org/infiniband-roadmap/",
)
def infiniband_in_gigabytes() -> list[Row]:
    return [computed("bytes per second of 200 Gb/s", 25e9, 200e9 / 8, "B/s")]


@claim(
    "network",
    "All-to-all and all-reduce are the same operation with different names.",
    "false",
    "An all-to-all sends a different part to each rank and adds nothing: half the bytes of an all-reduce.",
    "never",
    "Thakur et al. 2005: https://doi.org/10.1177/1094342005051521",
)
def all_to_all_is_all_reduce() -> list[Row]:
    of_rank = launch(_both_operations, 2)
    return [
        row("all-to-all on rank 0 of 2 real ranks", [0.0, 10.0], of_rank[0][0]),
        row("all-reduce", [10.0, 12.0], of_rank[0][1]),
        computed(
            "bytes, all-to-all / all-reduce",
            0.5,
            comms.pairwise_all_to_all(8, 4, 4).sent_per_rank[0] / comms.ring_all_reduce(8, 4, 4).sent_per_rank[0],
        ),
    ]


def _both_operations(group) -> tuple[list[float], list[float]]:
    x = torch.tensor([0.0, 1.0]) + 10 * group.rank
    return group.all_to_all(x.clone()).tolist(), group.all_reduce(x.clone()).tolist()


@claim(
    "network",
    "A two-level all-reduce sends about as many bytes between nodes as a flat ring in the order of the nodes.",
    "true",
    "1.75 against 1.97 times the tensor on 8 nodes of 8. What it saves are rounds, and the fast links carry the rest.",
    "a flat ring whose neighbours are not neighbours in the network sends far more",
    "Cho et al. 2019: https://doi.org/10.1147/JRD.2019.2947013",
)
def two_levels_send_as_much() -> list[Row]:
    two = comms.hierarchical_all_reduce(64 * 64, 4, 64, 8)
    flat = comms.flat_ring_crossing_bytes(64 * 64, 4, 64, 8)
    return [
        computed(
            "crossing bytes, two levels / flat ring",
            1.75 / 1.96875,
            two.crossing_bytes_per_node[0] / flat[0],
            tolerance=0.01,
        ),
        computed(
            "rounds of a flat ring / of two levels",
            126 / 28,
            comms.ring_all_reduce(4096, 4, 64).rounds / two.total.rounds,
        ),
    ]


@claim(
    "network",
    "NVLink on an A100 moves 600 GB/s.",
    "depends",
    "300 GB/s in each direction; 600 is both together.",
    "counting both directions",
    "NVIDIA's A100 data sheet: https://www.nvidia.com/en-us/data-center/a100/",
)
def nvlink_six_hundred() -> list[Row]:
    return [computed("one direction", 600e9 / 2, DEVICES["a100-80"].link, "B/s")]


@claim(
    "network",
    "Sixteen ranks over two nodes have the bandwidth of one network card.",
    "depends",
    "Rings can use every rank's card: eight times as much.",
    "one rank per node in the group, or a library that uses one card",
    "NCCL: https://docs.nvidia.com/deeplearning/nccl/",
)
def one_card_for_all() -> list[Row]:
    machine = cluster("h100", 16)
    return [
        computed(
            "16 ranks, 8 per node, against one rank per node",
            8.0,
            path(machine, 1, 16).bandwidth / path(machine, 8, 2).bandwidth,
        )
    ]


@claim(
    "kernels",
    "Most operations of an LLM are limited by memory.",
    "depends",
    "Decoding is; the matrix products of training and prefill are limited by arithmetic.",
    "few tokens per weight",
    "Williams et al. 2009: https://doi.org/10.1145/1498765.1498785",
)
def mostly_memory_bound() -> list[Row]:
    ridge = roofline.ridge_point(DEVICES["h100"].flops, DEVICES["h100"].bandwidth)
    return [
        computed(
            "prefill of 2,048 tokens above the ridge", True, roofline.matmul_intensity(2048, 8192, 32768, 2) > ridge
        ),
        computed("decoding one token above it", False, roofline.matmul_intensity(1, 8192, 32768, 2) > ridge),
    ]


@claim(
    "kernels",
    "FlashAttention computes more FLOPs than attention that keeps its scores, and is faster.",
    "true",
    "It moves fewer bytes; backward computes the scores a second time.",
    "a causal mask lets it skip tiles, and then it computes fewer",
    "Dao et al. 2022: https://arxiv.org/abs/2205.14135",
)
def flash_computes_more() -> list[Row]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as dense:
        scores = (q @ k.mT / 4).masked_fill(torch.ones(64, 64).triu(1).bool(), float("-inf"))
        whole = scores.softmax(-1) @ v
        whole.sum().backward()
    with FlopCounterMode(display=False) as tiles:
        cut = tiled(q, k, v, tile=64)
        cut.sum().backward()
    return [
        row("the same result", True, torch.allclose(cut, whole, atol=1e-10)),
        row(
            "FLOPs of tiles / of all scores at once, forward and backward",
            7 / 6,
            tiles.get_total_flops() / dense.get_total_flops(),
            tolerance=0.01,
        ),
    ]
