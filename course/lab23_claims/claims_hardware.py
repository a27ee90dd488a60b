"""Statements about networks, memories and kernels."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from course.kit.receipts import Row, formula, row
from course.shared.statement import claim, computed
from minillm.comm import launch
from minillm.model.attention.tiled import tiled
from minillm.predict import comms, roofline
from minillm.predict.planner.clusters import DEVICES, cluster
from minillm.predict.planner.layout import path


@claim(
    "network",
    "InfiniBand HDR carries 200 GB/s.",
    "false",
    "200 Gb/s: 25 GB/s per port and direction.",
    "eight ports of a node together",
    "InfiniBand Trade Association, roadmap: https://www.infinibandta.org/infiniband-roadmap/",
)
def infiniband_hdr() -> list[Row]:
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
    "never; a flat ring in another order sends far more",
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
    "NCCL, NCCL_CROSS_NIC: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
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
    "network",
    "In a ring all-reduce each rank sends 2P(N-1)/N bytes and receives as many.",
    "true",
    "Both phases pass N-1 of N parts on; a full-duplex link does both at once.",
    "never; a link that both directions share carries twice as much",
    "Patarasuk and Yuan 2009: https://doi.org/10.1016/j.jpdc.2008.09.002",
)
def sent_and_as_much_received() -> list[Row]:
    cost = comms.ring_all_reduce(4096, 4, 4)
    return [computed("bytes on all links / ranks", 2 * 16384 * 3 / 4, cost.total_bytes / 4, "B")]


@claim(
    "network",
    "64 GPUs in nodes of 8 all-reduce 350 GB of gradients over InfiniBand in 3.5 seconds.",
    "depends",
    "Over one card per node it takes 14 to 28 s. Eight cards, which the rings of the node's eight ranks share, take 2 "
    "to 4.",
    "eight cards of 50 GB/s per node, all in use",
    "NVIDIA Quantum: https://www.nvidia.com/en-us/networking/quantum2/",
)
def gradients_in_three_seconds() -> list[Row]:
    sent = 2 * 350e9 * 63 / 64
    return [
        computed("one card per node, 25 GB/s", 28.0, sent / 25e9, "s", tolerance=0.02),
        computed("    50 GB/s", 14.0, sent / 50e9, "s", tolerance=0.02),
        computed(
            "eight cards per node at 80 %, 25 GB/s",
            4.3,
            sent / path(cluster("a100-80", 64), 1, 64).bandwidth,
            "s",
            0.01,
        ),
        computed("    50 GB/s", 2.15, sent / path(cluster("h100", 64), 1, 64).bandwidth, "s", 0.01),
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
        formula("ridge of an H100, FLOPs per byte", ridge),
        computed("    prefill of 2,048 tokens", 1560, roofline.matmul_intensity(2048, 8192, 32768, 2), tolerance=0.001),
        computed("    decoding one token", 1.0, roofline.matmul_intensity(1, 8192, 32768, 2), tolerance=0.001),
    ]


@claim(
    "kernels",
    "FlashAttention computes more FLOPs than attention that keeps its scores.",
    "depends",
    "Backward computes the scores a second time instead of reading them. But a causal mask lets it skip tiles, and "
    "then it computes fewer.",
    "without a mask",
    "Dao et al. 2022, section 3.1: https://arxiv.org/abs/2205.14135",
)
def flash_computes_more() -> list[Row]:
    (same, unmasked), (same_causal, causal) = _flops_of_tiles(causal=False), _flops_of_tiles(causal=True)
    return [
        row("the same results, without a mask and with a causal one", [True, True], [same, same_causal]),
        row("FLOPs of tiles / of all scores at once, forward and backward", 7 / 6, unmasked, tolerance=0.01),
        row("    causal, 64 tokens in tiles of 16", 0.729, causal, tolerance=0.01),
    ]


def _flops_of_tiles(*, causal: bool) -> tuple[bool, float]:
    """(whether tiles of 16 give the attention of 64 tokens, their FLOPs / those of all scores at once)"""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    places = torch.arange(64)
    positions = places if causal else torch.full((64,), 63)  # a query sees the keys up to its position
    with FlopCounterMode(display=False) as dense:
        scores = (q @ k.mT / 4).masked_fill(places > positions[:, None], float("-inf"))
        whole = scores.softmax(-1) @ v
        whole.sum().backward()
    with FlopCounterMode(display=False) as tiles:
        cut = tiled(q, k, v, positions=positions, key_positions=places, tile=16)
        cut.sum().backward()
    return torch.allclose(cut, whole, atol=1e-10), tiles.get_total_flops() / dense.get_total_flops()


@claim(
    "kernels",
    "An A100 with 80 GB reads 1,555 GB/s.",
    "false",
    "1,555 GB/s is the 40 GB card; the 80 GB card reads 2,039 as an SXM module, and 1,935 in a PCIe slot.",
    "the 40 GB card",
    "NVIDIA's A100 data sheet: https://www.nvidia.com/en-us/data-center/a100/",
)
def a100_bandwidth() -> list[Row]:
    wires = 5 * 1024  # five stacks of high-bandwidth memory; two transfers per wire and clock
    return [
        computed(
            f"GB/s of the {name} card, from its memory's {mega:,} MHz",
            DEVICES[device].bandwidth / 1e9,
            2 * mega * 1e6 * wires / 8 / 1e9,
            tolerance=1e-3,
        )
        for name, device, mega in (("80 GB (SXM)", "a100-80", 1593), ("40 GB", "a100-40", 1215))
    ]


@claim(
    "kernels",
    "An A100 is 1.73 times a V100, which proves that LLMs are bound by bandwidth.",
    "false",
    "1.73 is the ratio of the two bandwidths itself; a conclusion needs a measured speedup.",
    "if a measured speedup were 1.73 where arithmetic differs by 2.5",
    "Williams et al. 2009: https://doi.org/10.1145/1498765.1498785",
)
def ratio_proves_bandwidth() -> list[Row]:
    return [
        computed("1,555 / 900 GB/s", 1.728, 1555 / 900, tolerance=1e-3),
        computed("312 / 125 TFLOP/s", 2.5, 312 / 125, tolerance=0.01),
    ]


@claim(
    "kernels",
    "Fusing an addition and a ReLU is 1.67 times faster.",
    "depends",
    "5 tensors become 3 if both inputs are large; a bias that stays in cache makes it 4 to 2, twice as fast.",
    "inputs of equal size",
    "Williams et al. 2009: https://doi.org/10.1145/1498765.1498785",
)
def fusion_five_thirds() -> list[Row]:
    n, small = 10**6, 10**3
    both = (2 * n + n + n + n) / (2 * n + n)
    bias = (n + small + n + n + n) / (n + small + n)
    return [computed("equal sizes", 5 / 3, both), computed("with a bias in cache", 2.0, bias, tolerance=0.01)]
